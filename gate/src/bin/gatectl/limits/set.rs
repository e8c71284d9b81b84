//! `gatectl limits set ...`.

use clap::Subcommand;
use gate::config::value::LimitValue;
use gate::control::api::LimitChange;
use gate::control::limits;

use super::{name_text, print_entry, warn_of_excess};
use crate::output::Output;
use crate::target::{EXIT_USAGE, Failure, Reached, Target};

#[derive(Subcommand)]
pub enum Key {
    /// Sessions of one user
    User(Named),
    /// Sessions of one database
    Database(Named),
    /// Sockets to one backend of the configuration
    Backend(Named),
    /// Sessions of each user without a limit of its own
    DefaultUser(Plain),
    /// Sessions of each database without a limit of its own
    DefaultDatabase(Plain),
    /// Admitted sessions over all listeners
    MaxConnections(Plain),
    /// Connections without a valid startup packet
    MaxPending(Plain),
    /// Sockets of each listener, or of one; N may be `auto`
    #[command(override_usage = "gatectl limits set ceiling [LISTENER] N")]
    Ceiling {
        /// `N`, or a listener's address and `N`
        #[arg(required = true, num_args = 1..=2, value_name = "[LISTENER] N")]
        arguments: Vec<String>,
    },
    /// Sockets over the ceiling before new ones are reset; N may be `auto`
    OverHeadroom(Plain),
    /// Sockets of one source address (not supported yet)
    PerSource(Plain),
}

#[derive(clap::Args)]
pub struct Named {
    /// Whose, in the escaped form
    #[arg(value_name = "NAME", value_parser = name_text)]
    name: String,
    /// A number (0 = unlimited), `unlimited` or `none`
    #[arg(value_name = "N", allow_negative_numbers = true)]
    value: LimitValue,
}

#[derive(clap::Args)]
pub struct Plain {
    /// A number (0 = unlimited), `unlimited` or `none`
    #[arg(value_name = "N", allow_negative_numbers = true)]
    value: LimitValue,
}

pub fn run(key: Key, target: &Target, output: Output) -> Result<(), Failure> {
    let change = change(key)?;
    let entry = match target.for_limits()? {
        Reached::Maps(ledger) => {
            let entry = limits::set(&ledger, &change).map_err(Failure::new)?;
            warn_of_excess(&ledger);
            entry
        }
        Reached::Gate(()) => target.post("/limits/set", Some(&change))?,
    };
    print_entry(&entry, output)
}

fn change(key: Key) -> Result<LimitChange, Failure> {
    let named = |key: &str, Named { name, value }| make(key, Some(name), value);
    let plain = |key: &str, Plain { value }| make(key, None, value);
    Ok(match key {
        Key::User(limit) => named("user", limit),
        Key::Database(limit) => named("database", limit),
        Key::Backend(limit) => named("backend", limit),
        Key::DefaultUser(limit) => plain("default-user", limit),
        Key::DefaultDatabase(limit) => plain("default-database", limit),
        Key::MaxConnections(limit) => plain("max-connections", limit),
        Key::MaxPending(limit) => plain("max-pending", limit),
        Key::OverHeadroom(limit) => plain("over-headroom", limit),
        Key::PerSource(limit) => plain("per-source", limit),
        Key::Ceiling { mut arguments } => {
            let text = arguments.pop().unwrap_or_default();
            let value = text.parse().map_err(|message| Failure {
                exit: EXIT_USAGE,
                message,
            })?;
            make("ceiling", arguments.pop(), value)
        }
    })
}

fn make(key: &str, name: Option<String>, value: LimitValue) -> LimitChange {
    LimitChange {
        key: key.to_owned(),
        name,
        value: Some(value.to_string()),
    }
}
