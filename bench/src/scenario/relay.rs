//! Ping-pong on sessions that stay open.

use super::{Plan, Point, paced_measures, size, unit_measures};
use crate::load::pace::Pace;
use crate::load::requests::{self, Requests};

/// Requests per second of the open loops: a part of what one CPU can relay, so
/// that latencies are those of a proxy that is not at its end.
const RATE: f64 = 15_000.0;

/// Bytes of request and reply, sessions, open loop too.
const POINTS: [(usize, usize, bool); 5] = [
    (64, 16, true),
    (64, 256, true),
    (1024, 16, false),
    (16 * 1024, 16, false),
    (64 * 1024, 16, false),
];

pub fn points(plan: &Plan) -> Vec<Point> {
    let rate = plan.rate.unwrap_or(RATE);
    let mut points = Vec::new();
    for (bytes, sessions, open_too) in POINTS {
        points.push(point(bytes, sessions, Pace::Closed));
        if open_too {
            points.push(point(bytes, sessions, Pace::Open { per_second: rate }));
        }
    }
    points
}

/// Requests and replies of so many bytes on so many sessions.
pub fn point(bytes: usize, sessions: usize, pace: Pace) -> Point {
    let size = size(bytes);
    let (name, measures, asked) = match pace {
        Pace::Closed => (
            format!("{size} x {sessions}"),
            unit_measures("request"),
            "each session asks again when it is answered".to_owned(),
        ),
        Pace::Open { per_second } => (
            format!("{size} x {sessions} at {per_second:.0}/s"),
            paced_measures("request"),
            format!("{per_second:.0} requests per second by a schedule"),
        ),
    };
    let requests = Requests {
        sessions,
        bytes,
        reply_bytes: bytes,
        pace,
    };
    let work = Box::new(move |stage: &super::Stage<'_>| {
        let crew = requests::start(&stage.place, stage.target, requests)?;
        stage.run_units(crew)
    });
    let about = format!("requests of {size} and replies of {size} on {sessions} sessions: {asked}");
    Point {
        sessions,
        measures,
        timed: Some(match pace {
            Pace::Closed => {
                "from sending a request to the end of its reply; saturated, so most of it is a queue"
            }
            Pace::Open { .. } => "from when a request was due to the end of its reply",
        }),
        pace,
        ..Point::new(name, about, work)
    }
}
