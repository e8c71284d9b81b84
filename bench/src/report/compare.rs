//! Two reports side by side.

use serde::Serialize;

use super::figures::{Cell, Table, paragraph};
use super::header::placement;
use super::model::{Better, Measure, PathReport, PointReport, Report};
use super::text::better;
use crate::stats::Spread;

/// With fewer rounds, lowest and highest say too little for a verdict.
const ROUNDS: usize = 3;

/// What two reports have in common, beside one another.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The first.
    pub a: Of,
    /// The second.
    pub b: Of,
    /// What of their circumstances is not the same.
    pub differences: Vec<String>,
    /// Every figure that both have.
    pub rows: Vec<Row>,
    /// What only one of them has.
    pub in_one_only: Vec<String>,
}

/// A report that is compared.
#[derive(Clone, Debug, Serialize)]
pub struct Of {
    /// Its file.
    pub file: String,
    /// When it began.
    pub started: String,
    /// What it measured.
    pub commit: String,
}

/// A figure of both.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The scenario's name.
    pub scenario: String,
    /// The point's name.
    pub point: String,
    /// The peer's name.
    pub peer: String,
    /// What is measured.
    #[serde(flatten)]
    pub measure: Measure,
    /// In the first.
    pub a: Spread,
    /// In the second.
    pub b: Spread,
    /// The second to the first: of the medians, and the least and most that lowest and
    /// highest allow. `None` if the first is zero.
    pub ratio: Option<Spread>,
    /// What may be said of it.
    pub verdict: Verdict,
}

/// What may be said of a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The spreads overlap: nothing.
    WithinTheSpread,
    /// The second is better, beyond the spread.
    Better,
    /// The second is worse, beyond the spread.
    Worse,
    /// Nothing, because lowest and highest are of too few rounds.
    TooFewRounds,
}

impl Verdict {
    fn words(self) -> &'static str {
        match self {
            Self::WithinTheSpread => "within the spread",
            Self::Better => "BETTER, beyond the spread",
            Self::Worse => "WORSE, beyond the spread",
            Self::TooFewRounds => "too few rounds to tell",
        }
    }
}

/// Compares two reports, named by their files.
#[must_use]
pub fn reports((a_file, a): (&str, &Report), (b_file, b): (&str, &Report)) -> Comparison {
    let mut comparison = Comparison {
        a: of(a_file, a),
        b: of(b_file, b),
        differences: differences(a, b),
        rows: Vec::new(),
        in_one_only: Vec::new(),
    };
    for (scenario, point) in points(a) {
        let mut others =
            points(b).filter(|(name, other)| *name == scenario && other.name == point.name);
        match others.next() {
            Some((_, other)) => comparison.point(scenario, point, other),
            None => comparison.missing(scenario, &point.name, "", "A"),
        }
    }
    for (scenario, point) in points(b) {
        if !points(a).any(|(name, other)| name == scenario && other.name == point.name) {
            comparison.missing(scenario, &point.name, "", "B");
        }
    }
    comparison
}

impl Comparison {
    fn point(&mut self, scenario: &str, a: &PointReport, b: &PointReport) {
        let of = |point, peer: &str| measured(point).find(|path| path.peer == peer);
        for path in measured(a).filter(|path| of(b, &path.peer).is_none()) {
            self.missing(scenario, &a.name, &path.peer, "A");
        }
        for path in measured(b).filter(|path| of(a, &path.peer).is_none()) {
            self.missing(scenario, &b.name, &path.peer, "B");
        }
        for measure in &a.measures {
            let same = |other: &Measure| other.key == measure.key && other.unit == measure.unit;
            if !b.measures.iter().any(same) {
                self.missing(scenario, &a.name, &measure.label, "A");
                continue;
            }
            for path in measured(a) {
                let row = of(b, &path.peer).and_then(|other| row(measure, path, other));
                self.rows.extend(row.map(|row| Row {
                    scenario: scenario.to_owned(),
                    point: a.name.clone(),
                    ..row
                }));
            }
        }
    }

    fn missing(&mut self, scenario: &str, point: &str, peer: &str, only: &str) {
        let peer = match peer {
            "" => String::new(),
            peer => format!(", {peer}"),
        };
        let what = format!("{scenario}, {point}{peer}: only in {only}");
        self.in_one_only.push(what);
    }

    /// As text for people.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = "Two reports side by side\n\n".to_owned();
        for (name, of) in [("A", &self.a), ("B", &self.b)] {
            let value = format!("{}, of {}, commit {}", of.file, of.started, of.commit);
            text.push_str(&paragraph(&format!("  {name}  "), &value));
        }
        text.push('\n');
        text.push_str(&paragraph(
            "",
            "The two were not interleaved: whatever changed on the machine between them is in the \
             ratios, too. A verdict stands only where the spreads do not overlap, and even there \
             it is a hint; `cargo xtask bench compare` measures two commits in one run.",
        ));
        for difference in &self.differences {
            text.push_str(&paragraph("  - not the same: ", difference));
        }
        let mut rows = self.rows.as_slice();
        while let Some(first) = rows.first() {
            let same = |row: &&Row| row.scenario == first.scenario && row.point == first.point;
            let (now, later) = rows.split_at(rows.iter().take_while(same).count());
            text.push_str(&format!("\n## {}, {}\n", first.scenario, first.point));
            text.push_str(&tables(now));
            rows = later;
        }
        if self.rows.is_empty() {
            text.push_str("\nThey have no figure in common.\n");
        }
        if !self.in_one_only.is_empty() {
            text.push_str("\nNot compared:\n");
        }
        for missing in &self.in_one_only {
            text.push_str(&paragraph("  - ", missing));
        }
        text
    }
}

/// One table per measure.
fn tables(rows: &[Row]) -> String {
    let mut measures: Vec<&Measure> = Vec::new();
    for row in rows {
        if !measures.contains(&&row.measure) {
            measures.push(&row.measure);
        }
    }
    let mut text = String::new();
    for measure in measures {
        let (label, unit, better) = (&measure.label, &measure.unit, better(measure.better));
        text.push_str(&format!("\n  {label}, {unit} {better}\n"));
        let heads = ["", "A", "B", "B / A", ""].map(|head| vec![head.to_owned()]);
        let mut table = Table::new(heads.to_vec());
        for row in rows.iter().filter(|row| row.measure == *measure) {
            let cells = vec![
                Cell::of(Some(&row.a)),
                Cell::of(Some(&row.b)),
                Cell::of_ratio(row.ratio.as_ref()),
                Cell::Text(row.verdict.words().to_owned()),
            ];
            table.row(&row.peer, cells);
        }
        text.push_str(&table.print(4));
    }
    text
}

fn row(measure: &Measure, a: &PathReport, b: &PathReport) -> Option<Row> {
    let (in_a, in_b) = (a.spread.get(&measure.key)?, b.spread.get(&measure.key)?);
    let rounds = a.runs.len().min(b.runs.len());
    Some(Row {
        scenario: String::new(),
        point: String::new(),
        peer: a.peer.clone(),
        measure: measure.clone(),
        a: *in_a,
        b: *in_b,
        ratio: ratio(in_a, in_b),
        verdict: verdict(in_a, in_b, measure.better, rounds),
    })
}

fn verdict(a: &Spread, b: &Spread, better: Better, rounds: usize) -> Verdict {
    if rounds < ROUNDS {
        return Verdict::TooFewRounds;
    }
    let less = b.max < a.min;
    let more = b.min > a.max;
    match better {
        _ if !less && !more => Verdict::WithinTheSpread,
        Better::Lower if less => Verdict::Better,
        Better::Higher if more => Verdict::Better,
        Better::Lower | Better::Higher => Verdict::Worse,
    }
}

fn ratio(a: &Spread, b: &Spread) -> Option<Spread> {
    (a.min > 0.0).then(|| Spread {
        median: b.median / a.median,
        min: b.min / a.max,
        max: b.max / a.min,
    })
}

fn differences(a: &Report, b: &Report) -> Vec<String> {
    let seconds = |report: &Report| format!("{} s", report.seconds);
    let pairs = [
        ("host", a.host.line(), b.host.line()),
        ("rounds", a.rounds.to_string(), b.rounds.to_string()),
        ("measured for", seconds(a), seconds(b)),
        ("CPUs", placement(&a.placement), placement(&b.placement)),
    ];
    let mut differences: Vec<String> = pairs
        .into_iter()
        .filter(|(_, a, b)| a != b)
        .map(|(what, a, b)| format!("{what}: {a} in A, {b} in B"))
        .collect();
    for peer in &a.peers {
        let other = b.peers.iter().find(|other| other.name == peer.name);
        let versions = other.map(|other| (&peer.version, &other.version));
        if let Some((Some(in_a), Some(in_b))) = versions.filter(|(a, b)| a != b) {
            let name = &peer.name;
            differences.push(format!("{name}: {in_a} in A, {in_b} in B"));
        }
    }
    differences
}

fn of(file: &str, report: &Report) -> Of {
    Of {
        file: file.to_owned(),
        started: report.started.clone(),
        commit: report.commit.clone(),
    }
}

fn points(report: &Report) -> impl Iterator<Item = (&str, &PointReport)> {
    let scenarios = report.scenarios.iter();
    scenarios.flat_map(|scenario| {
        let points = scenario.points.iter();
        points.map(|point| (scenario.name.as_str(), point))
    })
}

fn measured(point: &PointReport) -> impl Iterator<Item = &PathReport> {
    point.paths.iter().filter(|path| !path.runs.is_empty())
}

#[cfg(test)]
mod tests {
    use super::super::fixture;
    use super::*;

    fn scaled(factor: f64) -> Report {
        let mut report = fixture::small();
        for path in &mut report.scenarios[0].points[0].paths {
            for run in &mut path.runs {
                let cpu = run.values.get_mut("cpu").unwrap();
                *cpu *= if path.peer == "gate" { factor } else { 1.0 };
            }
        }
        report.complete();
        report
    }

    #[test]
    fn verdicts_stand_only_beyond_the_spread() {
        let base = scaled(1.0);
        let verdicts = |factor: f64| -> Vec<Verdict> {
            let other = scaled(factor);
            let comparison = reports(("a", &base), ("b", &other));
            comparison.rows.iter().map(|row| row.verdict).collect()
        };
        let within = Verdict::WithinTheSpread;
        // gate's spread is 10 to 30.
        assert_eq!(verdicts(1.1), [within, within]);
        assert_eq!(verdicts(3.0), [within, within], "30 touches 30");
        assert_eq!(verdicts(3.1), [Verdict::Worse, within]);
        assert_eq!(verdicts(0.3), [Verdict::Better, within]);
        let spread = Spread::of([1.0]).unwrap();
        let other = Spread::of([2.0]).unwrap();
        assert_eq!(verdict(&spread, &other, Better::Higher, 5), Verdict::Better);
        let few = verdict(&spread, &other, Better::Higher, 1);
        assert_eq!(few, Verdict::TooFewRounds);
    }

    #[test]
    fn the_ratio_is_of_medians_and_as_wide_as_the_spreads_allow() {
        let (a, b) = (scaled(1.0), scaled(2.0));
        let comparison = reports(("a.json", &a), ("b.json", &b));
        let ratio = comparison.rows[0].ratio.unwrap();
        assert_eq!(
            (ratio.median, ratio.min, ratio.max),
            (2.0, 20.0 / 30.0, 6.0)
        );
        let text = comparison.text();
        assert!(text.contains("were not interleaved"), "{text}");
        assert!(
            text.contains("2.00 [0.667 - 6.00]   within the spread"),
            "{text}"
        );
    }

    #[test]
    fn what_only_one_has_is_named() {
        let a = scaled(1.0);
        let mut b = scaled(1.0);
        b.scenarios[0].points[0].paths.remove(1);
        let mut more = b.scenarios[0].points[0].clone();
        more.name = "8 KiB x 4".to_owned();
        b.scenarios[0].points.push(more);
        b.host.kernel = "6.12.0".to_owned();
        let comparison = reports(("a", &a), ("b", &b));
        let expected = [
            "relay, 64 B x 16, haproxy: only in A",
            "relay, 8 KiB x 4: only in B",
        ];
        assert_eq!(comparison.in_one_only, expected);
        assert_eq!(comparison.rows.len(), 1);
        assert!(comparison.differences[0].contains("6.12.0"));
    }
}
