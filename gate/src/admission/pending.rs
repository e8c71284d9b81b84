//! The pending connections of one worker, in the order they would be evicted.

use std::cmp::Reverse;
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
    /// Sources by how many they have, fullest last; of equals, the one whose
    /// longest silent is the most silent last.
    fullest: BTreeSet<(usize, Reverse<Instant>, IpAddr)>,
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
        self.change(source, |set| {
            set.insert((now, id));
        });
        self.entries.insert(id, (source, now));
    }

    /// A pending connection was heard of `now`; others are not touched.
    pub fn spoke(&mut self, id: u32, now: Instant) {
        if let Some((source, _)) = self.entries.get(&id).copied() {
            self.heard(id, source, now);
        }
    }

    /// Takes a connection out. Returns whether it was in.
    pub fn remove(&mut self, id: u32) -> bool {
        let Some((source, heard)) = self.entries.remove(&id) else {
            return false;
        };
        self.change(source, |set| {
            set.remove(&(heard, id));
        });
        true
    }

    fn change(&mut self, source: IpAddr, change: impl FnOnce(&mut BTreeSet<(Instant, u32)>)) {
        let set = self.sources.entry(source).or_default();
        if let Some(place) = place(source, set) {
            self.fullest.remove(&place);
        }
        change(set);
        match place(source, set) {
            Some(place) => {
                self.fullest.insert(place);
            }
            None => {
                self.sources.remove(&source);
            }
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
        self.fullest
            .iter()
            .rev()
            .find_map(|(_, _, source)| of(source))
    }
}

/// Where a source stands among all; nowhere without connections.
fn place(
    source: IpAddr,
    set: &BTreeSet<(Instant, u32)>,
) -> Option<(usize, Reverse<Instant>, IpAddr)> {
    let (oldest, _) = set.first()?;
    Some((set.len(), Reverse(*oldest), source))
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
    fn among_equal_sources_the_longest_silent_goes_whatever_its_address() {
        let start = Instant::now();
        let mut pending = PendingSet::default();
        for last in 1..=9 {
            // The highest address is the freshest.
            let heard = start + Duration::from_secs(u64::from(last));
            pending.heard(u32::from(last), source(last), heard);
        }
        for expected in 1..=9 {
            let victim = pending.victim(99).unwrap();
            assert_eq!(victim, expected);
            assert!(pending.remove(victim));
            assert!(!pending.remove(victim));
        }
        assert!(pending.is_empty() && pending.fullest.is_empty() && pending.sources.is_empty());
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
