//! What the comparison came to.

use anyhow::Result;
use serde::Serialize;

use super::one::Mode;
use crate::host::Host;
use crate::stats::Spread;

/// How the server is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Path {
    Direct,
    Haproxy,
    Gate,
}

impl Path {
    /// For people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Haproxy => "haproxy",
            Self::Gate => "gate",
        }
    }
}

/// One run.
#[derive(Debug, Serialize)]
pub struct Run {
    pub round: u32,
    pub mode: Mode,
    pub path: Path,
    pub tps: f64,
    pub latency_ms: f64,
    pub transactions: u64,
    /// User and system time of the proxy's process; `None` without a proxy.
    pub proxy_cpu_us_per_transaction: Option<f64>,
}

impl Run {
    /// Progress, for people.
    #[must_use]
    pub fn line(&self) -> String {
        let (mode, path) = (self.mode.name(), self.path.name());
        let cpu = self.proxy_cpu_us_per_transaction;
        let cpu = cpu.map_or(String::new(), |cpu| format!(", {cpu:.1} us proxy CPU each"));
        format!(
            "round {} {mode:<5} {path:<8}{:>10.0} tps{cpu}",
            self.round + 1,
            self.tps
        )
    }
}

/// Everything that was measured, and on what.
#[derive(Debug)]
pub struct Report {
    pub host: Host,
    pub versions: Vec<String>,
    pub commands: Vec<String>,
    pub rounds: u32,
    pub runs: Vec<Run>,
}

/// One path in one mode, over all rounds.
#[derive(Debug, Serialize)]
struct Row {
    mode: Mode,
    path: Path,
    tps: Option<Spread>,
    latency_ms: Option<Spread>,
    proxy_cpu_us_per_transaction: Option<Spread>,
    tps_to_direct: Option<Spread>,
    tps_to_haproxy: Option<Spread>,
    proxy_cpu_to_haproxy: Option<Spread>,
}

impl Report {
    /// Prints it, as JSON or for people.
    ///
    /// # Errors
    /// JSON cannot say it (a figure that is not a number).
    pub fn print(&self, json: bool) -> Result<()> {
        let summary = self.summary();
        if json {
            let whole = serde_json::json!({
                "host": self.host,
                "versions": self.versions,
                "commands": self.commands,
                "rounds": self.rounds,
                "summary": summary,
                "runs": self.runs,
            });
            println!("{}", serde_json::to_string_pretty(&whole)?);
        } else {
            self.print_text(&summary);
        }
        Ok(())
    }

    fn summary(&self) -> Vec<Row> {
        let paths = [Path::Direct, Path::Haproxy, Path::Gate];
        let rows = [Mode::Keep, Mode::Reconnect]
            .into_iter()
            .flat_map(|mode| paths.map(|path| self.row(mode, path)));
        rows.filter(|row| row.tps.is_some()).collect()
    }

    fn row(&self, mode: Mode, path: Path) -> Row {
        let tps = |path| self.of_each_round(mode, path, |run| Some(run.tps));
        let cpu = |path| self.of_each_round(mode, path, |run| run.proxy_cpu_us_per_transaction);
        let latency = self.of_each_round(mode, path, |run| Some(run.latency_ms));
        Row {
            mode,
            path,
            tps: Spread::of(tps(path)),
            latency_ms: Spread::of(latency),
            proxy_cpu_us_per_transaction: Spread::of(cpu(path)),
            tps_to_direct: Spread::of_ratios(&tps(path), &tps(Path::Direct)),
            tps_to_haproxy: Spread::of_ratios(&tps(path), &tps(Path::Haproxy)),
            proxy_cpu_to_haproxy: Spread::of_ratios(&cpu(path), &cpu(Path::Haproxy)),
        }
    }

    /// A figure of a path in a mode, in the order of the rounds.
    fn of_each_round(
        &self,
        mode: Mode,
        path: Path,
        figure: impl Fn(&Run) -> Option<f64>,
    ) -> Vec<f64> {
        let runs = self.runs.iter();
        let runs = runs.filter(|run| run.mode == mode && run.path == path);
        runs.filter_map(figure).collect()
    }

    fn print_text(&self, summary: &[Row]) {
        println!("{}", self.host.line());
        for version in &self.versions {
            println!("{version}");
        }
        for command in &self.commands {
            println!("$ {command}");
        }
        println!();
        println!(
            "{} rounds, interleaved; median [min - max]; ratios are paired by round",
            self.rounds
        );
        println!();
        println!(
            "{:<6}{:<9}{:<28}{:<24}{:<21}{:<21}CPU to haproxy",
            "mode", "path", "tps", "proxy CPU us / tx", "tps to direct", "tps to haproxy",
        );
        for row in summary {
            let line = format!(
                "{:<6}{:<9}{:<28}{:<24}{:<21}{:<21}{}",
                row.mode.name(),
                row.path.name(),
                shown(row.tps, 0),
                shown(row.proxy_cpu_us_per_transaction, 1),
                shown(row.tps_to_direct, 2),
                shown(row.tps_to_haproxy, 2),
                shown(row.proxy_cpu_to_haproxy, 2),
            );
            println!("{}", line.trim_end());
        }
    }
}

fn shown(spread: Option<Spread>, digits: usize) -> String {
    spread.map_or(String::from("-"), |Spread { median, min, max }| {
        format!("{median:.digits$} [{min:.digits$} - {max:.digits$}]")
    })
}
