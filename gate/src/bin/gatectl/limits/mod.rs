//! `gatectl limits ...`.

mod export;
mod list;
mod set;
mod unset;

use std::io::Write as _;

use clap::Subcommand;
use gate::config::name;
use gate::control::api::LimitEntry;
use gate::control::limits;
use gate::ledger::Ledger;

use crate::output::{self, Output};
use crate::target::{Failure, Target};

#[derive(Subcommand)]
pub enum Command {
    /// Every limit with its value, use and source (config, runtime, default)
    List,
    /// Sets a limit while gate runs, or is down; N is a number (0 = unlimited), `unlimited` or `none`
    #[command(subcommand)]
    Set(set::Key),
    /// Takes back what was set: the configuration's limit is in force again
    #[command(subcommand)]
    Unset(unset::Key),
    /// The limits in force as TOML, for the configuration file
    Export,
}

pub fn run(command: Command, target: &Target, output: Output) -> Result<(), Failure> {
    match command {
        Command::List => list::run(target, output),
        Command::Set(key) => set::run(key, target, output),
        Command::Unset(key) => unset::run(key, target, output),
        Command::Export => export::run(target, output),
    }
}

/// A name on the command line: kept in the escaped form, in which it travels.
fn name_text(text: &str) -> Result<String, name::NameError> {
    name::parse(text).map(|_| text.to_owned())
}

/// After a change in the maps, of which gate itself learns nothing that it could log.
fn warn_of_excess(ledger: &Ledger) {
    let text = match limits::excess(ledger) {
        Ok(None) => return,
        Ok(Some(excess)) => excess.to_string(),
        Err(error) => error.to_string(),
    };
    // The change is made, whether or not somebody reads this.
    let _ = writeln!(std::io::stderr(), "gatectl: warning: {text}");
}

/// What is in force after a change.
fn print_entry(entry: &LimitEntry, output: Output) -> Result<(), Failure> {
    output.print(entry, |entry| {
        let name = entry
            .name
            .as_ref()
            .map(|name| format!(" {name}"))
            .unwrap_or_default();
        let used = entry
            .used
            .map(|used| format!(", {used} in use"))
            .unwrap_or_default();
        let limit = output::limit(entry.limit.get());
        let inactive = if entry.inactive {
            "; not enforced without the kernel plane"
        } else {
            ""
        };
        format!(
            "{}{name}: {limit} ({}){used}{inactive}\n",
            entry.key, entry.source
        )
    })
}
