//! `gate-bench`: what gate costs, beside what a user would run in its place.

mod host;
mod peer;
mod report;
mod stats;

fn main() {}
