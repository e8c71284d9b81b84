//! The goals that gate is built to, and whether a report meets them.

mod lines;
mod table;

use super::model::{Goal, PathReport, PointReport, Report, Run, Verdict};
use crate::stats::Spread;
use lines::Bound::{AtLeast, AtMost, Reported};
use lines::{LINES, Line};

pub use table::text;

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
