//! Deadlines of one worker's connections: a hierarchical timer wheel.
//!
//! Arming, moving and cancelling a deadline costs the same however many there are, and a
//! connection without one costs four bytes. A deadline is never early and at most one [`TICK`]
//! late. One that is far off is moved nearer at most once per level.

use std::time::{Duration, Instant};

use slab::Slab;

/// How exact deadlines are.
pub const TICK: Duration = Duration::from_millis(4);

const SLOT_BITS: usize = 6;
const SLOTS: usize = 1 << SLOT_BITS;
/// Together 2^48 ticks: 35,000 years.
const LEVELS: usize = 8;
const TICKS_MAX: u64 = (1 << (SLOT_BITS * LEVELS)) - 1;
const NONE: u32 = u32::MAX;

/// A deadline lies on the lowest level on which its tick and the wheel's differ: level 0 holds
/// the next 64 ticks one by one, each higher level 64 times as much in each of its slots.
#[derive(Debug)]
pub struct Timers {
    base: Instant,
    /// The tick that the wheel has come to.
    elapsed: u64,
    /// One bit for each slot that holds something.
    occupied: [u64; LEVELS],
    /// The first node of each slot.
    heads: [[u32; SLOTS]; LEVELS],
    nodes: Slab<Node>,
    /// The node of each connection.
    of_connection: Vec<u32>,
}

/// An armed deadline, linked to the others of its slot.
#[derive(Debug)]
struct Node {
    tick: u64,
    id: u32,
    previous: u32,
    next: u32,
    level: u8,
    slot: u8,
}

impl Timers {
    /// A wheel that begins at `now`: no deadline may be due earlier.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self {
            base: now,
            elapsed: 0,
            occupied: [0; LEVELS],
            heads: [[NONE; SLOTS]; LEVELS],
            nodes: Slab::new(),
            of_connection: Vec::new(),
        }
    }

    /// Replaces a connection's deadline. `old` is what its owner takes it to be.
    pub fn replace(&mut self, id: u32, old: Option<Instant>, new: Option<Instant>) {
        let index = id as usize;
        let armed = self.of_connection.get(index).copied().unwrap_or(NONE);
        debug_assert_eq!(old.is_some(), armed != NONE, "the owner lost track");
        if armed != NONE {
            self.unlink(armed);
            self.nodes.remove(armed as usize);
            self.of_connection[index] = NONE;
        }
        if let Some(at) = new {
            if index >= self.of_connection.len() {
                self.of_connection.resize(index + 1, NONE);
            }
            let since = at.saturating_duration_since(self.base).as_nanos();
            let tick = since.div_ceil(TICK.as_nanos()).min(u128::from(TICKS_MAX));
            let node = self.nodes.insert(Node {
                tick: tick as u64,
                id,
                previous: NONE,
                next: NONE,
                level: 0,
                slot: 0,
            });
            self.of_connection[index] = node as u32;
            self.link(node as u32);
        }
    }

    /// When [`Timers::pop_expired`] has something to do: at the next deadline, or when one that is
    /// far off is to be moved nearer.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        let (_, _, tick) = self.next_slot()?;
        let since = u128::from(tick) * TICK.as_nanos();
        Some(self.base + Duration::from_nanos_u128(since))
    }

    /// Takes out one connection whose deadline has passed.
    pub fn pop_expired(&mut self, now: Instant) -> Option<u32> {
        let since = now.saturating_duration_since(self.base).as_nanos();
        let now = (since / TICK.as_nanos()).min(u128::from(TICKS_MAX)) as u64;
        while let Some((level, slot, tick)) = self.next_slot()
            && tick <= now
        {
            self.elapsed = tick;
            let head = self.heads[level][slot];
            if level == 0 {
                self.unlink(head);
                let id = self.nodes.remove(head as usize).id;
                self.of_connection[id as usize] = NONE;
                return Some(id);
            }
            self.move_nearer(level, slot);
        }
        self.elapsed = self.elapsed.max(now);
        None
    }

    /// How many connections have a deadline.
    #[must_use]
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The first slot that holds something, and the tick that it begins with. What is on a lower
    /// level is due before anything on a higher one, and no level goes round: a slot behind the
    /// wheel's own place is empty.
    fn next_slot(&self) -> Option<(usize, usize, u64)> {
        let level = self.occupied.iter().position(|slots| *slots != 0)?;
        let slot = self.occupied[level].trailing_zeros() as usize;
        let shift = SLOT_BITS * level;
        let level_begin = self.elapsed >> (shift + SLOT_BITS) << (shift + SLOT_BITS);
        Some((level, slot, level_begin | (slot as u64) << shift))
    }

    /// Puts all deadlines of a slot on lower levels; the wheel has come to its begin.
    fn move_nearer(&mut self, level: usize, slot: usize) {
        let mut node = std::mem::replace(&mut self.heads[level][slot], NONE);
        self.occupied[level] &= !(1 << slot);
        while node != NONE {
            let next = self.nodes[node as usize].next;
            self.link(node);
            node = next;
        }
    }

    fn link(&mut self, index: u32) {
        let node = &mut self.nodes[index as usize];
        // What is due already comes at once.
        let tick = node.tick.max(self.elapsed);
        let level = (tick ^ self.elapsed)
            .checked_ilog2()
            .map_or(0, |bit| bit as usize / SLOT_BITS);
        let slot = (tick >> (SLOT_BITS * level)) as usize % SLOTS;
        let head = std::mem::replace(&mut self.heads[level][slot], index);
        self.occupied[level] |= 1 << slot;
        node.level = level as u8;
        node.slot = slot as u8;
        node.previous = NONE;
        node.next = head;
        if head != NONE {
            self.nodes[head as usize].previous = index;
        }
    }

    fn unlink(&mut self, index: u32) {
        let Node {
            previous,
            next,
            level,
            slot,
            ..
        } = self.nodes[index as usize];
        let (level, slot) = (usize::from(level), usize::from(slot));
        if previous == NONE {
            self.heads[level][slot] = next;
        } else {
            self.nodes[previous as usize].next = next;
        }
        if next != NONE {
            self.nodes[next as usize].previous = previous;
        }
        if self.heads[level][slot] == NONE {
            self.occupied[level] &= !(1 << slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn deadlines_expire_in_order_and_a_replaced_one_never() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut timers = Timers::new(start);
        timers.replace(1, None, Some(at(5)));
        timers.replace(2, None, Some(at(3)));
        timers.replace(1, Some(at(5)), Some(at(1)));
        timers.replace(3, None, Some(at(2)));
        timers.replace(3, Some(at(2)), None);
        assert_eq!(timers.len(), 2);
        assert_eq!(timers.pop_expired(at(0)), None);
        assert_eq!(timers.pop_expired(at(4)), Some(1));
        assert_eq!(timers.pop_expired(at(4)), Some(2));
        assert_eq!(timers.pop_expired(at(9)), None);
        assert!(timers.len() == 0 && timers.next().is_none());
    }

    #[test]
    fn a_far_deadline_wakes_the_loop_a_few_times_only() {
        let start = Instant::now();
        for days in [0, 1, 30, 4000] {
            let mut timers = Timers::new(start);
            let deadline = start + Duration::from_secs(days * 86_400 + 77);
            timers.replace(0, None, Some(deadline));
            let mut wakes = 0;
            let woken = loop {
                let next = timers.next().unwrap();
                wakes += 1;
                if timers.pop_expired(next).is_some() {
                    break next;
                }
            };
            assert!(woken >= deadline && woken < deadline + TICK);
            assert!(wakes <= LEVELS, "{days} days: {wakes}");
        }
    }

    #[test]
    fn a_deadline_beyond_all_levels_is_armed_and_cancelled() {
        let start = Instant::now();
        let mut timers = Timers::new(start);
        let never = Some(start + Duration::from_secs(1 << 50));
        timers.replace(7, None, never);
        assert_eq!(
            timers.pop_expired(start + Duration::from_secs(1 << 30)),
            None
        );
        timers.replace(7, never, None);
        assert!(timers.len() == 0 && timers.next().is_none());
    }

    /// A step of a random schedule, times in nanoseconds.
    #[derive(Clone, Debug)]
    enum Step {
        Replace(u32, u64),
        Cancel(u32),
        Pass(u64),
        PassToNext,
    }

    fn forget(model: &mut BTreeSet<(Instant, u32)>, id: u32) -> Option<Instant> {
        let entry = model.iter().copied().find(|(_, other)| *other == id)?;
        model.remove(&entry);
        Some(entry.0)
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let time = || (0_u32..52).prop_flat_map(|bits| 0..=1_u64 << bits);
        let step = prop_oneof![
            4 => (0_u32..12, time()).prop_map(|(id, after)| Step::Replace(id, after)),
            1 => (0_u32..12).prop_map(Step::Cancel),
            2 => time().prop_map(Step::Pass),
            2 => Just(Step::PassToNext),
        ];
        proptest::collection::vec(step, 1..200)
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn it_is_an_ordered_set_but_for_one_tick(steps in steps()) {
            let start = Instant::now();
            let mut now = start;
            let mut timers = Timers::new(start);
            let mut model = BTreeSet::new();
            for step in steps {
                match step {
                    Step::Replace(id, after) => {
                        let at = now + Duration::from_nanos(after);
                        let old = forget(&mut model, id);
                        model.insert((at, id));
                        timers.replace(id, old, Some(at));
                    }
                    Step::Cancel(id) => {
                        let old = forget(&mut model, id);
                        timers.replace(id, old, None);
                    }
                    Step::Pass(time) => now += Duration::from_nanos(time),
                    Step::PassToNext => now = timers.next().map_or(now, |next| next.max(now)),
                }
                prop_assert_eq!(timers.len(), model.len());
                let mut last = start;
                while let Some(id) = timers.pop_expired(now) {
                    let Some(at) = forget(&mut model, id) else {
                        return Err(TestCaseError::fail(format!("{id} has no deadline")));
                    };
                    prop_assert!(at <= now, "early");
                    prop_assert!(at + TICK > last, "out of order");
                    last = at;
                }
                if let Some((first, _)) = model.first() {
                    prop_assert!(*first + TICK > now, "late");
                    let next = timers.next().unwrap();
                    prop_assert!(next > now && next < *first + TICK);
                } else {
                    prop_assert!(timers.len() == 0 && timers.next().is_none());
                }
            }
        }
    }
}
