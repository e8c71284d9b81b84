//! What a load saw while it was measured.

use std::time::Duration;

use anyhow::Result;
use hdrhistogram::Histogram;

use crate::report::histogram::latencies;

/// What one thread of a load saw, or all of them.
pub struct Tally {
    /// From due (open loop) or begun (closed loop) to done, nanoseconds.
    pub latency: Histogram<u64>,
    /// Bytes that the load counts, if it counts bytes.
    pub bytes: u64,
    /// What was not done as it should be.
    pub failed: u64,
    /// An example of it.
    pub failure: Option<String>,
    /// Due, but not done when the measured time was over; in `latency` with the
    /// time that had passed by then.
    pub unfinished: u64,
    /// Of those that failed, how many are in `latency`.
    missed: u64,
}

impl Tally {
    /// Nothing seen yet.
    #[must_use]
    pub fn new() -> Self {
        Self {
            latency: latencies(),
            bytes: 0,
            failed: 0,
            failure: None,
            unfinished: 0,
            missed: 0,
        }
    }

    /// One done as it should be.
    pub fn done(&mut self, latency: Duration) {
        let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.latency.saturating_record(nanos);
    }

    /// One that was due and is not done.
    pub fn unfinished(&mut self, so_far: Duration) {
        self.unfinished += 1;
        self.done(so_far);
    }

    /// One not done as it should be, which by a schedule was due so long ago: it
    /// counts among the latencies, or only the lucky ones would.
    pub fn failed_late(&mut self, so_far: Duration, what: impl FnOnce() -> String) {
        self.failed(what);
        self.missed += 1;
        self.done(so_far);
    }

    /// One not done as it should be.
    pub fn failed(&mut self, what: impl FnOnce() -> String) {
        self.failed += 1;
        self.failure.get_or_insert_with(what);
    }

    /// How many were done.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.latency.len() - self.unfinished - self.missed
    }

    /// Joins what another thread saw.
    ///
    /// # Errors
    /// Never, with equal bounds.
    pub fn add(&mut self, other: Self) -> Result<()> {
        self.latency.add(other.latency)?;
        self.bytes += other.bytes;
        self.failed += other.failed;
        self.failure = self.failure.take().or(other.failure);
        self.unfinished += other.unfinished;
        self.missed += other.missed;
        Ok(())
    }
}
