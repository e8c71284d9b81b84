//! The pending connections of one worker, in the order they would be evicted.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::Instant;

/// Pending connections by source and by how long they have been silent.
///
/// All operations are logarithmic: a storm of silent connections must not
/// make each further one dearer.
#[derive(Debug, Default)]
pub struct PendingSet {
    /// Each source's connections, longest silent first.
    sources: HashMap<IpAddr, BTreeSet<(Instant, u32)>>,
    /// Sources by how many they have, fullest last.
    fullest: BTreeSet<(usize, IpAddr)>,
    /// Where each connection stands.
    entries: HashMap<u32, (IpAddr, Instant)>,
}

impl PendingSet {
    /// How many are pending.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether a connection is pending here.
    #[must_use]
    pub fn contains(&self, id: u32) -> bool {
        self.entries.contains_key(&id)
    }

    /// Adds a connection that was heard of `now`, or moves it there.
    pub fn heard(&mut self, id: u32, source: IpAddr, now: Instant) {
        self.remove(id);
        let set = self.sources.entry(source).or_default();
        self.fullest.remove(&(set.len(), source));
        set.insert((now, id));
        self.fullest.insert((set.len(), source));
        self.entries.insert(id, (source, now));
    }

    /// Takes a connection out.
    pub fn remove(&mut self, id: u32) {
        let Some((source, heard)) = self.entries.remove(&id) else {
            return;
        };
        let Some(set) = self.sources.get_mut(&source) else {
            return;
        };
        self.fullest.remove(&(set.len(), source));
        set.remove(&(heard, id));
        if set.is_empty() {
            self.sources.remove(&source);
        } else {
            self.fullest.insert((set.len(), source));
        }
    }

    /// Whom to evict for `newcomer`: the longest silent of the fullest source,
    /// never the newcomer itself.
    #[must_use]
    pub fn victim(&self, newcomer: u32) -> Option<u32> {
        let of = |source: &IpAddr| {
            let set = self.sources.get(source)?;
            set.iter().map(|(_, id)| *id).find(|id| *id != newcomer)
        };
        self.fullest.iter().rev().find_map(|(_, source)| of(source))
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::time::Duration;

    use super::*;

    fn source(last: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))
    }

    #[test]
    fn the_longest_silent_of_the_fullest_source_goes_first() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut pending = PendingSet::default();
        pending.heard(1, source(1), at(0));
        pending.heard(2, source(2), at(1));
        pending.heard(3, source(2), at(2));
        pending.heard(4, source(2), at(3));
        assert_eq!(pending.victim(9), Some(2));
        pending.heard(2, source(2), at(4));
        assert_eq!(pending.victim(9), Some(3), "one that speaks moves back");
        pending.remove(3);
        pending.remove(4);
        pending.remove(4);
        assert_eq!(pending.len(), 2);
        assert!(pending.victim(2).is_some_and(|victim| victim == 1));
    }

    #[test]
    fn a_newcomer_is_never_its_own_victim() {
        let mut pending = PendingSet::default();
        assert!(pending.is_empty());
        pending.heard(1, source(1), Instant::now());
        assert_eq!(pending.victim(1), None);
        pending.remove(1);
        assert_eq!(pending.victim(7), None);
    }
}
