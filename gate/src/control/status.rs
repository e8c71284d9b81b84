//! How gate is: the object of `gatectl status`.
#![forbid(unsafe_code)]

use std::io;

use super::api::{AcceptQueue, Process, Status, WorkerLoad};
use super::{Shared, connections, limited};
use crate::host;
use crate::ledger::{Ledger, LimitSource};
use crate::placement::Place;
use crate::session::outcome::Reason;
use crate::state::{KernelState, ListenerInfo, Phase, State};

/// Of the gate that this process is.
///
/// # Errors
/// The table of names could not be read.
pub(super) fn of_process(shared: &Shared) -> io::Result<Status> {
    let state = &shared.state;
    let config = state.config();
    let mut status = of_ledger(
        &config.instance,
        &state.ledger,
        &state.listeners,
        &state.kernel,
    )?;
    phase_word(state.phase()).clone_into(&mut status.state);
    status.process = Some(Process {
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        uptime_seconds: shared.started.elapsed().as_secs(),
        workers: state.stats.len(),
        open_fds: host::count_open_fds().ok(),
        max_fds: (state.fds_max != u64::MAX).then_some(state.fds_max),
        rejected: rejected(state),
        worker_loads: worker_loads(state),
        accept_queues: accept_queues(state),
    });
    Ok(status)
}

/// Of an instance whose gate is down, from its ledger alone.
///
/// # Errors
/// The table of names could not be read.
pub fn of_ledger(
    instance: &str,
    ledger: &Ledger,
    listeners: &[ListenerInfo],
    kernel: &KernelState,
) -> io::Result<Status> {
    let rows = ledger.limits()?;
    let runtime = rows.iter().filter(|row| row.source == LimitSource::Runtime);
    Ok(Status {
        instance: instance.to_owned(),
        state: "down".to_owned(),
        process: None,
        connections: connections::read(ledger, listeners, kernel)?,
        pending_limit: ledger.max_pending().into(),
        limited: limited::now(ledger, *kernel == KernelState::Active),
        runtime_limits: runtime.count(),
    })
}

/// A phase as the status says it.
#[must_use]
pub const fn phase_word(phase: Phase) -> &'static str {
    match phase {
        Phase::Starting => "starting",
        Phase::Serving => "serving",
        Phase::Draining => "draining",
        Phase::Stopping => "stopping",
    }
}

fn worker_loads(state: &State) -> Vec<WorkerLoad> {
    let workers = state.stats.iter().enumerate();
    let loads = workers.map(|(worker, stats)| {
        let place = state.places.get(worker);
        WorkerLoad {
            worker,
            cpu: stats.cpu(),
            queue: place.map(Place::queue_numbers).unwrap_or_default(),
            irq: place.map(Place::irqs).unwrap_or_default(),
            accepted: stats.accepted_count(),
            connections: stats.connections(),
        }
    });
    loads.collect()
}

fn accept_queues(state: &State) -> Vec<AcceptQueue> {
    let listeners = state.listeners.iter().enumerate();
    let queues = listeners.filter_map(|(index, info)| {
        let queue = state.accept_queue(index)?;
        Some(AcceptQueue {
            listener: info.address.to_string(),
            length: queue.length,
            limit: queue.limit,
        })
    });
    queues.collect()
}

fn rejected(state: &State) -> std::collections::BTreeMap<String, u64> {
    let counts = Reason::ALL
        .iter()
        .map(|reason| (reason.label().to_owned(), state.rejected(*reason)));
    counts.filter(|(_, count)| *count > 0).collect()
}
