//! A report as text for people.

use std::collections::BTreeMap;

use super::figures::{Cell, Table, count, figure, paragraph, percentile};
use super::histogram::{PERCENTILES, supported};
use super::model::{Better, Measure, PathReport, PointReport, Report, Run, ScenarioReport};
use super::{goals, header};
use crate::host::queues;
use crate::stats::Spread;

/// Whose ratios to the others are printed.
const SUBJECT: &str = "gate";

/// A whole report.
#[must_use]
pub fn report(report: &Report) -> String {
    let mut text = header::text(report);
    if let Some(nic) = &report.nic {
        text.push_str(&queues::table(nic));
    }
    for scenario in &report.scenarios {
        text.push_str(&one_scenario(scenario));
    }
    text.push_str(&goals::text(&report.goals));
    text
}

/// Why a way to the server was not measured, who was disturbed, and what else a reader of
/// its figures must know.
#[must_use]
pub fn notes(point: &PointReport) -> Vec<String> {
    let mut notes = Vec::new();
    for path in &point.paths {
        let peer = &path.peer;
        if let Some(why) = &path.left_out {
            notes.push(format!("{peer} was left out: {why}"));
        }
        if let Some(note) = &path.note {
            notes.push(format!("{peer}: {note}"));
        }
        for run in path.runs.iter().filter(|run| run.failed > 0) {
            let example = run.failure.as_deref().unwrap_or("no example");
            notes.push(format!(
                "{peer}, round {}: {} failed, such as: {example}",
                run.round + 1,
                count(run.failed)
            ));
        }
        for run in path.runs.iter().filter(|run| run.unfinished > 0) {
            notes.push(format!(
                "{peer}, round {}: {} were due and not done in the end; the time that they had \
                 waited by then is in the latencies",
                run.round + 1,
                count(run.unfinished)
            ));
        }
        for run in path.runs.iter().filter(|run| run.repeated > 0) {
            let times = match run.repeated {
                1 => "once".to_owned(),
                more => format!("{more} times"),
            };
            let round = run.round + 1;
            notes.push(format!(
                "{peer}, round {round}: repeated {times} because it was disturbed"
            ));
        }
        for run in &path.runs {
            if let Some(why) = &run.disturbed {
                let round = run.round + 1;
                notes.push(format!(
                    "{peer}, round {round}: disturbed, and counted all the same: {why}"
                ));
            }
        }
        let by_load = path.runs.iter().filter(|run| run.bottleneck == "load");
        let by_load: Vec<String> = by_load.map(|run| (run.round + 1).to_string()).collect();
        if !by_load.is_empty() {
            let rounds = by_load.join(", ");
            let word = if by_load.len() == 1 {
                "round"
            } else {
                "rounds"
            };
            notes.push(format!(
                "{peer}, {word} {rounds}: the load was the bottleneck, not the proxy, which could do \
                 more"
            ));
        }
    }
    notes
}

/// Label, unit and which way is good, as the lines of a column's head.
#[must_use]
pub fn measure_head(measure: &Measure) -> Vec<String> {
    let better = better(measure.better);
    vec![
        measure.label.clone(),
        measure.unit.clone(),
        better.to_owned(),
    ]
}

/// Which way is good, in words.
#[must_use]
pub fn better(better: Better) -> &'static str {
    match better {
        Better::Lower => "(less is better)",
        Better::Higher => "(more is better)",
    }
}

fn one_scenario(scenario: &ScenarioReport) -> String {
    let title = format!("{}: {}", scenario.name, scenario.about);
    let line = "=".repeat(title.chars().count().min(110));
    let mut text = format!("\n\n{title}\n{line}\n");
    for point in &scenario.points {
        text.push_str(&one_point(point));
    }
    text
}

fn one_point(point: &PointReport) -> String {
    let mut text = format!("\n## {}\n", point.name);
    text.push_str(&paragraph("", &point.about));
    for part in [figures(point), ratios(point), latency(point), sides(point)] {
        if !part.is_empty() {
            text.push('\n');
            text.push_str(&part);
        }
    }
    let notes = notes(point);
    if !notes.is_empty() {
        text.push_str("\n  Notes\n");
    }
    for note in notes {
        text.push_str(&paragraph("    - ", &note));
    }
    text
}

fn table(point: &PointReport, first: &str) -> Table {
    let mut head = vec![vec![first.to_owned()]];
    head.extend(point.measures.iter().map(measure_head));
    Table::new(head)
}

fn figures(point: &PointReport) -> String {
    let mut table = table(point, "peer");
    for path in measured(point) {
        let spread = |measure: &Measure| Cell::of(path.spread.get(&measure.key));
        table.row(&path.peer, point.measures.iter().map(spread).collect());
    }
    if table.is_empty() {
        return String::new();
    }
    format!(
        "  Median [lowest - highest] of the rounds\n{}",
        table.print(4)
    )
}

fn ratios(point: &PointReport) -> String {
    let subject = measured(point).find(|path| path.peer == SUBJECT);
    let Some(subject) = subject.or_else(|| measured(point).next()) else {
        return String::new();
    };
    let mut table = table(point, "");
    for other in measured(point).filter(|path| path.peer != subject.peer) {
        let cells = point.measures.iter().map(|measure| {
            let ratios: Option<&BTreeMap<String, Spread>> = subject.ratios.get(&measure.key);
            Cell::of_ratio(ratios.and_then(|ratios| ratios.get(&other.peer)))
        });
        let name = format!("{} / {}", subject.peer, other.peer);
        table.row(name, cells.collect());
    }
    if table.is_empty() {
        return String::new();
    }
    let name = &subject.peer;
    format!(
        "  Ratios, paired by round (0.800: {name}'s figure is 0.800 of the other's)\n{}",
        table.print(4)
    )
}

fn latency(point: &PointReport) -> String {
    let timed = || {
        point
            .paths
            .iter()
            .filter_map(|path| Some((path, path.latency.as_ref()?)))
    };
    let Some((_, first)) = timed().next() else {
        return String::new();
    };
    let mut head = vec![vec!["peer".to_owned()], vec!["values".to_owned()]];
    head.extend(PERCENTILES.map(|percent| vec![percentile(percent)]));
    let mut table = Table::new(head);
    let mut marked = false;
    for (path, latency) in timed() {
        let mut cells = vec![Cell::Figure(count(latency.count))];
        for wanted in PERCENTILES {
            let found = latency.percentiles_us.iter().find(|(p, _)| *p == wanted);
            cells.push(found.map_or_else(Cell::none, |(percent, us)| {
                let (cell, mark) = percentile_cell(*percent, *us, latency.count);
                marked |= mark;
                cell
            }));
        }
        table.row(&path.peer, cells);
    }
    let of = &first.of;
    let head = format!("Latency in microseconds, all rounds together: {of}");
    let mut text = paragraph("  ", &head);
    text.push_str(&table.print(4));
    if marked {
        text.push_str(MARKED);
    }
    text
}

/// Says what a mark at a percentile means.
pub const MARKED: &str = "    * fewer than 10 values beyond it: chance more than measurement\n";

/// A percentile, marked if the count cannot support it.
#[must_use]
pub fn percentile_cell(percent: f64, us: f64, count: u64) -> (Cell, bool) {
    let mark = !supported(percent, count);
    // A blank keeps the digits of marked and unmarked ones below one another.
    let sign = if mark { "*" } else { " " };
    (Cell::Figure(format!("{}{sign}", figure(us))), mark)
}

fn sides(point: &PointReport) -> String {
    let mut names: Vec<&str> = Vec::new();
    for run in measured(point).flat_map(|path| &path.runs) {
        for side in &run.sides {
            if !names.contains(&side.name.as_str()) {
                names.push(&side.name);
            }
        }
    }
    if names.is_empty() {
        return String::new();
    }
    let order = ["proxy", "load", "backend"];
    names.sort_by_key(|name| {
        order
            .iter()
            .position(|known| known == name)
            .unwrap_or(order.len())
    });
    let mut head = vec![vec!["peer".to_owned()]];
    for name in &names {
        head.push(vec![(*name).to_owned(), "CPUs".to_owned()]);
        head.push(vec![(*name).to_owned(), "delay".to_owned()]);
    }
    head.push(vec!["bottleneck".to_owned()]);
    let mut table = Table::new(head);
    for path in measured(point) {
        let mut cells = Vec::new();
        for name in &names {
            let of = |value: fn(&super::model::Side) -> Option<f64>| {
                let sides = path.runs.iter().flat_map(|run| &run.sides);
                let values = sides.filter(|side| side.name == *name).filter_map(value);
                let shown = |spread: Spread| Cell::Figure(format!("{:.2}", spread.median));
                Spread::of(values).map_or_else(Cell::none, shown)
            };
            cells.extend([of(|side| Some(side.cpus)), of(|side| side.delay)]);
        }
        cells.push(Cell::Text(bottlenecks(&path.runs)));
        table.row(&path.peer, cells);
    }
    format!(
        "  CPUs used, and run-queue delay (time that threads were ready and had no CPU, summed),\n  \
         as a share of the time: medians of the rounds\n{}",
        table.print(4)
    )
}

fn bottlenecks(runs: &[Run]) -> String {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for run in runs {
        let name = match run.bottleneck.as_str() {
            "" => "unknown",
            name => name,
        };
        *counts.entry(name).or_default() += 1;
    }
    if let [(name, _)] = counts.iter().collect::<Vec<_>>()[..] {
        return (*name).to_owned();
    }
    let each = counts
        .iter()
        .map(|(name, runs)| format!("{name} in {runs}"));
    each.collect::<Vec<_>>().join(", ")
}

fn measured(point: &PointReport) -> impl Iterator<Item = &PathReport> {
    point.paths.iter().filter(|path| !path.runs.is_empty())
}

#[cfg(test)]
mod tests {
    use super::super::fixture;
    use super::*;

    #[test]
    fn a_small_report_reads_like_this() {
        let mut small = fixture::small();
        small.complete();
        let text = report(&small);
        let fragments = [
            "gate-bench of 2026-11-30T12:00:00Z\n",
            "commit   0123456789ab-dirty\n",
            "CPUs     gate and its peers: 0-1; load and backend: 2-3,6\n",
            "  net.core.somaxconn   4096 -> 65535\n",
            "  nginx     absent: nginx is not installed: apt-get install nginx libnginx-mod-stream\n",
            "            $ gate --config bench.toml\n",
            "relay: what relayed bytes cost\n==============================\n\n## 64 B x 16\n",
            "    peer      proxy CPU\n",
            "              us/request\n",
            "              (less is better)\n",
            "    gate      20 [10 - 30]\n    haproxy   20 [20 - 60]\n",
            "    gate / haproxy   1.00 [0.500 - 1.50]\n",
            "    - pgbouncer was left out: it does not refuse users\n",
            "    - gate, round 2: repeated 2 times because it was disturbed\n",
            "    - haproxy, round 3: disturbed, and counted all the same: a backup ran\n",
        ];
        for fragment in fragments {
            assert!(text.contains(fragment), "no {fragment:?} in\n{text}");
        }
    }

    #[test]
    fn percentiles_without_values_are_marked() {
        let mut report_of = fixture::small();
        report_of.scenarios[0].points[0].paths[0].latency = Some(fixture::latency(5_000));
        report_of.complete();
        let text = report(&report_of);
        assert!(text.contains(" p99.9 "), "{text}");
        let row = text.lines().find(|line| line.contains("5,000")).unwrap();
        assert!(row.contains("999*"), "p99.9 has 5 values beyond: {row}");
        assert!(!row.contains("99.0*"), "p99 has 50: {row}");
        assert!(text.contains(MARKED));
    }

    #[test]
    fn a_mixed_bottleneck_is_told_apart() {
        let run = |bottleneck: &str| Run {
            bottleneck: bottleneck.to_owned(),
            ..Run::default()
        };
        let runs = [run("proxy"), run("load"), run("proxy")];
        assert_eq!(bottlenecks(&runs), "load in 1, proxy in 2");
        assert_eq!(bottlenecks(&runs[..1]), "proxy");
    }
}
