//! How long a client waits until it is let in.

use super::{Plan, Point, connect};
use crate::load::pace::Pace;

/// Clients per second: a part of what one CPU lets in.
const RATE: f64 = 1000.0;

pub fn points(plan: &Plan) -> Vec<Point> {
    let per_second = plan.rate.unwrap_or(RATE);
    vec![connect::point(Pace::Open { per_second })]
}
