//! The wait queue as all workers share it.
//!
//! # Protocol
//!
//! The ledger alone admits. The queue only says who may ask it next, and wakes
//! those who sleep. A worker does this, for a session that asks for admission:
//!
//! 1. [`Waiting::line_of`]: does somebody of its user wait already? Then the
//!    session does not ask; it goes to 3 with what that user's head waits for.
//! 2. It asks the ledger. Admitted: done. Refused: 3, with [`waits_for`].
//! 3. [`Waiting::join`]. [`Join::TooMany`]: refused for the reason of 2.
//!    [`Join::Head`]: it asks the ledger **once more**; admitted, it
//!    [leaves](Waiting::leave), else it sleeps. [`Join::Behind`]: it sleeps.
//! 4. At each wake-up, and every [`LOOK_AGAIN`] while it has sessions that wait,
//!    the worker asks the ledger for each ticket of [`Waiting::ready`].
//! 5. Admitted, out of time, or left by its client, a session leaves the queue;
//!    [`Waiting::leave`] wakes the worker of the next in that line.
//! 6. After the close of a session that was admitted has given its slots back, its
//!    worker calls [`Waiting::released`], which wakes the workers that have heads.
//!
//! # Why no wake-up is lost
//!
//! Let a session W find no slot and sleep, and let R give one back. R gives the slot
//! back, then a fence, then reads the count of waiters. W counts itself, then a fence,
//! then asks the ledger the last time (3). Of two threads that each write, fence
//! and read what the other writes, at least one sees the other's write. Either R
//! sees that somebody waits, and wakes the worker of W: it takes the lock, under
//! which W has joined or joins later, and in the latter case W asks after that. Or
//! W sees the free slot. A wake-up that comes before the worker sleeps is not lost
//! either: its eventfd keeps it.
//!
//! Whoever becomes a head later asks when it does (5), so the same holds for it.
//!
//! Slots that another process gives back, or that come free because a limit was
//! raised, wake nobody: there step 4's look every [`LOOK_AGAIN`] is the bound.
//!
//! # Order
//!
//! Who joined earlier is admitted earlier, per user: only the head asks, and it
//! leaves the queue after the ledger has answered. Between two sessions that
//! are in 1 to 3 at the same time there is no order to keep.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::admission::{Join, Ticket, WaitQueue, WaitsFor};
use crate::ledger::Applicant;
use crate::session::outcome::Reason;

/// How often a worker looks for slots that came free without a wake-up, while it
/// has sessions that wait.
pub const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// See the module.
#[derive(Debug, Default)]
pub struct Waiting {
    queue: Mutex<WaitQueue>,
    /// How many wait: read without the lock where nobody does.
    count: AtomicU32,
}

impl Waiting {
    /// What the head of this user's line waits for; `None` if nobody of this user
    /// waits. A relaxed load if nobody waits at all.
    #[must_use]
    pub fn line_of(&self, user: &[u8]) -> Option<WaitsFor> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.lock().line_of(user).cloned()
    }

    /// Joins the line of its user.
    pub fn join(&self, ticket: Ticket, user: &[u8], limit: WaitsFor, max_waiting: u32) -> Join {
        let mut queue = self.lock();
        let joined = queue.join(ticket, user, limit, max_waiting);
        self.publish(&queue);
        joined
    }

    /// Leaves the queue; `wake` wakes the worker of the next in that line.
    /// Returns whether the ticket waited: a second call does nothing.
    pub fn leave(&self, ticket: Ticket, wake: impl FnOnce(u16)) -> bool {
        let (waited, next) = {
            let mut queue = self.lock();
            let left = queue.leave(ticket);
            self.publish(&queue);
            left
        };
        if let Some(next) = next {
            wake(next.worker);
        }
        waited
    }

    /// The tickets of a worker that may ask the ledger now.
    #[must_use]
    pub fn ready(&self, worker: u16) -> Vec<Ticket> {
        if self.count.load(Ordering::Relaxed) == 0 {
            return Vec::new();
        }
        let queue = self.lock();
        let heads = queue.candidates();
        heads.filter(|ticket| ticket.worker == worker).collect()
    }

    /// Slots were given back: `wake` wakes each worker that has heads. A fence and
    /// a load if nobody waits.
    pub fn released(&self, wake: impl FnMut(u16)) {
        fence(Ordering::SeqCst);
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let workers = self.lock().workers();
        workers.into_iter().for_each(wake);
    }

    /// How many wait.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether nobody waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, WaitQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Under the lock, so that counts are stored in the order of the changes.
    fn publish(&self, queue: &WaitQueue) {
        let count = u32::try_from(queue.len()).unwrap_or(u32::MAX);
        self.count.store(count, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }
}

/// The limit that a refusal waits for; `None` for a reason that time does not
/// heal.
#[must_use]
pub fn waits_for(reason: Reason, who: &Applicant<'_>) -> Option<WaitsFor> {
    match reason {
        Reason::MaxConnections => Some(WaitsFor::Total),
        Reason::User => Some(WaitsFor::User(who.user.to_vec())),
        Reason::Database => who.database.map(|name| WaitsFor::Database(name.to_vec())),
        Reason::Backend => Some(WaitsFor::Backend(who.backend.to_vec())),
        Reason::MaxPending
        | Reason::Source
        | Reason::OverCeiling
        | Reason::NamesFull
        | Reason::Draining
        | Reason::Descriptors => None,
    }
}

/// The reason with which a waiter of this limit is refused.
#[must_use]
pub const fn reason_of(limit: &WaitsFor) -> Reason {
    match limit {
        WaitsFor::Total => Reason::MaxConnections,
        WaitsFor::User(_) => Reason::User,
        WaitsFor::Database(_) => Reason::Database,
        WaitsFor::Backend(_) => Reason::Backend,
    }
}

#[cfg(test)]
mod tests;
