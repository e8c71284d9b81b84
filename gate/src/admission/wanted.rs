//! Evictions that workers want of each other.

use std::collections::VecDeque;

/// Which workers want an eviction and have no victim for it, oldest first.
#[derive(Debug, Default)]
pub struct WantedEvictions(VecDeque<u16>);

impl WantedEvictions {
    /// A worker wants one, while `too_many` are pending in all.
    pub fn want(&mut self, worker: u16, too_many: u64) {
        self.0.push_back(worker);
        self.forget(too_many);
    }

    /// `too_many` are pending in all. Whoever wanted one before that many did has
    /// it already: somebody has spoken or left since.
    pub fn forget(&mut self, too_many: u64) {
        while self.0.len() as u64 > too_many {
            self.0.pop_front();
        }
    }

    /// Whether another worker wants one.
    #[must_use]
    pub fn is_wanted_of(&self, worker: u16) -> bool {
        self.0.iter().any(|other| *other != worker)
    }

    /// Takes up one that another worker wants. Returns whether there was one.
    /// Never its own: the victim would be the very connection that it was wanted
    /// for.
    pub fn take_up(&mut self, worker: u16) -> bool {
        let place = self.0.iter().position(|other| *other != worker);
        place.is_some_and(|place| self.0.remove(place).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_taken_up_once_and_never_by_who_wants_it() {
        let mut wanted = WantedEvictions::default();
        assert!(!wanted.is_wanted_of(0) && !wanted.take_up(0));
        wanted.want(1, 9);
        wanted.want(2, 9);
        assert!(wanted.is_wanted_of(1) && wanted.take_up(1));
        assert!(!wanted.take_up(1), "its own");
        assert!(!wanted.is_wanted_of(1) && wanted.is_wanted_of(2));
        assert!(wanted.take_up(2));
        assert!(wanted.0.is_empty());
    }

    #[test]
    fn what_has_come_to_nothing_is_forgotten_oldest_first() {
        let mut wanted = WantedEvictions::default();
        wanted.want(1, 1);
        // Somebody spoke, and another one came: one is too many, not two.
        wanted.want(2, 1);
        assert!(!wanted.take_up(2), "of worker 1 it is wanted, not of 2");
        assert!(wanted.is_wanted_of(1));
        wanted.forget(0);
        assert!(!wanted.take_up(1), "nobody is too many");
    }
}
