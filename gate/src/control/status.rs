//! How gate is: the object of `gatectl status`.
#![forbid(unsafe_code)]

use std::io;
use std::time::Instant;

use gate_common::limit::Setting;

use super::api::{AcceptQueue, AddressHealth, BackendHealth, Process, Status, WorkerLoad};
use super::{Shared, connections, limited};
use crate::config::{MAX_CONNECTIONS_DEFAULT, MAX_PENDING_DEFAULT, name};
use crate::host;
use crate::ledger::{Ledger, LimitSource};
use crate::placement::Place;
use crate::session::outcome::{Reason, WaitOutcome};
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
        lowered_to: lowered_to(
            config.limits.max_connections,
            config
                .limits
                .max_connections_auto
                .then_some(MAX_CONNECTIONS_DEFAULT),
        ),
        pending_lowered_to: lowered_to(
            config.limits.max_pending,
            config
                .limits
                .max_pending_auto
                .then_some(MAX_PENDING_DEFAULT),
        ),
        waiting: state.waiting.len(),
        waited: waited(state),
        rejected: rejected(state),
        worker_loads: worker_loads(state),
        backends: backends(state),
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

fn backends(state: &State) -> Vec<BackendHealth> {
    let now = Instant::now();
    let config = state.config();
    let backends = config.backends.iter().enumerate();
    let health = backends.map(|(place, backend)| BackendHealth {
        backend: name::escape(backend.name.as_bytes()),
        addresses: state
            .backends
            .report(place, now)
            .map(|report| AddressHealth {
                address: report.address.to_string(),
                up: report.up,
                for_seconds: report.lasted.as_secs(),
                connected: report.connected,
                failed: report.failed,
            })
            .collect(),
    });
    health.collect()
}

/// What is in force of a number that nobody wrote, if it is less than its default.
fn lowered_to(in_force: Setting, default: Option<u64>) -> Option<u64> {
    match in_force {
        Setting::AtMost(number) => default.and_then(|default| (number < default).then_some(number)),
        _ => None,
    }
}

fn waited(state: &State) -> std::collections::BTreeMap<String, u64> {
    let counts = WaitOutcome::ALL.iter().map(|outcome| {
        let of_workers = state.stats.iter().map(|stats| stats.waited_count(*outcome));
        (outcome.label().to_owned(), of_workers.sum())
    });
    counts.filter(|(_, count)| *count > 0).collect()
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
