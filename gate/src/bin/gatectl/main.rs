//! gatectl: sees and steers a gate.
//!
//! One file per command. Exit codes: 0 done, 1 refused or failed, 2 usage,
//! 4 no such instance.
#![forbid(unsafe_code)]

mod client;
mod completions;
mod connections;
mod drain;
mod latency;
mod limits;
mod output;
mod reload;
mod sessions;
mod status;
mod target;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use output::Output;
use target::{Failure, Target};

/// Sees and steers a gate.
///
/// Names are shown escaped and accepted in the same form: a byte that cannot
/// be printed as \xNN, a backslash doubled. Exit codes: 0 done, 1 refused or
/// failed, 2 usage, 4 no such instance.
#[derive(Parser)]
#[command(name = "gatectl", version)]
struct Line {
    /// Name of the instance [default: default]
    #[arg(long, global = true, value_name = "NAME", env = "GATE_INSTANCE", value_parser = instance)]
    instance: Option<String>,
    /// Its control socket [default: /run/gate/INSTANCE/control.sock]
    #[arg(long, global = true, value_name = "PATH", env = "GATE_CONTROL")]
    control: Option<PathBuf>,
    /// Print JSON, for programs
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// One screen: state, kernel plane, counts against limits, what is limited now
    Status,
    /// Active and limit by user, database, backend, listener
    Connections,
    /// Lists sessions: who, from where, to which backend, what it does, since when
    Sessions(sessions::Filter),
    /// How long admissions, connects, logins and rounds of the loop took
    Latency(latency::Options),
    /// Lists, sets and unsets limits
    #[command(subcommand)]
    Limits(limits::Command),
    /// Refuses new sessions, lets old ones end, then gate exits
    Drain,
    /// Reads the configuration again: limits change at once
    Reload,
    /// Prints a completion script
    Completions {
        /// The shell to complete in
        shell: clap_complete::Shell,
    },
}

fn main() -> ExitCode {
    let line = Line::parse();
    let target = Target::new(line.instance, line.control);
    let output = Output { json: line.json };
    match run(line.command, &target, output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure { exit, message }) => {
            eprintln!("gatectl: {message}");
            ExitCode::from(exit)
        }
    }
}

fn run(command: Command, target: &Target, output: Output) -> Result<(), Failure> {
    // Those are of no instance.
    if !matches!(command, Command::Completions { .. }) {
        target.check()?;
    }
    match command {
        Command::Status => status::run(target, output),
        Command::Connections => connections::run(target, output),
        Command::Sessions(filter) => sessions::run(filter, target, output),
        Command::Latency(options) => latency::run(&options, target, output),
        Command::Limits(command) => limits::run(command, target, output),
        Command::Drain => drain::run(target, output),
        Command::Reload => reload::run(target, output),
        Command::Completions { shell } => completions::run::<Line>(shell, output),
    }
}

fn instance(text: &str) -> Result<String, String> {
    gate::config::check_instance(text).map(|()| text.to_owned())
}

#[cfg(test)]
mod tests;
