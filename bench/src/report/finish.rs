//! What a report says of all rounds together, and its files.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::model::{PathReport, PointReport, Report, Run, ScenarioReport};
use super::{plot, text};
use crate::stats::Spread;

const JSON: &str = "report.json";

/// The files of a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// For programs, and for `gate-bench report`.
    pub json: PathBuf,
    /// For people.
    pub text: PathBuf,
    /// One per scenario.
    pub plots: Vec<PathBuf>,
}

impl Report {
    /// Computes the spread and the ratios of every path from its runs.
    ///
    /// Ratios are paired: a round counts if both paths have a run in it. What is no
    /// number, such as a rate over no time, is no figure and is taken out.
    pub fn complete(&mut self) {
        let points = self.scenarios.iter_mut();
        for point in points.flat_map(|scenario| scenario.points.iter_mut()) {
            complete(point);
        }
    }
}

/// Writes `report.json`, `report.txt` and `<scenario>.svg` into a folder, which is made
/// if it is not there.
///
/// # Errors
/// A file cannot be written or drawn.
pub fn write(report: &Report, folder: &Path) -> Result<Written> {
    let json = write_json(report, folder)?;
    let for_people = folder.join("report.txt");
    save(&for_people, &text::report(report))?;
    let mut plots = Vec::new();
    for scenario in &report.scenarios {
        let path = folder.join(plot_name(scenario));
        save(&path, &plot::scenarios(report, &[scenario], folder)?)?;
        plots.push(path);
    }
    Ok(Written {
        json,
        text: for_people,
        plots,
    })
}

/// The file name of a scenario's plot. Reports come from elsewhere, too: a name must not
/// lead out of the folder.
#[must_use]
pub fn plot_name(scenario: &ScenarioReport) -> String {
    let safe = |c: char| {
        if c.is_alphanumeric() || c == '_' {
            c
        } else {
            '-'
        }
    };
    let name: String = scenario.name.chars().map(safe).collect();
    format!("{name}.svg")
}

/// Writes `report.json` alone.
///
/// # Errors
/// The file cannot be written.
pub fn write_json(report: &Report, folder: &Path) -> Result<PathBuf> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    let json = folder.join(JSON);
    let form = serde_json::to_string_pretty(report).context("report as JSON")? + "\n";
    save(&json, &form)?;
    Ok(json)
}

/// Makes a folder for a report. If there is one in it, its files are removed: plots
/// and histograms of another run would lie beside this one's.
///
/// # Errors
/// The folder cannot be made, or a file not removed.
pub fn make_folder(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    if !folder.join(JSON).exists() {
        return Ok(());
    }
    for file in fs::read_dir(folder)? {
        let file = file?.path();
        let ending = file.extension().and_then(|ending| ending.to_str());
        if ending.is_some_and(|ending| ["json", "txt", "svg", "hlog", "hgrm"].contains(&ending)) {
            fs::remove_file(&file).with_context(|| format!("remove {}", file.display()))?;
        }
    }
    Ok(())
}

/// Writes a file, and names it if that fails.
///
/// # Errors
/// It cannot be written.
pub fn save(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

fn complete(point: &mut PointReport) {
    for path in &mut point.paths {
        for run in &mut path.runs {
            run.values.retain(|_, value| value.is_finite());
        }
    }
    let all = point.paths.clone();
    for path in &mut point.paths {
        path.spread.clear();
        path.ratios.clear();
        for measure in &point.measures {
            let values = path
                .runs
                .iter()
                .filter_map(|run| run.values.get(&measure.key));
            if let Some(spread) = Spread::of(values.copied()) {
                path.spread.insert(measure.key.clone(), spread);
            }
            let others = all.iter().filter(|other| other.peer != path.peer);
            let ratios: BTreeMap<String, Spread> = others
                .filter_map(|other| Some((other.peer.clone(), ratio(path, other, &measure.key)?)))
                .collect();
            if !ratios.is_empty() {
                path.ratios.insert(measure.key.clone(), ratios);
            }
        }
    }
}

fn ratio(path: &PathReport, other: &PathReport, key: &str) -> Option<Spread> {
    let same_round = |run: &Run| other.runs.iter().find(|of| of.round == run.round);
    let pairs = path.runs.iter().filter_map(|run| {
        let to = same_round(run)?.values.get(key)?;
        Some((*run.values.get(key)?, *to))
    });
    let (values, to): (Vec<f64>, Vec<f64>) = pairs.unzip();
    Spread::of_ratios(&values, &to)
}

#[cfg(test)]
mod tests {
    use super::super::fixture;
    use super::*;

    #[test]
    fn ratios_are_paired_by_round() {
        let mut report = fixture::small();
        report.complete();
        let paths = &report.scenarios[0].points[0].paths;
        let ratios = &paths[0].ratios["cpu"]["haproxy"];
        // Rounds 0 and 2 have both; by position it would be 10/20, 20/10, 30/60.
        assert_eq!((ratios.min, ratios.max), (0.5, 1.5));
        assert_eq!(ratios.median, 1.0);
        assert_eq!(paths[0].spread["cpu"].median, 20.0);
        assert!(!paths[0].ratios["cpu"].contains_key("gate"));
        assert!(paths[2].spread.is_empty(), "left out");
    }

    #[test]
    fn what_is_no_number_is_no_figure() {
        let mut report = fixture::small();
        let run = &mut report.scenarios[0].points[0].paths[0].runs[0];
        run.values.insert("cpu".to_owned(), f64::NAN);
        report.complete();
        let gate = &report.scenarios[0].points[0].paths[0];
        assert_eq!(gate.spread["cpu"].median, 25.0);
        let json = serde_json::to_string(&report).unwrap();
        assert!(serde_json::from_str::<Report>(&json).is_ok());
    }

    #[test]
    fn a_report_is_written_as_three_kinds_of_file() {
        let folder = tempfile::tempdir().unwrap();
        let mut report = fixture::realistic(folder.path());
        report.complete();
        let inside = folder.path().join("new");
        let written = write(&report, &inside).unwrap();
        assert_eq!(written.plots.len(), report.scenarios.len());
        let json = fs::read_to_string(written.json).unwrap();
        let again: Report = serde_json::from_str(&json).unwrap();
        assert_eq!(text::report(&again), text::report(&report));
        assert!(written.plots.iter().all(|plot| plot.exists()));
    }

    #[test]
    fn a_plot_stays_in_its_folder() {
        let mut scenario = fixture::small().scenarios.remove(0);
        assert_eq!(plot_name(&scenario), "relay.svg");
        scenario.name = "../../etc/x".to_owned();
        assert_eq!(plot_name(&scenario), "------etc-x.svg");
    }
}
