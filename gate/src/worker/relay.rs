//! Moves bytes.

use std::time::Instant;

use super::connection::{Gone, Mode, Received};
use super::flow::{Filled, Flushed};
use super::machine::Machine;
use super::{PIPE_BYTES, Worker};
use crate::host::connect_failure;
use crate::session::event::Input;
use crate::session::outcome::ConnectFailure;
use crate::stats::Direction;

/// Reads of one direction before others have their turn.
const READS_PER_TURN: usize = 4;
/// Moves of one direction through its pipe before others have their turn.
const MOVES_PER_TURN: usize = 1;

/// Bytes after which a receiver has shown that it takes much. One that never reads
/// does not get as far.
const WIDE_AFTER: u64 = 8 << 20;

/// How one direction's turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// Nothing to do until a poll says so.
    Waits,
    /// There is more, but others wait.
    More,
    /// The sender's FIN was read and everything before it was passed on.
    Ended,
    /// The sender's connection broke.
    SourceLost,
    /// The receiver takes nothing any more.
    SinkLost(Gone),
}

impl<M: Machine> Worker<M> {
    /// Gives the session what the client sends, until it is read no more.
    pub(super) fn read_startup(&mut self, id: u32, now: Instant) {
        let mut hot = std::mem::take(&mut self.hot);
        loop {
            let connection = &mut self.connections[id as usize];
            if connection.mode != Mode::Startup {
                break;
            }
            let Some(client) = &mut connection.client else {
                break;
            };
            match client.receive(&mut self.machine, &mut hot) {
                Received::Data(count) => {
                    connection.active = now;
                    self.pending.spoke(id, now);
                    self.feed(id, Input::ClientData(&hot[..count]), now);
                }
                Received::Blocked => break,
                Received::Ended => self.feed(id, Input::ClientEnded, now),
                Received::Lost => self.feed(id, Input::ClientLost, now),
            }
        }
        self.hot = hot;
    }

    /// Sees whether a client that is not read is there.
    pub(super) fn watch_client(&mut self, id: u32, now: Instant) {
        let connection = &mut self.connections[id as usize];
        if let Some(client) = &connection.client {
            if client.is_broken() {
                self.feed(id, Input::ClientLost, now);
            } else if client.peer_ended() {
                self.feed(id, Input::ClientEnded, now);
            }
        }
    }

    /// Sees whether the backend is connected, and whether the client is there.
    pub(super) fn watch_dial(&mut self, id: u32, now: Instant) {
        self.watch_client(id, now);
        let connection = &mut self.connections[id as usize];
        if connection.mode != Mode::Dialing {
            return;
        }
        if let Some(failure) = connection.dial_error.take() {
            return self.dial_failed(id, failure, now);
        }
        let Some(backend) = connection.backend.as_ref().filter(|side| !side.retired) else {
            return;
        };
        match self.machine.connected(&backend.socket) {
            Ok(true) => {
                let since = connection.active;
                let took = self.machine.now().saturating_duration_since(since);
                self.stats.backend_connect_took(took);
                let place = usize::from(connection.backend_index);
                let address = usize::from(connection.address);
                let is_cancel = connection.session.identity().is_none();
                let backends = &self.state.backends;
                backends.connected(place, address, is_cancel, now);
                self.feed(id, Input::Connected, now);
            }
            // Still connecting.
            Ok(false) if !backend.has_ended() => {}
            Ok(false) => self.dial_failed(id, ConnectFailure::Reset, now),
            Err(error) => self.dial_failed(id, connect_failure(&error), now),
        }
    }

    /// Passes bytes both ways.
    pub(super) fn relay(&mut self, id: u32, now: Instant) {
        let mut hot = std::mem::take(&mut self.hot);
        let mut more = false;
        for direction in Direction::ALL {
            if self.connections[id as usize].mode == Mode::Relaying {
                let turn = self.turn(id, direction, &mut hot, now);
                more |= turn == Turn::More;
                self.conclude(id, direction, turn, now);
            }
        }
        self.hot = hot;
        if more && self.connections[id as usize].mode == Mode::Relaying {
            self.enqueue(id);
        }
    }

    /// One direction's share of the loop: bounded, so that no flow keeps the
    /// others waiting.
    fn turn(&mut self, id: u32, direction: Direction, hot: &mut [u8], now: Instant) -> Turn {
        let (mut reads, mut moves) = (0, 0);
        loop {
            let connection = &mut self.connections[id as usize];
            let (flow, source, sink) = connection.direction(direction);
            // A client that is not read, because its bytes have nowhere to go or
            // because it has said all, can still break. gate never ends the
            // client's side while it relays, so a hang-up is no orderly end.
            let broken = source.as_ref().is_some_and(|side| side.is_broken());
            let unread = if broken && direction == Direction::ToBackend {
                Turn::SourceLost
            } else {
                Turn::Waits
            };
            if flow.finished {
                return unread;
            }
            match flow.flush(&mut self.machine, sink) {
                Flushed::Empty => {}
                Flushed::Blocked => return unread,
                Flushed::Lost(gone) => return Turn::SinkLost(gone),
            }
            if reads == READS_PER_TURN || moves == MOVES_PER_TURN {
                return Turn::More;
            }
            let Some(source) = source else {
                return Turn::Waits;
            };
            if flow.is_piped() {
                moves += 1;
                let filled = flow.fill(&mut self.machine, source, PIPE_BYTES);
                if let Some(turn) = self.moved(id, direction, filled, now) {
                    return turn;
                }
                continue;
            }
            reads += 1;
            let count = match source.receive(&mut self.machine, hot) {
                Received::Data(count) => count,
                Received::Blocked => return Turn::Waits,
                Received::Ended => return Turn::Ended,
                Received::Lost => return Turn::SourceLost,
            };
            let full = count == hot.len();
            if let Err(gone) = self.copied(id, direction, &hot[..count], full, now) {
                return Turn::SinkLost(gone);
            }
        }
    }

    /// Passes on what was read.
    fn copied(
        &mut self,
        id: u32,
        direction: Direction,
        bytes: &[u8],
        full: bool,
        now: Instant,
    ) -> Result<(), Gone> {
        let connection = &mut self.connections[id as usize];
        let watched = direction == Direction::ToClient && connection.session.watches_backend();
        if watched {
            self.feed(id, Input::BackendData(bytes), now);
            let connection = &self.connections[id as usize];
            if connection.session.state().is_relay() {
                let took = self.machine.now();
                let took = took.saturating_duration_since(connection.born);
                self.stats.ready_took(took);
            }
        }
        let connection = &mut self.connections[id as usize];
        let (flow, _, sink) = connection.direction(direction);
        let dropped = flow.drops;
        let passed = flow.pass(&mut self.machine, sink, bytes);
        if flow.wants_pipe(full && !watched)
            && let Some(pipe) = self.pipes.take(&mut self.machine)
        {
            flow.take_pipe(pipe);
        }
        if !dropped {
            connection.passed(direction, bytes.len(), now);
            self.stats.relayed(direction, bytes.len() as u64);
        }
        passed
    }

    /// Notes what came of a move into a pipe; some of it ends the turn. What is
    /// in the pipe leaves it at the next flush.
    fn moved(
        &mut self,
        id: u32,
        direction: Direction,
        filled: Filled,
        now: Instant,
    ) -> Option<Turn> {
        let connection = &mut self.connections[id as usize];
        let (flow, ..) = connection.direction(direction);
        let turn = match filled {
            Filled::Data(count) => {
                let before = connection.relayed[direction as usize];
                connection.passed(direction, count, now);
                let after = connection.relayed[direction as usize];
                if before < WIDE_AFTER
                    && after >= WIDE_AFTER
                    && let (_, _, Some(sink)) = connection.direction(direction)
                {
                    self.machine.widen(&sink.socket);
                }
                self.stats.relayed(direction, count as u64);
                return None;
            }
            Filled::Blocked => Turn::Waits,
            Filled::Ended => Turn::Ended,
            Filled::Lost => Turn::SourceLost,
        };
        self.pipes.take_back(flow.give_pipe());
        Some(turn)
    }

    /// Tells the session what came to an end.
    fn conclude(&mut self, id: u32, direction: Direction, turn: Turn, now: Instant) {
        let connection = &mut self.connections[id as usize];
        let input = match (direction, turn) {
            (_, Turn::Waits | Turn::More) => return,
            (Direction::ToBackend, Turn::SinkLost(gone)) => {
                // What the backend said last may still be on its way to the
                // client; only the client's bytes have nowhere to go.
                self.pipes.take_back(connection.up.drop_all());
                connection.backend_broke = gone == Gone::Broken;
                return self.enqueue(id);
            }
            (Direction::ToBackend, Turn::Ended) => {
                connection.up.finished = true;
                Input::ClientEnded
            }
            (Direction::ToBackend, Turn::SourceLost) => Input::ClientLost,
            (Direction::ToClient, Turn::SinkLost(_)) => {
                // Whatever the session makes of it, the backend's end is to be
                // seen, and it may have been reported already.
                self.pipes.take_back(connection.down.drop_all());
                self.enqueue(id);
                Input::ClientLost
            }
            (Direction::ToClient, Turn::Ended) if !connection.backend_broke => {
                connection.down.finished = true;
                Input::BackendEnded
            }
            (Direction::ToClient, Turn::Ended | Turn::SourceLost) => {
                connection.down.finished = true;
                Input::BackendLost
            }
        };
        self.feed(id, input, now);
    }

    /// Reads and drops what a client still sends after it was told the end.
    pub(super) fn drop_client_data(&mut self, id: u32, now: Instant) {
        let mut hot = std::mem::take(&mut self.hot);
        let mut last = Received::Blocked;
        for _ in 0..READS_PER_TURN {
            if let Some(client) = &mut self.connections[id as usize].client {
                last = client.receive(&mut self.machine, &mut hot);
            }
            if !matches!(last, Received::Data(_)) {
                break;
            }
        }
        self.hot = hot;
        match last {
            Received::Data(_) => self.enqueue(id),
            Received::Blocked => {}
            Received::Ended => self.feed(id, Input::ClientEnded, now),
            Received::Lost => self.feed(id, Input::ClientLost, now),
        }
    }
}
