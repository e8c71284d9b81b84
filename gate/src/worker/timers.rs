//! Deadlines of one worker's connections, each exact.

use std::collections::BTreeSet;
use std::time::Instant;

/// Ordered by time. A connection has at most one deadline, which its owner
/// remembers so that it can be taken out.
#[derive(Debug, Default)]
pub struct Timers {
    deadlines: BTreeSet<(Instant, u32)>,
}

impl Timers {
    /// Replaces a connection's deadline.
    pub fn replace(&mut self, id: u32, old: Option<Instant>, new: Option<Instant>) {
        if let Some(old) = old {
            self.deadlines.remove(&(old, id));
        }
        if let Some(new) = new {
            self.deadlines.insert((new, id));
        }
    }

    /// How many deadlines there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.deadlines.len()
    }

    /// The next deadline.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    /// Takes out one connection whose deadline has passed.
    pub fn pop_expired(&mut self, now: Instant) -> Option<u32> {
        let (at, id) = *self.deadlines.first()?;
        if at > now {
            return None;
        }
        self.deadlines.pop_first();
        Some(id)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn deadlines_expire_in_order_and_a_replaced_one_never() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut timers = Timers::default();
        timers.replace(1, None, Some(at(5)));
        timers.replace(2, None, Some(at(3)));
        timers.replace(1, Some(at(5)), Some(at(1)));
        timers.replace(3, None, Some(at(2)));
        timers.replace(3, Some(at(2)), None);
        assert_eq!(timers.next(), Some(at(1)));
        assert_eq!(timers.pop_expired(at(0)), None);
        assert_eq!(timers.pop_expired(at(4)), Some(1));
        assert_eq!(timers.pop_expired(at(4)), Some(2));
        assert_eq!(timers.pop_expired(at(9)), None);
    }
}
