//! `gate-bench report FILE...`

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Serialize;

use super::distribution::{Distribution, Latencies};
use super::finish::{plot_name, save};
use super::model::{Report, SCHEMA, ScenarioReport};
use super::{compare, latency_table, plot, text};

/// Which files are shown, and how.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// A report (report.json), HdrHistogram logs (.hlog) or percentile texts (.hgrm); two of
    /// the same kind are compared
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// Where the plot is written; without it, beside the first file. Two reports have none: each
    /// has its own
    #[arg(long, value_name = "OUT")]
    pub svg: Option<PathBuf>,
    /// Print JSON in place of text
    #[arg(long)]
    pub json: bool,
}

/// Shows, plots and compares.
///
/// # Errors
/// A file is not one of gate-bench or HdrHistogram, is damaged, or does not go with the
/// others; or the plot cannot be written.
pub fn run(options: &Options) -> Result<()> {
    let shown = show(options)?;
    print(if options.json {
        &shown.json
    } else {
        &shown.text
    })?;
    for (path, svg) in shown.plots {
        save(&path, &svg)?;
        eprintln!("plot: {}", path.display());
    }
    Ok(())
}

/// What is printed and plotted.
struct Shown {
    text: String,
    json: String,
    plots: Vec<(PathBuf, String)>,
}

/// A file, read.
enum Content {
    Report(Box<Report>),
    Latencies(Latencies),
}

fn show(options: &Options) -> Result<Shown> {
    let mut reports = Vec::new();
    let mut latencies = Vec::new();
    for file in &options.files {
        match read(file)? {
            Content::Report(report) => reports.push((file.as_path(), *report)),
            Content::Latencies(found) => latencies.push((file.as_path(), found)),
        }
    }
    ensure!(
        reports.is_empty() || latencies.is_empty(),
        "a report and a file of latencies cannot be compared: name files of one kind"
    );
    match reports.as_slice() {
        [] => of_latencies(options, &latencies),
        [(file, report)] => of_report(options, file, report),
        [a, b] => {
            ensure!(
                options.svg.is_none(),
                "there is no plot of two reports: leave out --svg, or name one report"
            );
            let names = [a, b].map(|(file, _)| file.display().to_string());
            let comparison = compare::reports((&names[0], &a.1), (&names[1], &b.1));
            Ok(Shown {
                text: comparison.text(),
                json: json(&comparison)?,
                plots: Vec::new(),
            })
        }
        more => bail!(
            "{} reports were named: reports are shown alone or compared in twos",
            more.len()
        ),
    }
}

fn of_report(options: &Options, file: &Path, report: &Report) -> Result<Shown> {
    let folder = file.parent().unwrap_or(Path::new(""));
    let plots = match &options.svg {
        Some(out) => {
            let all: Vec<&ScenarioReport> = report.scenarios.iter().collect();
            vec![(out.clone(), plot::scenarios(report, &all, folder)?)]
        }
        None => report
            .scenarios
            .iter()
            .map(|scenario| {
                let out = folder.join(plot_name(scenario));
                Ok((out, plot::scenarios(report, &[scenario], folder)?))
            })
            .collect::<Result<_>>()?,
    };
    Ok(Shown {
        text: text::report(report),
        json: json(report)?,
        plots,
    })
}

/// JSON of files of latencies.
#[derive(Serialize)]
struct LatencyFiles {
    latencies: Vec<Distribution>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ratios: Vec<latency_table::PercentileRatios>,
}

fn of_latencies(options: &Options, files: &[(&Path, Latencies)]) -> Result<Shown> {
    let alone = files.len() == 1;
    let each: Vec<Vec<Distribution>> = files
        .iter()
        .map(|(file, found)| found.distributions(&short_name(file), alone))
        .collect();
    let mut text = String::new();
    let ratios = match each.as_slice() {
        [a, b] => latency_table::percentile_ratios(a, b),
        _ => Vec::new(),
    };
    let latencies = together(files, each);
    for (letter, (file, _)) in ('A'..='Z').zip(files) {
        text.push_str(&format!("{letter}  {}\n", file.display()));
    }
    text.push('\n');
    text.push_str(&latency_table::side_by_side(&latencies));
    if files.len() == 2 {
        text.push_str(&latency_table::ratios_text(&ratios));
    }
    let out = options.svg.clone().unwrap_or_else(|| match files {
        [(file, _)] => file.with_extension("svg"),
        _ => files[0].0.with_file_name("latencies.svg"),
    });
    let drawn = plot::latencies(&plot::values_of(&latencies), &latencies)?;
    Ok(Shown {
        text,
        json: json(&LatencyFiles { latencies, ratios })?,
        plots: vec![(out, drawn)],
    })
}

/// All of them in one list, where each has a name of its own.
fn together(files: &[(&Path, Latencies)], each: Vec<Vec<Distribution>>) -> Vec<Distribution> {
    if files.len() == 1 {
        return each.into_iter().flatten().collect();
    }
    let named = ('A'..='Z').zip(each).flat_map(|(letter, of)| {
        of.into_iter().map(move |mut one| {
            one.name = format!("{letter} {}", one.name);
            one
        })
    });
    named.collect()
}

fn short_name(file: &Path) -> String {
    let stem = file.file_stem().unwrap_or(file.as_os_str());
    stem.to_string_lossy().into_owned()
}

fn read(file: &Path) -> Result<Content> {
    let name = || file.display().to_string();
    let bytes = fs::read(file).with_context(|| format!("read {}", file.display()))?;
    let Ok(text) = String::from_utf8(bytes) else {
        bail!(
            "{}: it is no text: name a report.json, an HdrHistogram log (.hlog) or a percentile \
             text (.hgrm)",
            file.display()
        );
    };
    if text.trim_start().starts_with('{') {
        let report = report(&text).with_context(name)?;
        return Ok(Content::Report(Box::new(report)));
    }
    Latencies::read(&text)
        .map(Content::Latencies)
        .with_context(name)
}

fn report(text: &str) -> Result<Report> {
    let value: serde_json::Value = serde_json::from_str(text).map_err(|error| {
        if error.is_eof() {
            anyhow::anyhow!("the report is cut off ({error}): copy or measure it again")
        } else {
            anyhow::anyhow!("it is no valid JSON ({error}): name a report.json of gate-bench")
        }
    })?;
    let Some(schema) = value.get("schema") else {
        bail!("it is JSON, but no report of gate-bench: name its report.json");
    };
    ensure!(
        *schema == SCHEMA,
        "the report has schema {schema} and this gate-bench reads schema {SCHEMA}: use the \
         gate-bench that wrote it (commit {})",
        value
            .get("commit")
            .and_then(|commit| commit.as_str())
            .unwrap_or("unknown")
    );
    serde_json::from_value(value)
        .context("the report does not have the form of its schema: measure it again")
}

fn json(value: &impl Serialize) -> Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// Whoever reads may stop early, as `head` does.
fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error).context("print"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finish::write;
    use super::super::fixture;
    use super::*;

    struct Files(tempfile::TempDir);

    impl Files {
        /// A folder with a report and what belongs to it.
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let mut report = fixture::realistic(folder.path());
            report.complete();
            write(&report, folder.path()).unwrap();
            Self(folder)
        }

        fn show(&self, names: &[&str]) -> Result<Shown> {
            show(&Options {
                files: names.iter().map(|name| self.0.path().join(name)).collect(),
                svg: None,
                json: false,
            })
        }

        fn change(&self, from: &str, to: &str, change: impl Fn(String) -> String) {
            let text = fs::read_to_string(self.0.path().join(from)).unwrap();
            fs::write(self.0.path().join(to), change(text)).unwrap();
        }

        fn error(&self, names: &[&str]) -> String {
            match self.show(names) {
                Ok(shown) => panic!("{}", shown.text),
                Err(error) => format!("{error:#}"),
            }
        }
    }

    const GATE: &str = "64_B_x_16__open-gate";

    #[test]
    fn a_report_is_printed_and_plotted() {
        let files = Files::new();
        let shown = files.show(&["report.json"]).unwrap();
        assert!(shown.text.contains("gate / haproxy"));
        let plots: Vec<_> = shown
            .plots
            .iter()
            .map(|(path, _)| path.file_name().unwrap())
            .collect();
        assert_eq!(plots, ["relay.svg", "storm.svg"]);
        assert!(serde_json::from_str::<Report>(&shown.json).is_ok());
        let both = files.show(&["report.json", "report.json"]).unwrap();
        assert!(both.text.contains("within the spread"));
        assert!(!both.text.contains("beyond the spread\n"), "{}", both.text);
    }

    #[test]
    fn latencies_of_both_formats_go_together() {
        let files = Files::new();
        let names = [format!("{GATE}.hlog"), format!("{GATE}.hgrm")];
        let both = files.show(&[&names[0], &names[1]]).unwrap();
        assert!(both.text.contains("25,000"), "{}", both.text);
        assert!(both.text.contains("Ratios of the percentiles"));
        assert!(both.text.contains("1.00"));
        let one = files.show(&[&names[1]]).unwrap();
        assert!(!one.text.contains("Ratios"));
        assert!(one.plots[0].0.ends_with(format!("{GATE}.svg")));
    }

    #[test]
    fn bad_files_are_named_with_cause_and_cure() {
        let files = Files::new();
        let half = |text: String| text[..text.len() / 2].to_owned();
        files.change("report.json", "half.json", half);
        files.change("report.json", "new.json", |text| {
            text.replacen("\"schema\": 1", "\"schema\": 99", 1)
        });
        files.change("report.json", "form.json", |text| {
            text.replacen("\"rounds\"", "\"circles\"", 1)
        });
        files.change("report.json", "other.json", |_| "{\"a\": 1}".to_owned());
        files.change(&format!("{GATE}.hlog"), "half.hlog", half);
        files.change(&format!("{GATE}.hgrm"), "half.hgrm", half);
        for (name, cause) in [
            ("half.json", "cut off"),
            ("new.json", "schema 99"),
            ("form.json", "missing field `rounds`"),
            ("other.json", "no report of gate-bench"),
            ("half.hlog", "cut off"),
            ("half.hgrm", "cannot be used"),
            ("report.txt", "name one of these"),
            ("none.json", "No such file"),
        ] {
            let error = files.error(&[name]);
            assert!(error.contains(name), "{error}");
            assert!(error.contains(cause), "{name}: {error}");
        }
        let gate = format!("{GATE}.hlog");
        assert!(files.error(&["report.json", &gate]).contains("one kind"));
        let three = files.error(&["report.json"; 3]);
        assert!(three.contains("3 reports"), "{three}");
    }
}
