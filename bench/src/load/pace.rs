//! When a load asks.

use std::time::{Duration, Instant};

/// When a load asks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pace {
    /// Whenever it has been answered.
    Closed,
    /// So often per second, whatever the answers do.
    Open {
        /// Over all threads.
        per_second: f64,
    },
}

impl Pace {
    /// The schedule of one thread out of `threads`; `None` in a closed loop.
    #[must_use]
    pub fn schedule(self, thread: usize, threads: usize, begin: Instant) -> Option<Schedule> {
        match self {
            Self::Closed => None,
            Self::Open { per_second } => Some(Schedule {
                begin,
                interval: threads as f64 / per_second,
                // Threads take turns instead of asking at the same moment.
                next: thread as f64 / threads as f64,
            }),
        }
    }
}

/// Evenly spaced moments, reckoned from the first, so that they do not drift.
#[derive(Clone, Debug)]
pub struct Schedule {
    begin: Instant,
    /// Seconds.
    interval: f64,
    /// In intervals after the beginning.
    next: f64,
}

impl Schedule {
    /// The next moment that something is due.
    #[must_use]
    pub fn due(&self) -> Instant {
        self.begin + Duration::from_secs_f64(self.next * self.interval)
    }

    /// The next moment, if it has come; the one after it is next then.
    pub fn take(&mut self, now: Instant) -> Option<Instant> {
        let due = self.due();
        if due > now {
            return None;
        }
        self.next += 1.0;
        Some(due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_reader_is_given_every_moment_it_missed() {
        let begin = Instant::now();
        let at = |us| begin + Duration::from_micros(us);
        let pace = Pace::Open { per_second: 1000.0 };
        let mut schedule = pace.schedule(1, 2, begin).unwrap();
        assert_eq!(schedule.take(at(999)), None);
        // Two threads: this one asks every 2 ms, and begins half an interval later.
        let taken: Vec<_> = std::iter::from_fn(|| schedule.take(at(5000))).collect();
        assert_eq!(taken, [at(1000), at(3000), at(5000)]);
        assert_eq!(schedule.due(), at(7000));
        assert!(Pace::Closed.schedule(0, 1, begin).is_none());
    }
}
