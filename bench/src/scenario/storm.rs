//! Refusals as fast as a bounded number of clients can have them.

use super::{Plan, Point, Server, Stage, all_sides_first, paced_measures, unit_measures};
use crate::load::attempts::{self, Attempts, Goal};
use crate::load::pace::Pace;
use crate::peer::{REFUSED_USER, Role};

const CLIENTS: usize = 64;
/// Refusals per second of the open loop.
const RATE: f64 = 2000.0;

pub fn points(plan: &Plan) -> Vec<Point> {
    let rate = Pace::Open {
        per_second: plan.rate.unwrap_or(RATE),
    };
    vec![polite(Pace::Closed), polite(rate), hard(Pace::Closed)]
}

/// FATAL 53300 after the startup packet.
pub fn polite(pace: Pace) -> Point {
    Point {
        role: Role::RefusePolitely,
        server: Server::PostgresIfDirect,
        ..point(
            "polite",
            "an ErrorResponse after its startup packet",
            pace,
            Goal::RefusedPolitely,
        )
    }
}

fn hard(pace: Pace) -> Point {
    Point {
        role: Role::RefuseHard,
        ..point(
            "hard",
            "a reset or the end, as early as the proxy can",
            pace,
            Goal::RefusedHard,
        )
    }
}

fn point(kind: &str, answer: &str, pace: Pace, goal: Goal) -> Point {
    let (name, measures, who, at_once) = match pace {
        Pace::Closed => (
            format!("{kind}, {CLIENTS} clients"),
            all_sides_first(unit_measures("refusal")),
            "each client comes again when it has been refused".to_owned(),
            CLIENTS,
        ),
        Pace::Open { per_second } => (
            format!("{kind}, {per_second:.0} clients/s"),
            paced_measures("refusal"),
            format!("{per_second:.0} clients per second by a schedule"),
            1024,
        ),
    };
    let work = Box::new(move |stage: &Stage<'_>| {
        let attempts = Attempts {
            at_once,
            goal,
            user: REFUSED_USER.to_owned(),
            pace,
        };
        stage.run_units(attempts::start(&stage.place, stage.target, attempts)?)
    });
    Point {
        sessions: 4096,
        measures,
        timed: Some(match pace {
            Pace::Closed => {
                "from connect to the end of the refusal; saturated, so most of it is a queue"
            }
            Pace::Open { .. } => "from when a client was due to the end of its refusal",
        }),
        pace,
        ..Point::new(
            name,
            format!("every client is refused by {answer}: {who}"),
            work,
        )
    }
}
