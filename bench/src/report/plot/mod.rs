//! SVG plots: of scenarios, and of latencies.

mod bars;
mod canvas;
mod curves;

use std::path::Path;

use anyhow::Result;
use plotters::style::{Color, RGBColor};

use self::canvas::{Canvas, FAINT, GRID, Type, clip, colour};
use self::curves::Curve;
use super::distribution::{Distribution, curve_of};
use super::figures::count;
use super::model::{PointReport, Report, ScenarioReport};

const WIDTH: i32 = 1200;
const MARGIN: i32 = 30;
const GAP: i32 = 28;
const CURVES_WIDTH: i32 = 500;
const CURVES_HEIGHT: i32 = 270;
/// Of the two lines above a panel.
const TITLE_HEIGHT: i32 = 38;
const POINT_HEAD: i32 = 62;
const SCENARIO_HEAD: i32 = 96;

/// A rectangle of the page.
#[derive(Clone, Copy, Debug)]
struct Frame {
    x: i32,
    y: i32,
    width: i32,
    height: i32,
}

/// The plots of scenarios, one below the other. The folder is that of the report, where
/// its histograms are; without them curves have only the points of the report.
///
/// # Errors
/// It cannot be drawn.
pub fn scenarios(report: &Report, scenarios: &[&ScenarioReport], folder: &Path) -> Result<String> {
    let mut svg = String::new();
    let heights = scenarios.iter().map(|scenario| scenario_height(scenario));
    let canvas = Canvas::new(&mut svg, WIDTH, heights.sum::<i32>() + MARGIN)?;
    let mut y = 0;
    for scenario in scenarios {
        scenario_head(&canvas, y, report, scenario)?;
        y += SCENARIO_HEAD;
        for point in &scenario.points {
            one_point(&canvas, y, point, folder)?;
            y += point_height(point);
        }
    }
    canvas.finish()?;
    Ok(svg)
}

/// The curves of latencies, whatever they are of.
///
/// # Errors
/// It cannot be drawn.
pub fn latencies(of: &str, distributions: &[Distribution]) -> Result<String> {
    let mut svg = String::new();
    let (width, height) = (1000, 560);
    let canvas = Canvas::new(&mut svg, width, height)?;
    let frame = Frame {
        x: MARGIN,
        y: MARGIN,
        width: width - 2 * MARGIN,
        height: height - 2 * MARGIN,
    };
    let curves: Vec<Curve> = distributions
        .iter()
        .enumerate()
        .map(|(index, distribution)| Curve {
            name: distribution.name.clone(),
            colour: colour_among(index, distribution, distributions),
            count: distribution.count,
            points: distribution.curve.clone(),
        })
        .collect();
    curves::draw(&canvas, frame, of, &curves)?;
    canvas.finish()?;
    Ok(svg)
}

/// Files have no colour of their own, and two must not have the same.
fn colour_among(index: usize, of: &Distribution, all: &[Distribution]) -> RGBColor {
    if all.iter().all(|one| canvas::is_known(&one.name)) {
        return colour(&of.name);
    }
    canvas::in_turn(index)
}

fn scenario_head(
    canvas: &Canvas<'_>,
    y: i32,
    report: &Report,
    scenario: &ScenarioReport,
) -> Result<()> {
    let title = format!("{}: {}", scenario.name, scenario.about);
    let style = Type::of(20).bold();
    canvas.text(
        (MARGIN, y + 30),
        style,
        &clip(&title, WIDTH - 2 * MARGIN, 20),
    )?;
    let faint = Type::of(12).colour(FAINT);
    let mut rounds = format!(
        "bars: median of {} interleaved rounds of {} s; whiskers: lowest to highest",
        report.rounds, report.seconds
    );
    if scenario.points.iter().any(is_timed) {
        rounds += "; curves: all rounds together, faint where fewer than 10 values are beyond";
    }
    canvas.text(
        (MARGIN, y + 56),
        faint,
        &clip(&rounds, WIDTH - 2 * MARGIN, 12),
    )?;
    let commit = &report.commit;
    let source = format!(
        "{}; commit {commit}; {}",
        report.started,
        report.host.line()
    );
    canvas.text(
        (MARGIN, y + 74),
        faint,
        &clip(&source, WIDTH - 2 * MARGIN, 12),
    )
}

fn one_point(canvas: &Canvas<'_>, y: i32, point: &PointReport, folder: &Path) -> Result<()> {
    let right = WIDTH - MARGIN;
    canvas.line(vec![(MARGIN, y + 4), (right, y + 4)], GRID.mix(1.0), 1)?;
    canvas.text((MARGIN, y + 22), Type::of(15).bold(), &point.name)?;
    let about = clip(&point.about, right - MARGIN, 12);
    canvas.text((MARGIN, y + 42), Type::of(12).colour(FAINT), &about)?;
    let curves = curves_of(point, folder);
    let room = right
        - MARGIN
        - if curves.is_empty() {
            0
        } else {
            CURVES_WIDTH + GAP
        };
    let measures = &point.measures[..point.measures.len().min(2)];
    let panels = i32::try_from(measures.len()).unwrap_or(0);
    let mut frame = Frame {
        x: MARGIN,
        y: y + POINT_HEAD,
        width: ((room - GAP * (panels - 1).max(0)) / panels.max(1)).min(620),
        height: bars::height(&point.paths),
    };
    for measure in measures {
        bars::draw(canvas, frame, measure, &point.paths)?;
        frame.x += frame.width + GAP;
    }
    let of = point.paths.iter().find_map(|path| path.latency.as_ref());
    let Some(of) = of.filter(|_| !curves.is_empty()) else {
        return Ok(());
    };
    let frame = Frame {
        x: right - CURVES_WIDTH,
        y: y + POINT_HEAD,
        width: CURVES_WIDTH,
        height: CURVES_HEIGHT.max(frame.height),
    };
    curves::draw(canvas, frame, &of.of, &curves)
}

fn curves_of(point: &PointReport, folder: &Path) -> Vec<Curve> {
    let curve = |path: &super::model::PathReport| {
        let latency = path.latency.as_ref()?;
        let in_report = || {
            let all = latency.percentiles_us.iter().copied();
            all.filter(|(percent, _)| (50.0..=99.99).contains(percent))
                .collect()
        };
        let points = curve_of(&folder.join(&latency.histogram), &path.peer);
        let points: Vec<(f64, f64)> = points.unwrap_or_else(in_report);
        (points.len() > 1).then(|| Curve {
            name: path.peer.clone(),
            colour: colour(&path.peer),
            count: latency.count,
            points,
        })
    };
    point.paths.iter().filter_map(curve).collect()
}

fn scenario_height(scenario: &ScenarioReport) -> i32 {
    SCENARIO_HEAD + scenario.points.iter().map(point_height).sum::<i32>()
}

fn point_height(point: &PointReport) -> i32 {
    let bars = bars::height(&point.paths);
    let panels = if is_timed(point) {
        bars.max(CURVES_HEIGHT)
    } else {
        bars
    };
    POINT_HEAD + panels + GAP
}

fn is_timed(point: &PointReport) -> bool {
    point.paths.iter().any(|path| path.latency.is_some())
}

/// What a plot of latencies says of them.
#[must_use]
pub fn values_of(distributions: &[Distribution]) -> String {
    let each = distributions.iter();
    let each = each.map(|one| format!("{}: {} values", one.name, count(one.count)));
    each.collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::super::fixture;
    use super::*;

    /// Every tag is closed in order; attributes are quoted and text is escaped.
    fn assert_well_formed(svg: &str) {
        let mut open: Vec<&str> = Vec::new();
        let mut rest = svg;
        while let Some(start) = rest.find('<') {
            let text = &rest[..start];
            assert!(!text.contains('>'), "a bare > in {text:?}");
            for entity in text.split('&').skip(1) {
                let known = ["amp;", "lt;", "gt;", "quot;", "apos;"];
                assert!(
                    known.iter().any(|known| entity.starts_with(known)),
                    "{text:?}"
                );
            }
            let end = start + rest[start..].find('>').expect("a tag ends");
            let tag = &rest[start + 1..end];
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            if let Some(name) = tag.strip_prefix('/') {
                assert_eq!(open.pop(), Some(name));
            } else if !tag.ends_with('/') {
                open.push(tag.split_whitespace().next().unwrap());
            }
            rest = &rest[end + 1..];
        }
        assert_eq!(rest.trim(), "");
        assert!(open.is_empty(), "{open:?}");
    }

    #[test]
    fn a_plot_names_everyone_and_is_well_formed() {
        let folder = tempfile::tempdir().unwrap();
        let mut report = fixture::realistic(folder.path());
        report.scenarios[0].points[0].about = "a < b & \"c\"".to_owned();
        report.complete();
        for scenario in &report.scenarios {
            let svg = scenarios(&report, &[scenario], folder.path()).unwrap();
            assert_well_formed(&svg);
            for path in scenario.points.iter().flat_map(|point| &point.paths) {
                assert!(svg.contains(&path.peer), "no {}", path.peer);
            }
        }
        let relay = scenarios(&report, &[&report.scenarios[0]], folder.path()).unwrap();
        assert!(relay.contains("p99.99") && relay.contains("proxy CPU"));
        let thick = relay.matches("stroke-width=\"3\"").count();
        assert!(thick >= 2, "gate's curve of each of the two points");
    }

    #[test]
    fn without_histograms_the_report_is_enough() {
        let folder = tempfile::tempdir().unwrap();
        let mut report = fixture::small();
        report.scenarios[0].points[0].paths[0].latency = Some(fixture::latency(5_000));
        report.complete();
        let svg = scenarios(&report, &[&report.scenarios[0]], folder.path()).unwrap();
        assert_well_formed(&svg);
        assert!(svg.contains("<polyline"));
        assert!(svg.contains("left out"));
    }

    #[test]
    fn latencies_of_files_have_colours_of_their_own() {
        let of = |name: &str| Distribution {
            name: name.to_owned(),
            count: 1_000_000,
            mean_us: None,
            percentiles_us: Vec::new(),
            curve: vec![(50.0, 1.0), (99.99, 2.0)],
        };
        let all = [of("a.hlog"), of("b.hlog")];
        let svg = latencies("two files", &all).unwrap();
        assert_well_formed(&svg);
        let colours = [0, 1].map(|index| colour_among(index, &all[index], &all));
        assert_ne!(colours[0], colours[1]);
    }
}
