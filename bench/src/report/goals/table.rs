//! The table of goals, as text.

use std::fmt::Write as _;

use crate::report::figures::{Cell, Table, figure, paragraph};
use crate::report::model::{Goal, Verdict};
use crate::stats::Spread;

/// A line is read whole: the verdict is its end.
const WIDTH: usize = 160;

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
