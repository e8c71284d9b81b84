//! What plots are drawn with: pixels, a few shapes, and the peers' colours.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::{
    DrawingArea, FontStyle, IntoDrawingArea, IntoFont, PathElement, RGBAColor, RGBColor, Rectangle,
    SVGBackend, Text, WHITE,
};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontFamily, ShapeStyle, TextStyle};

/// For what is to be read.
pub const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
/// For what is to be read after it.
pub const FAINT: RGBColor = RGBColor(0x66, 0x66, 0x66);
/// For lines behind the figures.
pub const GRID: RGBColor = RGBColor(0xe2, 0xe2, 0xe2);

/// The palette of Okabe and Ito, which colour-blind people can tell apart, without its
/// yellow, which white swallows. gate has the strongest one, direct has none.
const PEERS: [(&str, RGBColor); 7] = [
    ("gate", RGBColor(0xd5, 0x5e, 0x00)),
    ("direct", RGBColor(0x77, 0x77, 0x77)),
    ("haproxy", RGBColor(0x00, 0x72, 0xb2)),
    ("pgbouncer", RGBColor(0x00, 0x9e, 0x73)),
    ("nginx", RGBColor(0xcc, 0x79, 0xa7)),
    ("tokio", RGBColor(0x56, 0xb4, 0xe9)),
    ("tokio-uring", RGBColor(0xe6, 0x9f, 0x00)),
];

/// For other names: from Paul Tol's muted palette.
const OTHERS: [RGBColor; 4] = [
    RGBColor(0x33, 0x22, 0x88),
    RGBColor(0x88, 0x22, 0x55),
    RGBColor(0x99, 0x99, 0x33),
    RGBColor(0x11, 0x77, 0x33),
];

/// A peer's colour, the same in every plot.
#[must_use]
pub fn colour(peer: &str) -> RGBColor {
    let known = PEERS.iter().find(|(name, _)| *name == peer);
    known.map_or_else(
        || {
            let sum: usize = peer.bytes().map(usize::from).sum();
            OTHERS[sum % OTHERS.len()]
        },
        |(_, colour)| *colour,
    )
}

/// Whether it is a peer with a colour of its own.
#[must_use]
pub fn is_known(peer: &str) -> bool {
    PEERS.iter().any(|(name, _)| *name == peer)
}

/// A colour for what is no peer, a different one for each of the first six.
#[must_use]
pub fn in_turn(index: usize) -> RGBColor {
    let coloured = PEERS.iter().filter(|(name, _)| *name != "direct");
    let colours: Vec<RGBColor> = coloured.map(|(_, colour)| *colour).collect();
    colours[index % colours.len()]
}

/// Whether it is the peer that the others are compared with.
#[must_use]
pub fn is_subject(peer: &str) -> bool {
    peer == PEERS[0].0
}

/// Which side of a text its position is at; it is always at half its height.
#[derive(Clone, Copy, Debug)]
pub enum Anchor {
    /// The text begins there.
    Left,
    /// Its middle is there.
    Middle,
    /// The text ends there.
    Right,
}

/// How a text looks.
#[derive(Clone, Copy, Debug)]
pub struct Type {
    /// Pixels.
    pub size: i32,
    /// Bold.
    pub bold: bool,
    /// Its colour.
    pub colour: RGBColor,
    /// Where it is held.
    pub anchor: Anchor,
}

impl Type {
    /// Of a size, dark, to the right of its position.
    #[must_use]
    pub fn of(size: i32) -> Self {
        Self {
            size,
            bold: false,
            colour: INK,
            anchor: Anchor::Left,
        }
    }

    /// The same, bold.
    #[must_use]
    pub fn bold(self) -> Self {
        Self { bold: true, ..self }
    }

    /// The same in another colour.
    #[must_use]
    pub fn colour(self, colour: RGBColor) -> Self {
        Self { colour, ..self }
    }

    /// The same, held elsewhere.
    #[must_use]
    pub fn anchor(self, anchor: Anchor) -> Self {
        Self { anchor, ..self }
    }
}

/// A white page.
pub struct Canvas<'a>(DrawingArea<SVGBackend<'a>, Shift>);

impl<'a> Canvas<'a> {
    /// Of a size, into a string.
    ///
    /// # Errors
    /// It cannot be drawn on.
    pub fn new(svg: &'a mut String, width: i32, height: i32) -> Result<Self> {
        let size = (width.unsigned_abs(), height.unsigned_abs());
        let area = SVGBackend::with_string(svg, size).into_drawing_area();
        // A ground of its own, so that it can be read where pages are dark.
        area.fill(&WHITE).map_err(failed)?;
        Ok(Self(area))
    }

    /// A text, whose middle is at `y`.
    ///
    /// # Errors
    /// It cannot be drawn.
    pub fn text(&self, at: (i32, i32), style: Type, text: &str) -> Result<()> {
        let h_pos = match style.anchor {
            Anchor::Left => HPos::Left,
            Anchor::Middle => HPos::Center,
            Anchor::Right => HPos::Right,
        };
        let weight = if style.bold {
            FontStyle::Bold
        } else {
            FontStyle::Normal
        };
        // The SVG backend divides by 1.24.
        let font = (FontFamily::SansSerif, f64::from(style.size) * 1.24, weight).into_font();
        let style = TextStyle::from(font)
            .color(&style.colour)
            .pos(Pos::new(h_pos, VPos::Center));
        self.0.draw(&Text::new(text, at, style)).map_err(failed)
    }

    /// A line through points.
    ///
    /// # Errors
    /// It cannot be drawn.
    pub fn line(&self, points: Vec<(i32, i32)>, colour: RGBAColor, width: u32) -> Result<()> {
        let style = ShapeStyle::from(colour).stroke_width(width);
        self.0
            .draw(&PathElement::new(points, style))
            .map_err(failed)
    }

    /// A filled rectangle.
    ///
    /// # Errors
    /// It cannot be drawn.
    pub fn bar(&self, from: (i32, i32), to: (i32, i32), colour: RGBColor) -> Result<()> {
        let bar = Rectangle::new([from, to], colour.filled());
        self.0.draw(&bar).map_err(failed)
    }

    /// Ends the drawing.
    ///
    /// # Errors
    /// It cannot be ended.
    pub fn finish(self) -> Result<()> {
        self.0.present().map_err(failed)
    }
}

/// Text cut to a width, as far as that can be told without its font.
#[must_use]
pub fn clip(text: &str, width: i32, size: i32) -> String {
    let fits = usize::try_from(width * 100 / (size * 54)).unwrap_or(0);
    if text.chars().count() <= fits {
        return text.to_owned();
    }
    let cut: String = text.chars().take(fits.saturating_sub(3)).collect();
    format!("{}...", cut.trim_end())
}

/// Longer names are cut, in pixels.
pub const MAX_NAME: i32 = 170;

/// The room that names need, at most [`MAX_NAME`].
#[must_use]
pub fn name_width<'a>(names: impl Iterator<Item = &'a str>) -> i32 {
    let longest = names.map(|name| name.chars().count()).max().unwrap_or(0);
    (i32::try_from(longest).unwrap_or(MAX_NAME).min(MAX_NAME) * 15 / 2 + 4).min(MAX_NAME)
}

/// A position on the page, between pixels, as a pixel.
#[expect(clippy::cast_possible_truncation, reason = "a page is small")]
#[must_use]
pub fn pixel(position: f64) -> i32 {
    position.round() as i32
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("draw a plot: {error}")
}
