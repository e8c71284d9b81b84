//! New sessions per second.

use super::{Plan, Point, Stage, all_sides_first, paced_measures, unit_measures};
use crate::load::attempts::{self, Attempts, Goal};
use crate::load::pace::Pace;
use crate::load::session;

/// Clients of the closed loop.
const CLIENTS: usize = 32;

pub fn points(_: &Plan) -> Vec<Point> {
    vec![point(Pace::Closed)]
}

/// Clients that connect, log in, and leave at ReadyForQuery.
pub fn point(pace: Pace) -> Point {
    let (name, about, measures, at_once) = match pace {
        Pace::Closed => (
            format!("{CLIENTS} clients"),
            "each client connects, logs in, leaves at ReadyForQuery, and comes again".to_owned(),
            all_sides_first(unit_measures("session")),
            CLIENTS,
        ),
        Pace::Open { per_second } => (
            format!("{per_second:.0} clients/s"),
            format!(
                "{per_second:.0} clients per second by a schedule connect, log in and leave at ReadyForQuery"
            ),
            paced_measures("session"),
            // Those who wait for a slow proxy.
            1024,
        ),
    };
    let work = Box::new(move |stage: &Stage<'_>| {
        let attempts = Attempts {
            at_once,
            goal: Goal::Ready,
            user: session::USER.to_owned(),
            pace,
        };
        stage.run_units(attempts::start(&stage.place, stage.target, attempts)?)
    });
    Point {
        // A session that has left may not have ended everywhere when the next one comes.
        sessions: 4096,
        new_sessions: true,
        measures,
        timed: Some(match pace {
            Pace::Closed => "from connect to ReadyForQuery; saturated, so most of it is a queue",
            Pace::Open { .. } => "from when a client was due to its ReadyForQuery",
        }),
        pace,
        ..Point::new(name, about, work)
    }
}
