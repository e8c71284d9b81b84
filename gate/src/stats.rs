//! What a worker counts for others to read.
//!
//! Each worker has its own [`Stats`] and is its only writer, so a count is a
//! relaxed load and a store on a cache line of its own: no locked instruction
//! and no shared line between workers. The control plane sums them when it is
//! asked. Who is connected, and against which limit, is not counted here: that is
//! in the ledger.
#![forbid(unsafe_code)]

mod histogram;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gate_common::steer::WorkerLoad;

use crate::kernel::WorkerLoads;
use crate::session::outcome::{
    CancelOutcome, CloseReason, ConnectFailure, Reason, StartupFailure, WaitOutcome,
};

use histogram::Recorder;
pub use histogram::{Distribution, Latency, histogram};

/// The errors of accept that have a series of their own: their number and
/// their name. Others are counted as `other`.
pub const ACCEPT_ERRORS: [(i32, &str); 8] = [
    (libc::EMFILE, "EMFILE"),
    (libc::ENFILE, "ENFILE"),
    (libc::ENOBUFS, "ENOBUFS"),
    (libc::ENOMEM, "ENOMEM"),
    (libc::ECONNABORTED, "ECONNABORTED"),
    (libc::EPERM, "EPERM"),
    (libc::EPROTO, "EPROTO"),
    (libc::EINVAL, "EINVAL"),
];

/// Which way bytes went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Direction {
    /// From the client to the backend.
    ToBackend,
    /// From the backend to the client.
    ToClient,
}

impl Direction {
    /// Both, in the order of their index.
    pub const ALL: [Self; 2] = [Self::ToBackend, Self::ToClient];

    /// The word in metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::ToBackend => "to_backend",
            Self::ToClient => "to_client",
        }
    }
}

/// The counts of one worker: written by that worker's thread alone, read by
/// anybody.
// Two lines: the prefetcher fetches lines in pairs.
#[derive(Debug)]
#[repr(align(128))]
pub struct Stats {
    accepted: Counter,
    connections: Counter,
    /// Written once, when the thread begins.
    cpu: OnceLock<usize>,
    /// Where the kernel plane reads how much this worker has to do, and its
    /// place there. Written once, before the thread begins.
    load: OnceLock<(Arc<WorkerLoads>, usize)>,
    relayed: [Counter; 2],
    /// By [`Latency`].
    latencies: [Recorder; Latency::ALL.len()],
    startup_failures: [Counter; StartupFailure::ALL.len()],
    closed: [Counter; CloseReason::ALL.len()],
    cancels: [Counter; CancelOutcome::ALL.len()],
    waited: [Counter; WaitOutcome::ALL.len()],
    accept_errors: [Counter; ACCEPT_ERRORS.len() + 1],
    /// By listener, in the order of the configuration.
    rejected: Box<[Row<{ Reason::ALL.len() }>]>,
    /// By backend, in the order of the configuration.
    connect_failures: Box<[Row<{ ConnectFailure::ALL.len() }>]>,
}

impl Stats {
    /// All zero, for so many listeners and backends.
    #[must_use]
    pub fn new(listeners: usize, backends: usize) -> Self {
        Self {
            accepted: Counter::default(),
            connections: Counter::default(),
            cpu: OnceLock::new(),
            load: OnceLock::new(),
            relayed: Default::default(),
            latencies: Default::default(),
            startup_failures: Default::default(),
            closed: Default::default(),
            cancels: Default::default(),
            waited: Default::default(),
            accept_errors: Default::default(),
            rejected: (0..listeners).map(|_| Row::default()).collect(),
            connect_failures: (0..backends).map(|_| Row::default()).collect(),
        }
    }

    /// The worker's thread runs on this CPU alone.
    pub fn pinned(&self, cpu: usize) {
        // A second call would be about the same thread.
        let _ = self.cpu.set(cpu);
    }

    /// The kernel plane chooses workers by these loads, of which this worker
    /// writes one.
    pub fn publish(&self, loads: Arc<WorkerLoads>, worker: usize) {
        // A second call is about the same loads: the plane keeps them.
        let _ = self.load.set((loads, worker));
    }

    /// accept gave a connection.
    pub fn accepted(&self) {
        self.accepted.add(1);
        if let Some(load) = self.load() {
            load.accepted();
        }
    }

    /// So many connections are open now.
    pub fn holds(&self, connections: usize) {
        self.connections.set(connections as u64);
        if let Some(load) = self.load() {
            load.holds(connections as u64);
        }
    }

    fn load(&self) -> Option<&WorkerLoad<AtomicU64>> {
        let (loads, worker) = self.load.get()?;
        loads.get(*worker)
    }

    /// A client was refused at a listener (its place in the configuration).
    pub fn rejected(&self, listener: usize, reason: Reason) {
        if let Some(row) = self.rejected.get(listener) {
            row.0[reason as usize].add(1);
        }
    }

    /// A connection ended before a valid startup packet.
    pub fn startup_failed(&self, failure: StartupFailure) {
        self.startup_failures[failure as usize].add(1);
    }

    /// A session that was admitted ended.
    pub fn closed(&self, reason: CloseReason) {
        self.closed[reason as usize].add(1);
    }

    /// Bytes were passed on.
    pub fn relayed(&self, direction: Direction, bytes: u64) {
        self.relayed[direction as usize].add(bytes);
    }

    /// A CancelRequest is done with.
    pub fn cancelled(&self, outcome: CancelOutcome) {
        self.cancels[outcome as usize].add(1);
    }

    /// A client waits no more.
    pub fn waited(&self, outcome: WaitOutcome) {
        self.waited[outcome as usize].add(1);
    }

    /// accept failed with a positive errno.
    pub fn accept_failed(&self, errno: i32) {
        let known = ACCEPT_ERRORS
            .iter()
            .position(|(number, _)| *number == errno);
        self.accept_errors[known.unwrap_or(ACCEPT_ERRORS.len())].add(1);
    }

    /// A backend (its place in the configuration) could not be reached.
    pub fn connect_failed(&self, backend: usize, failure: ConnectFailure) {
        if let Some(row) = self.connect_failures.get(backend) {
            row.0[failure as usize].add(1);
        }
    }

    /// An admission was decided, so long after the startup packet was complete.
    pub fn admission_took(&self, duration: Duration) {
        self.took(Latency::Admission, duration);
    }

    /// A backend accepted a connection, so long after it was dialled.
    pub fn backend_connect_took(&self, duration: Duration) {
        self.took(Latency::BackendConnect, duration);
    }

    /// A login came to ReadyForQuery, so long after the client was accepted.
    pub fn ready_took(&self, duration: Duration) {
        self.took(Latency::Ready, duration);
    }

    /// A round of the worker's loop went from its wake-up to its next wait.
    #[inline]
    pub fn round_took(&self, duration: Duration) {
        self.took(Latency::Round, duration);
    }

    #[inline]
    fn took(&self, latency: Latency, duration: Duration) {
        self.latencies[latency as usize].record(duration);
    }
}

/// Reading: any thread, any time.
impl Stats {
    /// The CPU that the worker is pinned to.
    #[must_use]
    pub fn cpu(&self) -> Option<usize> {
        self.cpu.get().copied()
    }

    /// Connections that accept gave, refused ones included.
    #[must_use]
    pub fn accepted_count(&self) -> u64 {
        self.accepted.get()
    }

    /// Connections that are open, those being closed included.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.connections.get()
    }

    /// Refusals at a listener.
    #[must_use]
    pub fn rejected_count(&self, listener: usize, reason: Reason) -> u64 {
        self.rejected
            .get(listener)
            .map_or(0, |row| row.0[reason as usize].get())
    }

    /// Connections that ended before a valid startup packet.
    #[must_use]
    pub fn startup_failed_count(&self, failure: StartupFailure) -> u64 {
        self.startup_failures[failure as usize].get()
    }

    /// Admitted sessions that ended.
    #[must_use]
    pub fn closed_count(&self, reason: CloseReason) -> u64 {
        self.closed[reason as usize].get()
    }

    /// Bytes passed on.
    #[must_use]
    pub fn relayed_bytes(&self, direction: Direction) -> u64 {
        self.relayed[direction as usize].get()
    }

    /// CancelRequests done with.
    #[must_use]
    pub fn cancelled_count(&self, outcome: CancelOutcome) -> u64 {
        self.cancels[outcome as usize].get()
    }

    /// Clients that have waited.
    #[must_use]
    pub fn waited_count(&self, outcome: WaitOutcome) -> u64 {
        self.waited[outcome as usize].get()
    }

    /// Failures of accept by the index of [`ACCEPT_ERRORS`]; past its end all
    /// others.
    #[must_use]
    pub fn accept_failed_count(&self, index: usize) -> u64 {
        self.accept_errors.get(index).map_or(0, Counter::get)
    }

    /// Backends that could not be reached.
    #[must_use]
    pub fn connect_failed_count(&self, backend: usize, failure: ConnectFailure) -> u64 {
        self.connect_failures
            .get(backend)
            .map_or(0, |row| row.0[failure as usize].get())
    }

    /// How long something took.
    #[must_use]
    pub fn latency(&self, latency: Latency) -> Distribution {
        self.latencies[latency as usize].read()
    }
}

/// Counters of one listener or backend, on lines that no other thread writes.
#[derive(Debug)]
#[repr(align(128))]
struct Row<const N: usize>([Counter; N]);

impl<const N: usize> Default for Row<N> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Counter::default()))
    }
}

/// A count with one writer.
#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl Counter {
    /// With one writer no addition is lost between the load and the store.
    #[inline]
    fn add(&self, more: u64) {
        let count = self.0.load(Ordering::Relaxed);
        self.0.store(count.wrapping_add(more), Ordering::Relaxed);
    }

    #[inline]
    fn set(&self, count: u64) {
        self.0.store(count, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_count_goes_where_it_is_read() {
        let stats = Stats::new(2, 1);
        stats.rejected(1, Reason::User);
        stats.rejected(1, Reason::User);
        stats.rejected(7, Reason::User);
        assert_eq!(stats.rejected_count(0, Reason::User), 0);
        assert_eq!(stats.rejected_count(1, Reason::User), 2);
        assert_eq!(stats.rejected_count(1, Reason::Database), 0);
        stats.accept_failed(libc::EMFILE);
        stats.accept_failed(libc::EXDEV);
        assert_eq!(stats.accept_failed_count(0), 1);
        assert_eq!(stats.accept_failed_count(ACCEPT_ERRORS.len()), 1);
        stats.waited(WaitOutcome::Left);
        assert_eq!(stats.waited_count(WaitOutcome::Left), 1);
        assert_eq!(stats.waited_count(WaitOutcome::Refused), 0);
        stats.accepted();
        stats.accepted();
        stats.holds(1);
        assert_eq!((stats.accepted_count(), stats.connections()), (2, 1));
        assert_eq!(stats.cpu(), None);
        stats.pinned(0);
        assert_eq!(stats.cpu(), Some(0));
        stats.relayed(Direction::ToClient, 10);
        assert_eq!(stats.relayed_bytes(Direction::ToClient), 10);
        assert_eq!(stats.relayed_bytes(Direction::ToBackend), 0);
        stats.connect_failed(0, ConnectFailure::Timeout);
        assert_eq!(stats.connect_failed_count(0, ConnectFailure::Timeout), 1);
    }

    #[test]
    fn each_latency_has_a_distribution_of_its_own() {
        let stats = Stats::new(1, 1);
        let calls = [
            Stats::admission_took,
            Stats::backend_connect_took,
            Stats::ready_took,
            Stats::round_took,
        ];
        for (times, (took, latency)) in (1..).zip(calls.iter().zip(Latency::ALL)) {
            for _ in 0..times {
                took(&stats, Duration::from_micros(times));
            }
            assert_eq!(stats.latency(latency).count(), times);
            assert_eq!(stats.latency(latency).sum_ns(), times * times * 1000);
        }
    }

    #[test]
    fn rows_do_not_share_cache_lines() {
        let stats = Stats::new(2, 2);
        let at = |row: &Row<{ Reason::ALL.len() }>| std::ptr::from_ref(row).addr();
        assert_eq!(at(&stats.rejected[0]) % 128, 0);
        assert!(at(&stats.rejected[1]) - at(&stats.rejected[0]) >= 128);
        assert_eq!(align_of::<Stats>(), 128);
    }
}
