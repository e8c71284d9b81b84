//! `gate-bench`: load on gate, and gate beside its peers.
//!
//! | module | what it holds |
//! |---|---|
//! | [`storm`] | refusals as fast as a bounded number of clients can have them |
//! | [`pgbench`] | pgbench through gate, through HAProxy and directly, interleaved |
//! | [`peer`] | the proxies that a comparison starts and ends |
//! | [`cpu`] | what a process has spent |
//! | [`host`] | what a figure is worth nothing without: versions, kernel, settings |
//! | [`stats`] | medians and paired ratios |

mod cpu;
mod host;
mod peer;
mod pgbench;
mod stats;
mod storm;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Load generators for gate, and comparisons with its peers.
///
/// Text on stdout, or JSON with --json; progress on stderr. Exit codes: 0 done,
/// 1 failed, also when an answer was not the one that the load asks for.
#[derive(Parser)]
#[command(name = "gate-bench", version)]
struct Line {
    /// Print the report as JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    load: Load,
}

#[derive(Subcommand)]
enum Load {
    Storm(storm::Options),
    Pgbench(pgbench::Options),
}

fn main() -> ExitCode {
    let line = Line::parse();
    let result = match &line.load {
        Load::Storm(options) => storm::run(options, line.json),
        Load::Pgbench(options) => pgbench::run(options, line.json),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gate-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
