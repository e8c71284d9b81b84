//! `gate-bench`: what gate costs, beside what a user would run in its place.

mod host;
mod peer;
mod report;
mod stats;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// What gate costs, beside what a user would run in its place
#[derive(Parser)]
#[command(name = "gate-bench", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print and plot a report or histograms, and compare two of them
    Report(report::Options),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Report(options) => report::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
