//! `gate-bench`: what gate costs, beside what a user would run in its place.
//!
//! | module | what it holds |
//! |---|---|
//! | [`options`] | what a run can be told |
//! | [`run`] | a run from its options to its report |
//! | [`roster`] | the ways that were asked for, and which are there |
//! | [`runner`] | every point on every way to the server, round by round |
//! | [`verdict`] | who held a run's rate down, and whether it counts |
//! | [`scenario`] | what is measured: one file each |
//! | [`load`] | load generators: an epoll loop per CPU, open and closed loops |
//! | [`backend`] | a server that costs as little as it can |
//! | [`baseline`] | two small relays to compare the engine with |
//! | [`wire`] | the little of the PostgreSQL protocol that both speak |
//! | [`peer`] | the ways to the server: gate, its peers, none |
//! | [`measure`] | CPU, run-queue delay, memory, what disturbed a run |
//! | [`host`] | the machine: facts, settings put back, CPUs, signals |
//! | [`report`] | JSON, text, plots, histograms, comparisons |
//! | [`flame`] | where the cycles go, as a flame graph |
//! | [`stats`] | medians and paired ratios |

mod backend;
mod baseline;
mod flame;
mod host;
mod load;
mod measure;
mod options;
mod peer;
mod report;
mod roster;
mod run;
mod runner;
mod scenario;
mod stats;
mod verdict;
mod wire;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// What gate costs, beside what a user would run in its place.
///
/// Progress on stderr. Exit codes: 0 done, 1 failed, 2 usage.
#[derive(Parser)]
#[command(name = "gate-bench", version)]
struct Line {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    Run(Box<options::Options>),
    Report(report::Options),
    Baseline(baseline::Options),
}

fn main() -> ExitCode {
    let result = match Line::parse().task {
        Task::Run(options) => run::run(&options),
        Task::Report(options) => report::run(&options),
        Task::Baseline(options) => baseline::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gate-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
