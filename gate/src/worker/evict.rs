//! Silent clients: when more are pending than `max_pending` allows, those of the
//! source that has most of them are turned away, the longest silent first.

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
            .accepting
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
        if self.too_many_pending() == 0 {
            return;
        }
        match self.victim(Some(newcomer), now) {
            Some(victim) => self.evict(victim, now),
            None => self.want_eviction(),
        }
    }

    fn want_eviction(&self) {
        // Some may have spoken when they were looked at.
        let too_many = self.too_many_pending();
        if too_many > 0 {
            let worker = self.id as u16;
            self.state.evictions_wanted().want(worker, too_many);
            self.state.wake_others(self.id);
        }
    }

    /// Evicts what another worker has no victim for.
    pub(super) fn evict_for_others(&mut self, now: Instant) {
        let worker = self.id as u16;
        // Before a victim is looked for: that reads from it.
        while self.state.evictions_wanted().is_wanted_of(worker) {
            let victim = self.victim(None, now);
            let too_many = self.too_many_pending();
            let is_taken = {
                let mut wanted = self.state.evictions_wanted();
                wanted.forget(too_many);
                // Others look for one at the same time.
                victim.is_some() && wanted.take_up(worker)
            };
            let Some(victim) = victim.filter(|_| is_taken) else {
                return;
            };
            self.evict(victim, now);
        }
    }

    fn too_many_pending(&self) -> u64 {
        let ledger = &self.state.ledger;
        // Those evicted before are pending until they are closed, at the end of
        // this round: a whole accept queue must not evict for them again.
        let staying = ledger
            .pending()
            .saturating_sub(self.state.evicting.load(Ordering::Relaxed));
        staying.saturating_sub(ledger.max_pending().tokens())
    }

    /// Whom to evict: the longest silent of the fullest source that is silent
    /// still. `None` if there is none but the newcomer, or no need any more.
    fn victim(&mut self, newcomer: Option<u32>, now: Instant) -> Option<u32> {
        self.settle_newcomers(now);
        // No connection has the last number.
        let newcomer = newcomer.unwrap_or(u32::MAX);
        while self.too_many_pending() > 0
            && let Some(victim) = self.pending.victim(newcomer)
        {
            // Its packet may have come meanwhile, also if no poll has told so yet:
            // a complete one is served.
            if let Some(client) = &mut self.connections[victim as usize].client {
                client.readable = true;
            }
            self.advance(victim, now);
            if self.connections[victim as usize].session.is_pending() {
                return Some(victim);
            }
            self.pending.remove(victim);
            // What its poll was to report is read already, and a poll of one
            // report tells nothing of room to write.
            self.cancel_poll(victim, Kind::Client);
        }
        None
    }

    fn evict(&mut self, victim: u32, now: Instant) {
        self.pending.remove(victim);
        self.connections[victim as usize].evicted = true;
        self.state.evicting.fetch_add(1, Ordering::Relaxed);
        self.feed(victim, Input::Evict, now);
    }
}
