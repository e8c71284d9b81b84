//! Ends connections: everything is given back once, and no descriptor is closed
//! while an operation on it is in flight.

use std::sync::atomic::Ordering;
use std::time::Instant;

use super::Worker;
use super::connection::{Mode, PollState};
use super::machine::{Key, Kind, Machine};

impl<M: Machine> Worker<M> {
    /// Closes the backend's socket, once its poll has ended.
    pub(super) fn retire_backend(&mut self, id: u32, now: Instant) {
        let connection = &mut self.connections[id as usize];
        match &mut connection.backend {
            Some(backend) if backend.poll == PollState::Idle => self.backend_retired(id, now),
            Some(backend) => {
                backend.retired = true;
                self.cancel_poll(id, Kind::Backend);
            }
            None if connection.dials_next => self.backend_retired(id, now),
            None => {}
        }
    }

    /// Nothing is in flight on a retired backend: closes it. Its descriptor is
    /// given back, or is for the next address.
    pub(super) fn backend_retired(&mut self, id: u32, now: Instant) {
        let connection = &mut self.connections[id as usize];
        if let Some(backend) = connection.backend.take() {
            self.machine.close(backend.socket);
        }
        if std::mem::take(&mut connection.dials_next) && connection.mode == Mode::Dialing {
            self.connect_backend(id, now);
        } else {
            self.give_backend_fd(id);
        }
    }

    /// Closes everything, once no operation is in flight.
    pub(super) fn close(&mut self, id: u32, reset_client: bool) {
        self.pending.remove(id);
        self.end_wait(id);
        let connection = &mut self.connections[id as usize];
        connection.mode = Mode::Closing;
        connection.reset_client |= reset_client;
        if let Some(deadline) = connection.deadline.take() {
            self.timers.replace(id, Some(deadline), None);
        }
        self.cancel_poll(id, Kind::Client);
        self.cancel_poll(id, Kind::Backend);
        if self.connections[id as usize].is_quiet() {
            self.turns.finished.push(id);
        }
    }

    /// Ends a poll; its last completion still comes, and arms it anew as the
    /// connection's mode needs it then.
    pub(super) fn cancel_poll(&mut self, id: u32, kind: Kind) {
        let connection = &mut self.connections[id as usize];
        let key = Key::new(kind, id, connection.generation);
        let side = connection.side(kind);
        if let Some(side) = side
            && matches!(side.poll, PollState::Once | PollState::Changes)
        {
            side.poll = PollState::Ending;
            if let Err(error) = self.machine.cancel(key) {
                tracing::error!(%error, "a poll cannot be cancelled");
            }
        }
    }

    /// Gives back the descriptor that was kept for a backend.
    pub(super) fn give_backend_fd(&mut self, id: u32) {
        let connection = &mut self.connections[id as usize];
        let of_client = u8::from(connection.client.is_some() && !connection.on_reserve);
        if connection.fds > of_client {
            connection.fds -= 1;
            self.state.give_fds(1);
        }
    }

    /// Closes what has no operation in flight: the backend before the client,
    /// whose close gives the slots back.
    pub(super) fn close_finished(&mut self) {
        while let Some(id) = self.turns.finished.pop() {
            if !self.connections.contains(id as usize) {
                continue;
            }
            let mut connection = self.connections.remove(id as usize);
            self.stats.holds(self.connections.len());
            // Before the close: between the two it counts once too often, and
            // another worker evicts one too many rather than one too few.
            if connection.evicted {
                self.state.evicting.fetch_sub(1, Ordering::Relaxed);
            }
            self.pipes.take_back(connection.up.give_pipe());
            self.pipes.take_back(connection.down.give_pipe());
            if let Some(backend) = connection.backend.take() {
                self.machine.close(backend.socket);
            }
            match connection.client.take() {
                Some(client) if connection.reset_client => self.machine.reset(client.socket),
                Some(client) => self.machine.close(client.socket),
                None => {}
            }
            // Whoever has no entry has no client.
            if connection.entry.is_none() {
                self.dialing.cancels -= 1;
            }
            if let Some(entry) = connection.entry.take() {
                self.state.ledger.closed(entry);
                // A storm of refusals is no reason for those that wait to ask.
                if connection.admitted {
                    self.state.slots_released();
                }
            }
            self.state.give_fds(u64::from(connection.fds));
            if connection.on_reserve {
                self.accepting.on_reserve -= 1;
            }
            if connection.on_spare {
                self.accepting.spare_lent = false;
                self.keep_spare();
            }
        }
    }
}
