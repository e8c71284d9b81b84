//! `gatectl limits unset ...`.

use clap::Subcommand;
use gate::control::api::LimitChange;
use gate::control::limits;

use super::{name_text, print_entry, warn_of_excess};
use crate::output::Output;
use crate::target::{Failure, Reached, Target};

#[derive(Subcommand)]
pub enum Key {
    /// Of one user
    User(Named),
    /// Of one database
    Database(Named),
    /// Of one backend of the configuration
    Backend(Named),
    /// Of each user without a limit of its own
    DefaultUser,
    /// Of each database without a limit of its own
    DefaultDatabase,
    /// Of all admitted sessions
    MaxConnections,
    /// Of connections without a valid startup packet
    MaxPending,
    /// Of sockets of each listener, or of one
    Ceiling {
        /// A listener's address
        listener: Option<String>,
    },
    /// Of sockets over the ceiling
    OverHeadroom,
}

#[derive(clap::Args)]
pub struct Named {
    /// Whose, in the escaped form
    #[arg(value_name = "NAME", value_parser = name_text)]
    name: String,
}

pub fn run(key: Key, target: &Target, output: Output) -> Result<(), Failure> {
    let (key, name) = match key {
        Key::User(Named { name }) => ("user", Some(name)),
        Key::Database(Named { name }) => ("database", Some(name)),
        Key::Backend(Named { name }) => ("backend", Some(name)),
        Key::DefaultUser => ("default-user", None),
        Key::DefaultDatabase => ("default-database", None),
        Key::MaxConnections => ("max-connections", None),
        Key::MaxPending => ("max-pending", None),
        Key::Ceiling { listener } => ("ceiling", listener),
        Key::OverHeadroom => ("over-headroom", None),
    };
    let change = LimitChange {
        key: key.to_owned(),
        name,
        value: None,
    };
    let entry = match target.for_limits()? {
        Reached::Maps(ledger) => {
            let entry = limits::unset(&ledger, &change).map_err(Failure::new)?;
            warn_of_excess(&ledger);
            entry
        }
        Reached::Gate(()) => target.post("/limits/unset", Some(&change))?,
    };
    print_entry(&entry, output)
}
