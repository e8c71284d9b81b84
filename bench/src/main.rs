//! `gate-bench`: what gate costs, beside what a user would run in its place.

mod baseline;
mod host;
mod peer;
mod report;
mod stats;

use clap::Parser;

/// What gate costs, beside what a user would run in its place
#[derive(Parser)]
#[command(version)]
enum Cli {
    /// Run one of the bench's own relays
    Baseline(baseline::Options),
}

fn main() -> anyhow::Result<()> {
    match Cli::parse() {
        Cli::Baseline(options) => baseline::run(&options),
    }
}
