//! The queue of clients that wait for a slot. Pure: values in, verdicts out.
//!
//! First come, first served per user: each user has a line of its own, and only
//! the head of a line may ask the ledger. Lines do not wait for each other: a
//! user at its own limit holds up nobody else.

use std::collections::btree_map::BTreeMap;
use std::collections::hash_map::{Entry, HashMap};
use std::collections::{BTreeSet, HashSet};

/// One waiting connection: its worker, and its place in that worker's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket {
    /// Number of the worker that serves it.
    pub worker: u16,
    /// Index in the worker's table.
    pub id: u32,
    /// Tells it from an earlier connection with that index.
    pub generation: u32,
}

/// The limit that refused, and whose bound on waiters holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum WaitsFor {
    /// `max_connections`.
    Total,
    /// The limit of this user.
    User(Vec<u8>),
    /// The limit of this database.
    Database(Vec<u8>),
    /// The limit of this backend.
    Backend(Vec<u8>),
}

/// Whether a client may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Join {
    /// It is first of its line: it must ask the ledger once more before it
    /// sleeps.
    Head,
    /// It waits behind others of its user.
    Behind,
    /// As many as may wait for this limit do.
    TooMany,
}

/// See the module.
#[derive(Debug, Default)]
pub struct WaitQueue {
    /// Arrivals so far: the next number in the order of arrival.
    arrivals: u64,
    tickets: HashMap<Ticket, u64>,
    waiters: BTreeMap<u64, Waiter>,
    /// The arrivals of each user who waits; the least is the head.
    lines: HashMap<Vec<u8>, BTreeSet<u64>>,
    heads: BTreeSet<u64>,
    per_limit: HashMap<WaitsFor, u32>,
}

#[derive(Debug)]
struct Waiter {
    ticket: Ticket,
    user: Vec<u8>,
    limit: WaitsFor,
}

impl WaitQueue {
    /// Puts a client at the end of its user's line, unless `max_waiting` wait
    /// for that limit already. A ticket that waits already stays where it is.
    pub fn join(&mut self, ticket: Ticket, user: &[u8], limit: WaitsFor, max_waiting: u32) -> Join {
        if let Some(arrival) = self.tickets.get(&ticket) {
            return if self.heads.contains(arrival) {
                Join::Head
            } else {
                Join::Behind
            };
        }
        if self.waiting_for(&limit) >= max_waiting {
            return Join::TooMany;
        }
        let arrival = self.arrivals;
        self.arrivals += 1;
        *self.per_limit.entry(limit.clone()).or_default() += 1;
        self.tickets.insert(ticket, arrival);
        let line = self.lines.entry(user.to_vec()).or_default();
        let is_head = line.is_empty();
        line.insert(arrival);
        if is_head {
            self.heads.insert(arrival);
        }
        let waiter = Waiter {
            ticket,
            user: user.to_vec(),
            limit,
        };
        self.waiters.insert(arrival, waiter);
        if is_head { Join::Head } else { Join::Behind }
    }

    /// Takes a client out, whatever the reason. Returns whether it waited, and
    /// who became the head of its line by that.
    pub fn leave(&mut self, ticket: Ticket) -> (bool, Option<Ticket>) {
        let Some(arrival) = self.tickets.remove(&ticket) else {
            return (false, None);
        };
        let Some(Waiter { user, limit, .. }) = self.waiters.remove(&arrival) else {
            return (false, None);
        };
        if let Entry::Occupied(mut count) = self.per_limit.entry(limit) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        let was_head = self.heads.remove(&arrival);
        let Entry::Occupied(mut line) = self.lines.entry(user) else {
            return (true, None);
        };
        line.get_mut().remove(&arrival);
        let Some(next) = line.get().first().copied() else {
            line.remove();
            return (true, None);
        };
        if !was_head {
            return (true, None);
        }
        self.heads.insert(next);
        (true, self.waiters.get(&next).map(|waiter| waiter.ticket))
    }

    /// The heads of all lines, who may ask the ledger, in the order in which
    /// they came.
    pub fn candidates(&self) -> impl Iterator<Item = Ticket> + '_ {
        let heads = self.heads.iter();
        heads.filter_map(|arrival| self.waiters.get(arrival).map(|waiter| waiter.ticket))
    }

    /// The workers that have a head.
    #[must_use]
    pub fn workers(&self) -> HashSet<u16> {
        self.candidates().map(|ticket| ticket.worker).collect()
    }

    /// What the head of a user's line waits for; `None` if nobody of that user
    /// waits.
    #[must_use]
    pub fn line_of(&self, user: &[u8]) -> Option<&WaitsFor> {
        let head = self.lines.get(user)?.first()?;
        self.waiters.get(head).map(|waiter| &waiter.limit)
    }

    /// Whether this client is the head of a line.
    #[must_use]
    pub fn is_head(&self, ticket: Ticket) -> bool {
        let arrival = self.tickets.get(&ticket);
        arrival.is_some_and(|arrival| self.heads.contains(arrival))
    }

    /// How many wait for a limit.
    #[must_use]
    pub fn waiting_for(&self, limit: &WaitsFor) -> u32 {
        self.per_limit.get(limit).copied().unwrap_or(0)
    }

    /// How many wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiters.len()
    }

    /// Whether nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiters.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ticket(id: u32) -> Ticket {
        Ticket {
            worker: (id % 3) as u16,
            id,
            generation: 7,
        }
    }

    fn user(number: u8) -> Vec<u8> {
        vec![b'a' + number]
    }

    #[test]
    fn a_line_moves_up_one_by_one_and_lines_do_not_wait_for_each_other() {
        let mut queue = WaitQueue::default();
        let of = |number| WaitsFor::User(user(number));
        assert_eq!(queue.join(ticket(1), &user(0), of(0), 9), Join::Head);
        assert_eq!(queue.join(ticket(2), &user(0), of(0), 9), Join::Behind);
        assert_eq!(queue.join(ticket(3), &user(1), of(1), 9), Join::Head);
        assert_eq!(queue.join(ticket(2), &user(0), of(0), 9), Join::Behind);
        let heads = |queue: &WaitQueue| queue.candidates().collect::<Vec<_>>();
        assert_eq!(heads(&queue), [ticket(1), ticket(3)]);
        assert_eq!(queue.line_of(&user(1)), Some(&of(1)));
        assert_eq!(queue.line_of(&user(2)), None);
        assert_eq!(queue.leave(ticket(1)), (true, Some(ticket(2))));
        assert_eq!(queue.leave(ticket(1)), (false, None));
        // In the order of arrival, not of becoming head.
        assert_eq!(heads(&queue), [ticket(2), ticket(3)]);
        assert_eq!(queue.workers(), HashSet::from([2, 0]));
    }

    #[test]
    fn who_comes_back_with_an_index_is_somebody_else() {
        let mut queue = WaitQueue::default();
        let old = ticket(1);
        let new = Ticket {
            generation: 8,
            ..old
        };
        queue.join(new, b"app", WaitsFor::Total, 1);
        assert_eq!(queue.leave(old), (false, None));
        assert!(queue.is_head(new) && !queue.is_head(old));
    }

    #[test]
    fn each_limit_has_its_own_bound() {
        let mut queue = WaitQueue::default();
        let prod = || WaitsFor::Database(b"prod".to_vec());
        assert_eq!(queue.join(ticket(1), b"a", prod(), 1), Join::Head);
        assert_eq!(queue.join(ticket(2), b"b", prod(), 1), Join::TooMany);
        assert_eq!(queue.join(ticket(2), b"b", WaitsFor::Total, 1), Join::Head);
        assert_eq!(queue.join(ticket(3), b"c", prod(), 0), Join::TooMany);
        queue.leave(ticket(1));
        assert_eq!(queue.join(ticket(3), b"c", prod(), 1), Join::Head);
        assert_eq!(queue.len(), 2);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Join(u32, u8, bool),
        Leave(u32),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            (0..40_u32, 0..4_u8, any::<bool>())
                .prop_map(|(id, user, own)| Step::Join(id, user, own)),
            (0..40_u32).prop_map(Step::Leave),
        ];
        proptest::collection::vec(step, 0..200)
    }

    const MAX_WAITING: u32 = 12;

    proptest! {
        /// Against the slowest honest queue: a list.
        #[test]
        fn it_does_what_a_list_would_do(steps in steps()) {
            let mut queue = WaitQueue::default();
            let mut list: Vec<(Ticket, Vec<u8>, WaitsFor)> = Vec::new();
            for step in steps {
                match step {
                    Step::Join(id, number, own) => {
                        let user = user(number);
                        let limit = if own { WaitsFor::User(user.clone()) } else { WaitsFor::Total };
                        let known = list.iter().any(|(other, ..)| *other == ticket(id));
                        let count = list.iter().filter(|(.., other)| *other == limit).count();
                        let joined = queue.join(ticket(id), &user, limit.clone(), MAX_WAITING);
                        if known {
                            prop_assert_ne!(joined, Join::TooMany);
                        } else if count as u32 >= MAX_WAITING {
                            prop_assert_eq!(joined, Join::TooMany);
                        } else {
                            let behind = list.iter().any(|(_, other, _)| *other == user);
                            prop_assert_eq!(joined == Join::Behind, behind);
                            list.push((ticket(id), user, limit));
                        }
                    }
                    Step::Leave(id) => {
                        let heads: Vec<Ticket> = queue.candidates().collect();
                        let place = list.iter().position(|(other, ..)| *other == ticket(id));
                        let (waited, next) = queue.leave(ticket(id));
                        prop_assert_eq!(waited, place.is_some());
                        if let Some(place) = place {
                            let (_, user, _) = list.remove(place);
                            let first = list.iter().find(|(_, other, _)| *other == user);
                            let moved = heads.contains(&ticket(id));
                            prop_assert_eq!(next, first.filter(|_| moved).map(|(ticket, ..)| *ticket));
                        }
                    }
                }
                let mut heads: Vec<Ticket> = Vec::new();
                let mut users = HashSet::new();
                for (ticket, user, limit) in &list {
                    if users.insert(user.clone()) {
                        heads.push(*ticket);
                        prop_assert!(queue.is_head(*ticket));
                        prop_assert_eq!(queue.line_of(user), Some(limit));
                    }
                    let count = list.iter().filter(|(.., other)| other == limit).count();
                    prop_assert_eq!(queue.waiting_for(limit) as usize, count);
                }
                prop_assert_eq!(queue.candidates().collect::<Vec<_>>(), heads);
                prop_assert_eq!(queue.len(), list.len());
            }
            for (ticket, ..) in list {
                queue.leave(ticket);
            }
            prop_assert!(queue.is_empty() && queue.tickets.is_empty() && queue.lines.is_empty());
            prop_assert!(queue.heads.is_empty() && queue.per_limit.is_empty());
        }
    }
}
