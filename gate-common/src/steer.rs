//! Which worker a new connection goes to: the less loaded of two.
//!
//! Two workers are drawn by the packet's hash, and the one with fewer
//! connections wins. That keeps the fullest worker close to the others, where
//! a hash alone does not, and it looks at two words, however many workers there are.
//!
//! The loads are a hint: a wrong one costs balance, never a connection.

use core::mem::{align_of, size_of};

use crate::word::Word;

/// Workers that one process can have.
pub const WORKERS_MAX: u32 = 1024;

/// What one worker has to do, on a cache line of its own.
///
/// `held` and `seen` are written by the worker, `sent` by the kernel.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct WorkerLoad<W> {
    /// Connections that it holds.
    pub held: W,
    /// How many of `sent` it has accepted or given up.
    pub seen: W,
    /// Connections sent to it since the start.
    pub sent: W,
}

const _: () = assert!(size_of::<WorkerLoad<u64>>() == 64 && align_of::<WorkerLoad<u64>>() == 64);

impl<W: Word> WorkerLoad<W> {
    /// Connections that it holds, and those on their way to it: in a burst
    /// many are sent before the first is accepted.
    #[inline(always)]
    #[must_use]
    pub fn now(&self) -> u64 {
        let on_their_way = self.sent.load().wrapping_sub(self.seen.load());
        // Read one after the other, the two may seem to have crossed.
        let on_their_way = if on_their_way > u64::MAX / 2 {
            0
        } else {
            on_their_way
        };
        self.held.load().wrapping_add(on_their_way)
    }

    /// One more is sent to it.
    #[inline(always)]
    pub fn send(&self) {
        self.sent.fetch_add(1);
    }
}

#[cfg(not(target_arch = "bpf"))]
impl WorkerLoad<core::sync::atomic::AtomicU64> {
    /// The worker accepted one. Called by the worker alone, as the next.
    pub fn accepted(&self) {
        use core::sync::atomic::Ordering::Relaxed;
        let (seen, sent) = (self.seen.load(Relaxed), self.sent.load(Relaxed));
        // Not all come by way of the program: the kernel's hash is the fallback.
        if seen < sent {
            self.seen.store(seen + 1, Relaxed);
        }
    }

    /// The worker holds so many connections now.
    pub fn holds(&self, connections: u64) {
        use core::sync::atomic::Ordering::Relaxed;
        // Some that were sent never come: their handshake was not finished. A
        // worker that closes connections has accepted what there was before.
        if connections < self.held.load(Relaxed) {
            self.seen.store(self.sent.load(Relaxed), Relaxed);
        }
        self.held.store(connections, Relaxed);
    }
}

/// Two different ones of at least two workers, each pair as likely as another
/// over all hashes.
#[inline(always)]
#[must_use]
pub const fn candidates(hash: u32, workers: u32) -> [u32; 2] {
    let first = share(mix(hash), workers);
    let second = share(mix(hash ^ 0x9e37_79b9), workers - 1);
    // Of the others: those from the first on move up by one.
    [first, if second >= first { second + 1 } else { second }]
}

/// Whether the second of two candidates gets the connection. At equal loads
/// the first does, which the hash has drawn.
#[inline(always)]
#[must_use]
pub const fn takes_second(first: u64, second: u64) -> bool {
    second < first
}

/// One of `count` numbers from 0, by the upper bits of the hash.
#[inline(always)]
const fn share(hash: u32, count: u32) -> u32 {
    ((hash as u64 * count as u64) >> 32) as u32
}

/// The finalizer of `MurmurHash3`: the kernel's hash is good, but both draws
/// come from the one.
#[inline(always)]
const fn mix(hash: u32) -> u32 {
    let hash = (hash ^ (hash >> 16)).wrapping_mul(0x85eb_ca6b);
    let hash = (hash ^ (hash >> 13)).wrapping_mul(0xc2b2_ae35);
    hash ^ (hash >> 16)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::SeqCst;
    use std::vec;
    use std::vec::Vec;

    use super::*;

    type Load = WorkerLoad<AtomicU64>;

    #[test]
    fn candidates_are_two_different_workers_and_all_pairs_occur() {
        for workers in [2, 3, 4, 7, WORKERS_MAX] {
            let draws = 40 * workers * workers.min(16);
            let mut firsts = vec![0_u32; workers as usize];
            let mut seconds = firsts.clone();
            for number in 0..draws {
                let [first, second] = candidates(number.wrapping_mul(2_654_435_769), workers);
                assert_ne!(first, second);
                firsts[first as usize] += 1;
                seconds[second as usize] += 1;
            }
            let fair = draws / workers;
            for count in firsts.into_iter().chain(seconds) {
                assert!(
                    count > fair / 2 && count < fair * 2,
                    "{count} of {fair}, {workers} workers"
                );
            }
        }
    }

    #[test]
    fn the_less_loaded_wins_and_the_hash_decides_ties() {
        assert!(!takes_second(5, 5));
        assert!(!takes_second(4, 5));
        assert!(takes_second(5, 4));
    }

    /// The bound is the theorem's (log log n) with room; the hash alone is far
    /// from it.
    #[test]
    fn four_hundred_connections_over_eight_workers_are_even() {
        let loads: Vec<Load> = (0..8).map(|_| Load::default()).collect();
        let mut by_hash = [0; 8];
        for number in 0..400_u32 {
            let hash = mix(number.wrapping_mul(77_777));
            by_hash[share(hash, 8) as usize] += 1;
            let [first, second] = candidates(hash, 8).map(|worker| &loads[worker as usize]);
            let chosen = if takes_second(first.now(), second.now()) {
                second
            } else {
                first
            };
            chosen.send();
            chosen.accepted();
            chosen.holds(chosen.held.load(SeqCst) + 1);
        }
        let held: Vec<u64> = loads.iter().map(|load| load.held.load(SeqCst)).collect();
        let spread = |counts: &[u64]| counts.iter().max().unwrap() - counts.iter().min().unwrap();
        assert!(spread(&held) <= 4, "{held:?}");
        assert!(spread(&by_hash) > 4, "{by_hash:?}");
    }

    #[test]
    fn what_is_on_its_way_counts_until_it_is_accepted_or_given_up() {
        let load = Load::default();
        load.send();
        load.send();
        load.send();
        assert_eq!(load.now(), 3);
        load.accepted();
        load.holds(1);
        assert_eq!(load.now(), 3);
        // The third handshake never ends: forgotten at the next close.
        load.accepted();
        load.holds(2);
        assert_eq!(load.now(), 3);
        load.holds(1);
        assert_eq!(load.now(), 1);
        // One that the kernel's hash brought is not taken off what was sent.
        load.accepted();
        load.holds(2);
        load.send();
        assert_eq!(load.now(), 3);
    }
}
