//! `gatectl connections`: the object of `/connections`.

use std::collections::BTreeMap;

use gate::control::api::{Connections, ListenerUse, Named};
use gate::control::connections;
use gate::state::KernelState;
use gate_common::limit::Limit;

use crate::output::{Output, Table, limit};
use crate::target::{Failure, Target, listeners};

pub fn run(target: &Target, output: Output) -> Result<(), Failure> {
    let read = target.read("/connections", |ledger| {
        let listeners = listeners(ledger)?;
        connections::read(ledger, &listeners, &KernelState::Active).map_err(Failure::new)
    })?;
    output.print(&read, text)
}

fn text(connections: &Connections) -> String {
    let total = &connections.total;
    let mut text = format!(
        "active {} of {}, pending {}\n",
        total.active,
        limit(total.limit.get()),
        total.pending
    );
    let mut backends = Table::new(["BACKEND", "ACTIVE", "LIMIT"]);
    for (name, backend) in &connections.by_backend {
        backends.row([
            name.clone(),
            backend.active.to_string(),
            limit(backend.limit.get()),
        ]);
    }
    let tables = [
        named("USER", &connections.by_user),
        named("DATABASE", &connections.by_database),
        backends,
        listener_table(&connections.kernel.listeners),
    ];
    for table in tables.iter().filter(|table| !table.is_empty()) {
        text.push('\n');
        text.push_str(&table.render());
    }
    text
}

/// The sockets of each listener.
pub fn listener_table(listeners: &[ListenerUse]) -> Table {
    let mut table = Table::new(["LISTENER", "SOCKETS", "CEILING", "OVER"]);
    for listener in listeners {
        let ceiling = match listener.ceiling {
            Some(0) => limit(Limit::Unlimited),
            Some(number) => number.to_string(),
            None if listener.none => limit(Limit::None),
            // Not enforced without the kernel plane.
            None => "-".to_owned(),
        };
        table.row([
            listener.address.clone(),
            listener.sockets.to_string(),
            ceiling,
            listener.over.to_string(),
        ]);
    }
    table
}

fn named(kind: &str, names: &BTreeMap<String, Named>) -> Table {
    let mut table = Table::new([kind, "ACTIVE", "LIMIT", "SOURCE"]);
    for (name, named) in names {
        table.row([
            name.clone(),
            named.active.to_string(),
            limit(named.limit.get()),
            named.source.clone(),
        ]);
    }
    table
}
