//! What a worker counts for others to read.
//!
//! Each worker has its own [`Stats`] and is its only writer, so a count is a
//! relaxed load and a store on a cache line of its own: no locked instruction
//! and no shared line between workers. The control plane sums them when it is
//! asked. Who is connected, and against which limit, is not counted here: that is
//! in the ledger.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use gate_common::steer::WorkerLoad;

use crate::kernel::WorkerLoads;
use crate::session::outcome::{CancelOutcome, CloseReason, ConnectFailure, Reason, StartupFailure};

/// Buckets of a histogram that have an upper bound; one more has none.
pub const HISTOGRAM_BUCKETS: usize = 24;

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
    admission: Histogram,
    backend_connect: Histogram,
    startup_failures: [Counter; StartupFailure::ALL.len()],
    closed: [Counter; CloseReason::ALL.len()],
    cancels: [Counter; CancelOutcome::ALL.len()],
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
            admission: Histogram::default(),
            backend_connect: Histogram::default(),
            startup_failures: Default::default(),
            closed: Default::default(),
            cancels: Default::default(),
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
        // A second call would be about the same loads.
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
        self.admission.record(duration);
    }

    /// A backend accepted a connection, so long after it was dialled.
    pub fn backend_connect_took(&self, duration: Duration) {
        self.backend_connect.record(duration);
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

    /// How long admissions took.
    #[must_use]
    pub fn admission(&self) -> HistogramSnapshot {
        self.admission.snapshot()
    }

    /// How long backends took to accept a connection.
    #[must_use]
    pub fn backend_connect(&self) -> HistogramSnapshot {
        self.backend_connect.snapshot()
    }
}

/// Durations in buckets that double: up to 1 us, 2 us, 4 us ... 8.4 s, more.
#[derive(Debug, Default)]
struct Histogram {
    sum_ns: Counter,
    buckets: [Counter; HISTOGRAM_BUCKETS + 1],
}

/// A histogram's counts at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HistogramSnapshot {
    /// Sum of all durations in nanoseconds.
    pub sum_ns: u64,
    /// How many durations fell into each bucket (and into no lower one).
    pub buckets: [u64; HISTOGRAM_BUCKETS + 1],
}

impl HistogramSnapshot {
    /// The upper bound of a bucket in seconds; infinite for the last.
    #[must_use]
    pub fn bound_seconds(bucket: usize) -> f64 {
        if bucket < HISTOGRAM_BUCKETS {
            (1_u64 << bucket) as f64 / 1e6
        } else {
            f64::INFINITY
        }
    }

    /// How many durations there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Adds another worker's.
    pub fn add(&mut self, other: &Self) {
        self.sum_ns = self.sum_ns.wrapping_add(other.sum_ns);
        for (bucket, more) in self.buckets.iter_mut().zip(other.buckets) {
            *bucket += more;
        }
    }
}

impl Histogram {
    fn record(&self, duration: Duration) {
        let nanoseconds = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        // Bucket b ends at 2^b us: the bits of (us - 1), rounded up to whole us.
        let below = nanoseconds.div_ceil(1000).saturating_sub(1);
        let bucket = (u64::BITS - below.leading_zeros()) as usize;
        self.buckets[bucket.min(HISTOGRAM_BUCKETS)].add(1);
        self.sum_ns.add(nanoseconds);
    }

    fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot {
            sum_ns: self.sum_ns.get(),
            buckets: std::array::from_fn(|bucket| self.buckets[bucket].get()),
        }
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
    fn durations_fall_into_the_bucket_that_bounds_them() {
        let table = [
            (0, 0),
            (1, 0),
            (1_000, 0),
            (1_001, 1),
            (2_000, 1),
            (2_001, 2),
            (4_000, 2),
            (8_388_608_000, HISTOGRAM_BUCKETS - 1),
            (8_388_608_001, HISTOGRAM_BUCKETS),
            (u64::MAX, HISTOGRAM_BUCKETS),
        ];
        for (nanoseconds, bucket) in table {
            let histogram = Histogram::default();
            histogram.record(Duration::from_nanos(nanoseconds));
            let snapshot = histogram.snapshot();
            assert_eq!(snapshot.buckets[bucket], 1, "{nanoseconds} ns");
            assert!(nanoseconds as f64 / 1e9 <= HistogramSnapshot::bound_seconds(bucket));
            assert_eq!((snapshot.count(), snapshot.sum_ns), (1, nanoseconds));
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
