//! A panel of horizontal bars: one measure of a point, one bar per peer.

use anyhow::Result;
use plotters::style::Color;

use super::canvas::{
    Anchor, Canvas, FAINT, GRID, INK, Type, clip, colour, is_subject, name_width, pixel,
};
use super::{Frame, TITLE_HEIGHT};
use crate::report::figures::figure;
use crate::report::model::{Measure, PathReport};
use crate::report::text::better;

const ROW: i32 = 27;
const BAR: i32 = 15;
const FIGURES: i32 = 66;

/// The height of a panel for so many peers.
#[must_use]
pub fn height(paths: &[PathReport]) -> i32 {
    TITLE_HEIGHT + ROW * i32::try_from(paths.len()).unwrap_or(0)
}

/// Draws the median of each peer as a bar from zero, lowest to highest as a whisker.
///
/// # Errors
/// It cannot be drawn.
pub fn draw(
    canvas: &Canvas<'_>,
    frame: Frame,
    measure: &Measure,
    paths: &[PathReport],
) -> Result<()> {
    let title = format!("{}, {}", measure.label, measure.unit);
    let title = clip(&title, frame.width, 13);
    canvas.text((frame.x, frame.y + 8), Type::of(13).bold(), &title)?;
    let way = better(measure.better);
    canvas.text((frame.x, frame.y + 24), Type::of(11).colour(FAINT), way)?;
    let spreads = paths
        .iter()
        .filter_map(|path| path.spread.get(&measure.key));
    let highest = spreads.map(|spread| spread.max).fold(0.0, f64::max);
    let names = name_width(paths.iter().map(|path| path.peer.as_str()));
    let zero = frame.x + names + 8;
    let width = f64::from(frame.width - names - 8 - FIGURES);
    let at = |value: f64| {
        let share = if highest > 0.0 { value / highest } else { 0.0 };
        zero + pixel(width * share.clamp(0.0, 1.0))
    };
    let top = frame.y + TITLE_HEIGHT;
    for (path, y) in paths.iter().zip((top + ROW / 2..).step_by(ROW as usize)) {
        let mut name = Type::of(12).anchor(Anchor::Right);
        name.bold = is_subject(&path.peer);
        canvas.text((zero - 8, y), name, &clip(&path.peer, names, 12))?;
        let Some(spread) = path.spread.get(&measure.key) else {
            let why = match path.left_out {
                Some(_) => "left out",
                None => "no figure",
            };
            canvas.text((zero + 6, y), Type::of(11).colour(FAINT), why)?;
            continue;
        };
        let (top, bottom) = (y - BAR / 2, y + BAR / 2);
        canvas.bar((zero, top), (at(spread.median), bottom), colour(&path.peer))?;
        let (min, max) = (at(spread.min), at(spread.max));
        let ink = INK.to_rgba();
        canvas.line(vec![(min, y), (max, y)], ink, 1)?;
        for end in [min, max] {
            canvas.line(vec![(end, y - 4), (end, y + 4)], ink, 1)?;
        }
        let mut style = Type::of(12);
        style.bold = is_subject(&path.peer);
        canvas.text((max + 7, y), style, &figure(spread.median))?;
    }
    let bottom = frame.y + height(paths);
    canvas.line(vec![(zero, top), (zero, bottom)], GRID.mix(1.0), 1)
}
