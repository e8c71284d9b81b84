//! The goals that gate is built to, and whether a report meets them.

use std::fmt::Write as _;

use super::figures::{Cell, Table, figure, paragraph};
use super::model::{Goal, PathReport, PointReport, Report, Run, Verdict};
use crate::stats::Spread;
use Bound::{AtLeast, AtMost, Reported};
use Named::{Begins, Is};

/// A line is read whole: the verdict is its end.
const WIDTH: usize = 160;

/// A line of the table.
struct Line {
    scenario: &'static str,
    point: Named,
    /// The key of a measure.
    key: &'static str,
    /// Whose figure, as a ratio to whose.
    way: &'static str,
    to: Option<&'static str>,
    bound: Bound,
    stretch: Option<f64>,
}

/// Which point of a scenario. Of several the last one, which is the largest.
#[derive(Clone, Copy)]
enum Named {
    Is(&'static str),
    Begins(&'static str),
}

#[derive(Clone, Copy)]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
    /// No goal: the figure is of use beside the others.
    Reported,
}

const fn line(
    scenario: &'static str,
    point: Named,
    key: &'static str,
    ways: (&'static str, Option<&'static str>),
    bound: Bound,
) -> Line {
    Line {
        scenario,
        point,
        key,
        way: ways.0,
        to: ways.1,
        bound,
        stretch: None,
    }
}

impl Line {
    const fn stretch(mut self, to: f64) -> Self {
        self.stretch = Some(to);
        self
    }
}

const TO_HAPROXY: (&str, Option<&str>) = ("gate", Some("haproxy"));
const TO_PGBOUNCER: (&str, Option<&str>) = ("gate", Some("pgbouncer"));
const UNIX_TO_TCP: (&str, Option<&str>) = ("gate-unix", Some("gate"));
const UNIX_TO_HAPROXY: (&str, Option<&str>) = ("gate-unix", Some("haproxy-unix"));
const UNIX_TO_PGBOUNCER: (&str, Option<&str>) = ("gate-unix", Some("pgbouncer-unix"));
const TO_DIRECT: (&str, Option<&str>) = ("gate", Some("direct"));
const ALONE: (&str, Option<&str>) = ("gate", None);

/// All of them, in the order in which they are printed.
const LINES: &[Line] = &[
    line(
        "relay",
        Is("64 B x 16"),
        "proxy_cpu",
        TO_HAPROXY,
        AtMost(0.85),
    )
    .stretch(0.75),
    line(
        "relay",
        Is("64 B x 256"),
        "proxy_cpu",
        TO_HAPROXY,
        AtMost(0.85),
    )
    .stretch(0.75),
    line(
        "relay",
        Begins("64 B x 16 at "),
        "p99",
        TO_HAPROXY,
        AtMost(1.0),
    ),
    line(
        "relay",
        Begins("64 B x 256 at "),
        "p99",
        TO_HAPROXY,
        AtMost(1.0),
    ),
    line(
        "relay",
        Is("64 B x 16"),
        "proxy_cpu",
        UNIX_TO_HAPROXY,
        Reported,
    ),
    line(
        "mixed",
        Is("pgbench -S"),
        "proxy_cpu",
        TO_HAPROXY,
        AtMost(0.85),
    )
    .stretch(0.75),
    line(
        "mixed",
        Is("pgbench -S"),
        "proxy_cpu",
        TO_PGBOUNCER,
        AtMost(0.85),
    )
    .stretch(0.75),
    line("mixed", Is("pgbench -S"), "rate", TO_HAPROXY, AtLeast(1.05)),
    line(
        "mixed",
        Is("pgbench -S"),
        "rate",
        TO_PGBOUNCER,
        AtLeast(1.05),
    ),
    line(
        "mixed",
        Is("pgbench -S"),
        "proxy_cpu",
        UNIX_TO_TCP,
        AtMost(1.0),
    ),
    line("mixed", Is("pgbench -S"), "rate", UNIX_TO_TCP, AtLeast(1.0)),
    line(
        "mixed",
        Is("pgbench -S"),
        "proxy_cpu",
        UNIX_TO_HAPROXY,
        Reported,
    ),
    line(
        "mixed",
        Is("pgbench -S"),
        "proxy_cpu",
        UNIX_TO_PGBOUNCER,
        Reported,
    ),
    line("mixed", Is("pgbench -S"), "rate", UNIX_TO_HAPROXY, Reported),
    line(
        "mixed",
        Is("pgbench -S"),
        "rate",
        UNIX_TO_PGBOUNCER,
        Reported,
    ),
    line("bulk", Is("1 down"), "proxy_cpu", TO_HAPROXY, AtMost(0.3)),
    line("bulk", Is("1 up"), "proxy_cpu", TO_HAPROXY, AtMost(0.3)),
    line("bulk", Is("8 down"), "proxy_cpu", TO_HAPROXY, AtMost(0.3)),
    line("bulk", Is("8 up"), "proxy_cpu", TO_HAPROXY, AtMost(0.3)),
    line(
        "storm",
        Is("polite, 64 clients"),
        "proxy_cpu",
        TO_PGBOUNCER,
        AtMost(0.5),
    ),
    // The kernel plane's work at the handshake is done in the client's time.
    line(
        "storm",
        Is("polite, 64 clients"),
        "all_cpu",
        TO_PGBOUNCER,
        Reported,
    ),
    line(
        "mixed",
        Is("pgbench -S -C"),
        "rate",
        TO_DIRECT,
        AtLeast(0.9),
    ),
    line("idle", Begins(""), "user_kib", ALONE, AtMost(0.33)),
    line("stall", Begins(""), "p99_ratio", ALONE, AtMost(1.2)),
];

/// The ways that the lines of a point need.
#[must_use]
pub fn ways(scenario: &str, point: &str) -> Vec<&'static str> {
    let lines = LINES.iter();
    ways_of(lines.filter(|line| line.scenario == scenario && line.point.is(point)))
}

/// The ways that some line needs.
#[must_use]
pub fn all_ways() -> Vec<&'static str> {
    ways_of(LINES.iter())
}

fn ways_of(lines: impl Iterator<Item = &'static Line>) -> Vec<&'static str> {
    let mut ways = Vec::new();
    for way in lines.flat_map(|line| [Some(line.way), line.to]).flatten() {
        if !ways.contains(&way) {
            ways.push(way);
        }
    }
    ways
}

/// Every line, of a report that is complete.
#[must_use]
pub fn judge(report: &Report) -> Vec<Goal> {
    LINES.iter().map(|line| line.judge(report)).collect()
}

impl Named {
    fn is(self, name: &str) -> bool {
        match self {
            Is(whole) => name == whole,
            Begins(with) => name.starts_with(with),
        }
    }
}

impl Bound {
    fn words(self) -> Option<String> {
        match self {
            AtMost(bound) => Some(format!("at most {bound}")),
            AtLeast(bound) => Some(format!("at least {bound}")),
            Reported => None,
        }
    }

    /// The same with another number.
    fn of(self, bound: f64) -> Self {
        match self {
            AtMost(_) => AtMost(bound),
            AtLeast(_) => AtLeast(bound),
            Reported => Reported,
        }
    }

    fn is_met_by(self, value: f64) -> bool {
        match self {
            AtMost(bound) => value <= bound,
            AtLeast(bound) => value >= bound,
            Reported => true,
        }
    }
}

impl Line {
    fn judge(&self, report: &Report) -> Goal {
        let point = self.find(report);
        let name = point.map_or("", |point| point.name.as_str());
        let label = point.and_then(|point| {
            let found = point.measures.iter().find(|one| one.key == self.key)?;
            Some(match (self.to, found.unit.as_str()) {
                (Some(_), _) | (None, "") => found.label.clone(),
                (None, unit) => format!("{}, {unit}", found.label),
            })
        });
        let label = label.unwrap_or_else(|| self.key.to_owned());
        let figure = match self.to {
            Some(to) => format!("{label}, {} / {to}", self.way),
            None => format!("{label}, {}", self.way),
        };
        let mut goal = Goal {
            work: format!("{} {name}", self.scenario).trim_end().to_owned(),
            figure,
            goal: self.bound.words(),
            stretch: self.stretch.and_then(|to| self.bound.of(to).words()),
            measured: None,
            rounds: 0,
            verdict: Verdict::NotMeasured,
            notes: Vec::new(),
        };
        match point {
            Some(point) => self.fill(&mut goal, point, report.rounds as usize),
            None => goal.notes.push("it was not run".to_owned()),
        }
        goal
    }

    fn find<'a>(&self, report: &'a Report) -> Option<&'a PointReport> {
        let scenarios = report.scenarios.iter();
        let mut points = scenarios
            .filter(|one| one.name == self.scenario)
            .flat_map(|one| &one.points);
        points.rfind(|point| self.point.is(&point.name))
    }

    fn fill(&self, goal: &mut Goal, point: &PointReport, rounds_asked: usize) {
        let of = |name: &str| point.paths.iter().find(|path| path.peer == name);
        let both: Vec<&str> = [Some(self.way), self.to].into_iter().flatten().collect();
        for name in &both {
            match of(name) {
                None => goal.notes.push(format!("{name} took no part")),
                Some(PathReport {
                    left_out: Some(why),
                    ..
                }) => goal.notes.push(format!("{name} was left out: {why}")),
                Some(_) => {}
            }
        }
        let path = of(self.way);
        let measured = path.and_then(|path| match self.to {
            Some(to) => path.ratios.get(self.key)?.get(to),
            None => path.spread.get(self.key),
        });
        let Some(measured) = measured.copied() else {
            return;
        };
        goal.measured = Some(measured);
        goal.rounds = self.rounds(both.iter().filter_map(|name| of(name)));
        goal.verdict = self.verdict(&measured);
        if let AtMost(bound) | AtLeast(bound) = self.bound
            && measured.min <= bound
            && bound <= measured.max
            && measured.min < measured.max
        {
            goal.notes.push("the spread includes the goal".to_owned());
        }
        if goal.rounds < rounds_asked {
            let (have, all) = (goal.rounds, rounds_asked);
            goal.notes.push(format!("{have} of {all} rounds"));
        }
        for path in both.iter().filter_map(|name| of(name)) {
            let disturbed = path.runs.iter().filter(|run| run.disturbed.is_some());
            let (count, all) = (disturbed.count(), path.runs.len());
            if count > 0 {
                let name = &path.peer;
                goal.notes
                    .push(format!("{name}: {count} of {all} runs disturbed"));
            }
        }
    }

    /// Those in which every way has the figure.
    fn rounds<'a>(&self, mut paths: impl Iterator<Item = &'a PathReport>) -> usize {
        let has = |run: &&Run| run.values.contains_key(self.key);
        let rounds = |path: &'a PathReport| {
            let runs = path.runs.iter().filter(has);
            runs.map(|run| run.round).collect::<Vec<_>>()
        };
        let first = paths.next().map(rounds).unwrap_or_default();
        match paths.next().map(rounds) {
            Some(second) => first.iter().filter(|one| second.contains(one)).count(),
            None => first.len(),
        }
    }

    fn verdict(&self, measured: &Spread) -> Verdict {
        let stretch = self.stretch.map(|to| self.bound.of(to));
        match self.bound {
            Reported => Verdict::Reported,
            bound if !bound.is_met_by(measured.median) => Verdict::Missed,
            _ if stretch.is_some_and(|to| to.is_met_by(measured.median)) => Verdict::MetWithStretch,
            _ => Verdict::Met,
        }
    }
}

impl Verdict {
    fn words(self) -> &'static str {
        match self {
            Self::MetWithStretch => "met, stretch too",
            Self::Met => "met",
            Self::Missed => "MISSED",
            Self::Reported => "no goal",
            Self::NotMeasured => "not measured",
        }
    }
}

/// The table; nothing without goals.
#[must_use]
pub fn text(goals: &[Goal]) -> String {
    if goals.is_empty() {
        return String::new();
    }
    let head = ["work", "figure", "goal", "measured", "verdict"];
    let mut table = Table::new(head.map(|head| vec![head.to_owned()]).to_vec());
    let mut notes = Vec::new();
    for goal in goals {
        let bound = match (&goal.goal, &goal.stretch) {
            (Some(goal), Some(stretch)) => {
                // `at most 0.85 (0.75)`: the stretch has the same words before its number.
                let number = stretch.rsplit(' ').next().unwrap_or_default();
                format!("{goal} ({number})")
            }
            (Some(goal), None) => goal.clone(),
            (None, _) => "-".to_owned(),
        };
        let measured = goal.measured.map_or_else(
            || "-".to_owned(),
            |Spread { median, min, max }| {
                let [median, min, max] = [median, min, max].map(figure);
                format!("{median} [{min} - {max}]")
            },
        );
        let cells = [
            Cell::Text(goal.figure.clone()),
            Cell::Text(bound),
            Cell::Text(measured),
            Cell::Text(goal.verdict.words().to_owned()),
        ];
        table.row(&goal.work, cells.to_vec());
        if !goal.notes.is_empty() {
            let about = format!("{}, {}", goal.work, goal.figure);
            notes.push(format!("{about}: {}", goal.notes.join("; ")));
        }
    }
    let title = "goals: median [lowest - highest] of the rounds, ratios paired by round";
    let mut text = format!("\n\n{title}\n{}\n\n", "=".repeat(title.len()));
    text.push_str(&paragraph(
        "",
        "The median decides. In brackets behind a goal: what would be better still.",
    ));
    let _ = write!(text, "\n{}", table.print_within(2, WIDTH));
    if !notes.is_empty() {
        text.push_str("\n  Notes\n");
    }
    for note in notes {
        text.push_str(&paragraph("    - ", &note));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::fixture;
    use super::*;

    /// A report of one point with these ratios of CPU, one for each round.
    fn report(ratios: &[f64]) -> Report {
        let mut report = fixture::small();
        let point = &mut report.scenarios[0].points[0];
        point.measures[0].key = "proxy_cpu".to_owned();
        let path = |peer: &str, value: fn(f64) -> f64| {
            let runs = (0..).zip(ratios).map(|(round, ratio)| Run {
                round,
                values: [("proxy_cpu".to_owned(), value(*ratio))].into(),
                ..Run::default()
            });
            PathReport {
                peer: peer.to_owned(),
                runs: runs.collect(),
                ..PathReport::default()
            }
        };
        point.paths = vec![
            path("gate", |ratio| ratio * 20.0),
            path("haproxy", |_| 20.0),
        ];
        report.rounds = ratios.len() as u32;
        report.complete();
        report
    }

    #[test]
    fn the_median_decides() {
        for (ratios, verdict, note) in [
            (&[0.7, 0.75, 0.76][..], Verdict::MetWithStretch, false),
            (&[0.8, 0.85, 0.9], Verdict::Met, true),
            (&[0.7, 0.86, 0.9], Verdict::Missed, true),
            (&[0.9], Verdict::Missed, false),
        ] {
            let goals = judge(&report(ratios));
            let goal = &goals[0];
            assert_eq!(goal.work, "relay 64 B x 16");
            assert_eq!(goal.figure, "proxy CPU, gate / haproxy");
            assert_eq!(goal.verdict, verdict, "{ratios:?}");
            assert_eq!(goal.rounds, ratios.len());
            assert_eq!(goal.notes.is_empty(), !note, "{:?}", goal.notes);
        }
    }

    #[test]
    fn more_is_better_of_rates() {
        let bound = AtLeast(1.05);
        assert!(bound.is_met_by(1.05) && !bound.is_met_by(1.04));
        assert_eq!(bound.words().unwrap(), "at least 1.05");
        assert!(bound.of(2.0).is_met_by(2.0) && !bound.of(2.0).is_met_by(1.9));
    }

    #[test]
    fn what_was_not_measured_says_why() {
        let mut report = report(&[0.8]);
        let paths = &mut report.scenarios[0].points[0].paths;
        paths[1].left_out = Some("failed in round 1: no".to_owned());
        paths[1].runs.clear();
        report.complete();
        let goals = judge(&report);
        assert_eq!(goals.len(), LINES.len());
        assert_eq!(goals[0].verdict, Verdict::NotMeasured);
        assert_eq!(
            goals[0].notes,
            ["haproxy was left out: failed in round 1: no"]
        );
        assert_eq!(goals[1].notes, ["it was not run"]);
        assert!(goals.iter().all(|goal| goal.measured.is_none()));
    }

    #[test]
    fn the_table_reads_like_this() {
        let mut report = report(&[0.8, 0.84, 0.9]);
        report.goals = judge(&report);
        let text = super::super::text::report(&report);
        let (_, table) = text.split_once("\ngoals: ").unwrap();
        let row = table.lines().find(|line| line.contains("64 B x 16"));
        let words: Vec<_> = row.unwrap().split_whitespace().collect();
        let expected = "relay 64 B x 16 proxy CPU, gate / haproxy at most 0.85 (0.75) 0.840 \
                        [0.800 - 0.900] met";
        assert_eq!(words.join(" "), expected);
        assert!(table.contains("not measured") && table.contains("it was not run"));
        report.goals.clear();
        assert!(!super::super::text::report(&report).contains("goals: "));
        let again: Report = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert!(again.goals.is_empty());
    }
}
