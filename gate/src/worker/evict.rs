//! Who is evicted when too many have not said what they want.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Worker;
use super::machine::{Kind, Machine};
use crate::session::event::Input;

/// How long a client may take to speak before the eviction looks at it, unless
/// it must at once.
pub(super) const NEW: Duration = Duration::from_millis(10);

impl<M: Machine> Worker<M> {
    /// Makes those who were accepted before `until` and are still silent known
    /// to the eviction. Most clients speak at once, and are spared that.
    pub(super) fn settle_newcomers(&mut self, until: Instant) {
        while let Some((_, id, generation)) = self
            .newcomers
            .pop_front_if(|(accepted, ..)| *accepted <= until)
        {
            let Some(connection) = self.connections.get(id as usize) else {
                continue;
            };
            if connection.generation == generation
                && connection.pending
                && connection.session.is_pending()
            {
                let heard = connection.active;
                let source = self.source(id);
                self.pending.heard(id, source.ip(), heard);
            }
        }
    }

    /// Evicts one pending connection if there are too many. A worker that has
    /// none but the newcomer leaves it to the others.
    pub(super) fn evict_for(&mut self, newcomer: u32, now: Instant) {
        if self.has_too_many_pending() && !self.evict(Some(newcomer), now) {
            self.state.evictions_wanted.fetch_add(1, Ordering::Relaxed);
            // Not this one: it would evict the newcomer.
            self.state.wake_others(self.id);
        }
    }

    /// Evicts what another worker has no victim for.
    pub(super) fn evict_for_others(&mut self, now: Instant) {
        while self.state.evictions_wanted.load(Ordering::Relaxed) > 0 {
            let wanted = &self.state.evictions_wanted;
            if !self.has_too_many_pending() {
                // Somebody has spoken or left.
                return wanted.store(0, Ordering::Relaxed);
            }
            let take = |count: u64| count.checked_sub(1);
            let taken = wanted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
            if taken.is_err() {
                return;
            }
            if !self.evict(None, now) {
                self.state.evictions_wanted.fetch_add(1, Ordering::Relaxed);
                return;
            }
        }
    }

    fn has_too_many_pending(&self) -> bool {
        let ledger = &self.state.ledger;
        // Those evicted before are pending until they are closed, at the end of
        // this round: a whole accept queue must not evict for them again.
        let staying = ledger
            .pending()
            .saturating_sub(self.state.evicting.load(Ordering::Relaxed));
        staying > ledger.max_pending().tokens()
    }

    /// Evicts the longest silent of the fullest source. Returns false if there is
    /// none but the newcomer.
    fn evict(&mut self, newcomer: Option<u32>, now: Instant) -> bool {
        self.settle_newcomers(now);
        // No connection has the last number.
        while let Some(victim) = self.pending.victim(newcomer.unwrap_or(u32::MAX)) {
            self.pending.remove(victim);
            // Its packet may have come meanwhile: a complete one is served.
            self.advance(victim, now);
            if self.connections[victim as usize].session.is_pending() {
                self.connections[victim as usize].evicted = true;
                self.state.evicting.fetch_add(1, Ordering::Relaxed);
                self.feed(victim, Input::Evict, now);
                return true;
            }
            // What its poll was to report is read already, and a poll of one
            // report tells nothing of room to write.
            self.cancel_poll(victim, Kind::Client);
        }
        false
    }
}
