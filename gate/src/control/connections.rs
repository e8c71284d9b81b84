//! Who is connected: the object of `/connections` and `gatectl connections`.
//!
//! Every number is the very word that decisions read; the object is no
//! snapshot of one instant.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering;

use gate_common::abi::slot;
use gate_common::limit::Limit;

use super::api::{
    BackendUse, Connections, Defaults, Kernel, ListenerUse, Named, Total, limit_number,
};
use crate::config::name;
use crate::ledger::{Ledger, LimitKey, LimitRow, LimitSource};
use crate::state::{KernelState, ListenerInfo};

/// Reads who is connected.
///
/// # Errors
/// The table of names could not be read.
pub fn read(
    ledger: &Ledger,
    listeners: &[ListenerInfo],
    kernel: &KernelState,
) -> io::Result<Connections> {
    let rows = ledger.limits()?;
    let mut by_user = BTreeMap::new();
    let mut by_database = BTreeMap::new();
    let mut by_backend = BTreeMap::new();
    for row in &rows {
        match &row.key {
            LimitKey::User(user) => add_named(&mut by_user, user, row),
            LimitKey::Database(database) => add_named(&mut by_database, database, row),
            LimitKey::Backend(backend) => {
                let used = BackendUse {
                    active: row.used,
                    limit: row.limit.into(),
                };
                by_backend.insert(name::escape(backend), used);
            }
            _ => {}
        }
    }
    Ok(Connections {
        total: Total {
            active: ledger.admitted(),
            pending: ledger.pending(),
            limit: ledger.plain_limit(slot::TOTAL).into(),
        },
        by_user,
        by_database,
        by_backend,
        defaults: Defaults {
            per_user: limit_number(ledger.plain_limit(slot::DEFAULT_USER)),
            per_database: limit_number(ledger.plain_limit(slot::DEFAULT_DATABASE)),
        },
        kernel: kernel_object(ledger, listeners, kernel),
    })
}

/// Names without sessions and without a limit of their own are left out:
/// strangers with random names must not fill the object.
fn add_named(map: &mut BTreeMap<String, Named>, name: &[u8], row: &LimitRow) {
    if row.used == 0 && row.source == LimitSource::Default {
        return;
    }
    let named = Named {
        active: row.used,
        limit: row.limit.into(),
        source: row.source.label().to_owned(),
    };
    map.insert(name::escape(name), named);
}

fn kernel_object(ledger: &Ledger, listeners: &[ListenerInfo], kernel: &KernelState) -> Kernel {
    let (state, reason) = match kernel {
        KernelState::Active => ("active", None),
        KernelState::Inactive(reason) => ("inactive", Some(reason.clone())),
        KernelState::Off => ("off", None),
    };
    let listener = |info: &ListenerInfo| {
        // Without the kernel plane nobody enforces a ceiling.
        let ceiling = (*kernel == KernelState::Active).then(|| ledger.ceiling(info.index));
        ListenerUse {
            address: info.address.to_string(),
            sockets: ledger.sockets(info.index),
            ceiling: ceiling.and_then(limit_number),
            none: ceiling == Some(Limit::None),
            over: ledger.state(info.index).over.load(Ordering::SeqCst),
        }
    };
    Kernel {
        state: state.to_owned(),
        reason,
        listeners: listeners.iter().map(listener).collect(),
    }
}
