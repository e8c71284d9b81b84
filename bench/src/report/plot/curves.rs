//! A panel of percentile curves, logarithmic on both axes.

use anyhow::Result;
use plotters::style::{Color, RGBColor};

use super::canvas::{
    Anchor, Canvas, FAINT, GRID, MAX_NAME, Type, clip, is_subject, name_width, pixel,
};
use super::{Frame, TITLE_HEIGHT};
use crate::report::figures::{figure, percentile};
use crate::report::histogram::supported;

const VALUES: i32 = 52;
const PERCENTS: i32 = 22;
const LINE: i32 = 14;

/// Where the x axis has a line.
const TICKS: [f64; 6] = [50.0, 75.0, 90.0, 99.0, 99.9, 99.99];

/// One line of the panel.
#[derive(Clone, Debug)]
pub struct Curve {
    /// The peer, or the file.
    pub name: String,
    /// Of the line and its name.
    pub colour: RGBColor,
    /// How many values it is of.
    pub count: u64,
    /// Percentile from 50 to 99.99, and microseconds.
    pub points: Vec<(f64, f64)>,
}

/// Draws the curves; where fewer than ten values are beyond, a line is faint.
///
/// # Errors
/// It cannot be drawn.
pub fn draw(canvas: &Canvas<'_>, frame: Frame, of: &str, curves: &[Curve]) -> Result<()> {
    let title = "latency by percentile, us, both axes logarithmic";
    canvas.text((frame.x, frame.y + 8), Type::of(13).bold(), title)?;
    let about = format!("{of} (less is better)");
    let about = clip(&about, frame.width, 11);
    canvas.text((frame.x, frame.y + 24), Type::of(11).colour(FAINT), &about)?;
    let axes = Axes::new(frame, curves);
    axes.draw(canvas)?;
    // The strongest one last, on top of the others.
    let mut order: Vec<&Curve> = curves.iter().collect();
    order.sort_by_key(|curve| is_subject(&curve.name));
    for curve in order {
        axes.curve(canvas, curve)?;
    }
    axes.names(canvas, curves)
}

/// Where values are on the page.
struct Axes {
    left: i32,
    right: i32,
    top: i32,
    bottom: i32,
    low: f64,
    high: f64,
}

impl Axes {
    fn new(frame: Frame, curves: &[Curve]) -> Self {
        let values = curves.iter().flat_map(|curve| &curve.points);
        let values = values.map(|(_, us)| *us).filter(|us| *us > 0.0);
        let (low, high) = values.fold((f64::INFINITY, 0.0), |(low, high), us| {
            (us.min(low), us.max(high))
        });
        let (low, high) = if high > 0.0 { (low, high) } else { (1.0, 10.0) };
        Self {
            left: frame.x + VALUES,
            right: frame.x + frame.width
                - name_width(curves.iter().map(|curve| curve.name.as_str()))
                - 17,
            top: frame.y + TITLE_HEIGHT + 4,
            bottom: frame.y + frame.height - PERCENTS,
            low: low / 1.15,
            high: high * 1.15,
        }
    }

    fn x(&self, percent: f64) -> i32 {
        let times = 1.0 / (1.0 - percent / 100.0);
        let share = (times / 2.0).ln() / 5000_f64.ln();
        self.left + pixel(share.clamp(0.0, 1.0) * f64::from(self.right - self.left))
    }

    fn y(&self, us: f64) -> i32 {
        let share = (us.max(self.low) / self.low).ln() / (self.high / self.low).ln();
        self.bottom - pixel(share.clamp(0.0, 1.0) * f64::from(self.bottom - self.top))
    }

    fn draw(&self, canvas: &Canvas<'_>) -> Result<()> {
        let grid = GRID.mix(1.0);
        let small = Type::of(11).colour(FAINT);
        for percent in TICKS {
            let x = self.x(percent);
            canvas.line(vec![(x, self.top), (x, self.bottom)], grid, 1)?;
            let at = (x, self.bottom + 12);
            canvas.text(at, small.anchor(Anchor::Middle), &percentile(percent))?;
        }
        let mut free = i32::MAX;
        for us in self.values() {
            let y = self.y(us);
            canvas.line(vec![(self.left, y), (self.right, y)], grid, 1)?;
            if y <= free {
                let at = (self.left - 6, y);
                canvas.text(at, small.anchor(Anchor::Right), &axis_value(us))?;
                free = y - LINE;
            }
        }
        Ok(())
    }

    /// 1, 2 and 5 of every power of ten that is in sight; with wide ranges the powers.
    fn values(&self) -> Vec<f64> {
        let exponents = -3..=9;
        let steps: &[f64] = if self.high / self.low > 2000.0 {
            &[1.0]
        } else {
            &[1.0, 2.0, 5.0]
        };
        let all = exponents.flat_map(|exponent| {
            let power = 10_f64.powi(exponent);
            steps.iter().map(move |step| step * power)
        });
        all.filter(|us| (self.low..=self.high).contains(us))
            .collect()
    }

    fn curve(&self, canvas: &Canvas<'_>, curve: &Curve) -> Result<()> {
        let width = if is_subject(&curve.name) { 3 } else { 2 };
        let points = &curve.points;
        let known = points.partition_point(|(percent, _)| supported(*percent, curve.count));
        let on_page = |points: &[(f64, f64)]| -> Vec<(i32, i32)> {
            let page = points
                .iter()
                .map(|(percent, us)| (self.x(*percent), self.y(*us)));
            page.collect()
        };
        let faint = on_page(&points[known.saturating_sub(1)..]);
        if known < points.len() && faint.len() > 1 {
            canvas.line(faint, curve.colour.mix(0.35), width)?;
        }
        if known > 1 {
            canvas.line(on_page(&points[..known]), curve.colour.mix(1.0), width)?;
        }
        Ok(())
    }

    /// Each name at the end of its line, moved apart where they would touch.
    fn names(&self, canvas: &Canvas<'_>, curves: &[Curve]) -> Result<()> {
        let end = |curve: &Curve| curve.points.last().map(|(_, us)| self.y(*us));
        let mut names: Vec<(i32, &Curve)> = curves
            .iter()
            .filter_map(|curve| Some((end(curve)?, curve)))
            .collect();
        names.sort_by_key(|(y, _)| *y);
        let ends: Vec<i32> = names.iter().map(|(y, _)| *y).collect();
        for ((end, curve), y) in names.into_iter().zip(apart(&ends, self.top, self.bottom)) {
            let (from, to) = (self.right + 3, self.right + 12);
            canvas.line(vec![(from, end), (to, y)], curve.colour.mix(0.6), 1)?;
            let mut style = Type::of(12).colour(curve.colour);
            style.bold = is_subject(&curve.name);
            canvas.text((to + 3, y), style, &clip(&curve.name, MAX_NAME, 12))?;
        }
        Ok(())
    }
}

/// Positions at least a line apart between top and bottom, for rising ends: those that
/// would touch stand around the middle of their ends.
fn apart(ends: &[i32], top: i32, bottom: i32) -> Vec<i32> {
    // Of each group: the first position, how many, and the sum of the first positions
    // that would put each member at its end.
    let mut groups: Vec<(i32, i32, i32)> = Vec::new();
    for &end in ends {
        let mut group = (end, 1, end);
        while let Some(&(first, count, sum)) = groups.last() {
            if first + count * LINE <= group.0 {
                break;
            }
            groups.pop();
            let members = count + group.1;
            let sum = sum + group.2 - group.1 * count * LINE;
            group = (sum / members, members, sum);
        }
        groups.push(group);
    }
    let places = groups.into_iter().flat_map(|(first, count, _)| {
        let members = 0..count;
        members.map(move |member| first + member * LINE)
    });
    let mut places: Vec<i32> = places.collect();
    let mut free = bottom;
    for place in places.iter_mut().rev() {
        *place = (*place).min(free);
        free = *place - LINE;
    }
    free = top;
    for place in &mut places {
        *place = (*place).max(free);
        free = *place + LINE;
    }
    places
}

fn axis_value(us: f64) -> String {
    if us >= 1.0 {
        // Whole, as ticks are.
        let text = figure(us);
        return text.split('.').next().unwrap_or_default().to_owned();
    }
    format!("{us}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_touch() {
        assert_eq!(apart(&[20, 22, 100], 0, 200), [14, 28, 100]);
        assert_eq!(apart(&[190, 195, 198], 0, 200), [172, 186, 200]);
        let many = apart(&[50, 51, 60, 62, 75, 90, 91], 0, 200);
        assert!(many.is_sorted_by(|a, b| a + LINE <= *b), "{many:?}");
        assert!(many[0] < 50 && many[6] > 91, "{many:?}");
        assert_eq!(apart(&[3, 4], 0, 200), [0, 14]);
        assert!(apart(&[], 0, 200).is_empty());
    }

    #[test]
    fn axes_hold_every_value() {
        let curve = Curve {
            name: "gate".to_owned(),
            colour: RGBColor(0, 0, 0),
            count: 1000,
            points: vec![(50.0, 3.0), (99.99, 70.0)],
        };
        let frame = Frame {
            x: 0,
            y: 0,
            width: 500,
            height: 300,
        };
        let axes = Axes::new(frame, &[curve]);
        assert_eq!(axes.x(50.0), axes.left);
        assert_eq!(axes.x(99.99), axes.right);
        assert!(axes.y(3.0) < axes.bottom && axes.y(70.0) > axes.top);
        assert_eq!(axes.values(), [5.0, 10.0, 20.0, 50.0]);
        assert!(Axes::new(frame, &[]).values().contains(&2.0), "of nothing");
    }
}
