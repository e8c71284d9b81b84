//! Moves bytes.

use std::time::Instant;

use super::Worker;
use super::actions::connect_failure;
use super::connection::{Mode, Received};
use crate::ring::ready;
use crate::session::event::Input;
use crate::session::outcome::ConnectFailure;
use crate::stats::Direction;

/// Reads of one direction before others have their turn.
const READS_PER_TURN: usize = 8;

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
    /// The receiver's connection broke.
    SinkLost,
}

impl Worker {
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
            let source = connection.source.ip();
            match client.receive(&mut hot) {
                Received::Data(count) => {
                    if self.pending.contains(id) {
                        self.pending.heard(id, source, now);
                    }
                    self.feed(id, Input::ClientData(&hot[..count]), now);
                }
                Received::Blocked => break,
                Received::Ended => self.feed(id, Input::ClientEnded, now),
                Received::Lost => self.feed(id, Input::ClientLost, now),
            }
        }
        self.hot = hot;
    }

    /// Sees whether the backend is connected, and whether the client is there.
    pub(super) fn watch_dial(&mut self, id: u32, now: Instant) {
        let connection = &mut self.connections[id as usize];
        if let Some(client) = &connection.client {
            let gone = client.ended;
            if gone & (ready::HANG_UP | ready::ERROR) != 0 {
                self.feed(id, Input::ClientLost, now);
            } else if gone & ready::PEER_ENDED != 0 {
                self.feed(id, Input::ClientEnded, now);
            }
        }
        let connection = &mut self.connections[id as usize];
        if connection.mode != Mode::Dialing {
            return;
        }
        if let Some(failure) = connection.dial_error.take() {
            return self.feed(id, Input::ConnectFailed(failure), now);
        }
        let Some(backend) = &connection.backend else {
            return;
        };
        match (backend.socket.take_error(), backend.socket.peer_addr()) {
            (Ok(None), Ok(_)) => {
                self.stats
                    .backend_connect_took(connection.dialled.elapsed());
                self.feed(id, Input::Connected, now);
            }
            // Still connecting.
            (Ok(None), Err(_)) if backend.ended == 0 => {}
            (Ok(None), Err(_)) => {
                self.feed(id, Input::ConnectFailed(ConnectFailure::Reset), now);
            }
            (Ok(Some(error)) | Err(error), _) => {
                self.feed(id, Input::ConnectFailed(connect_failure(&error)), now);
            }
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

    fn turn(&mut self, id: u32, direction: Direction, hot: &mut [u8], now: Instant) -> Turn {
        let connection = &mut self.connections[id as usize];
        let watched = direction == Direction::ToClient && connection.session.watches_backend();
        for _ in 0..READS_PER_TURN {
            let connection = &mut self.connections[id as usize];
            let (pipe, source, sink) = connection.direction(direction);
            // A client that is not read, because its bytes have nowhere to go or
            // because it has said all, can still break. gate never ends the
            // client's side while it relays, so a hang-up is no orderly end.
            let broken = source
                .as_ref()
                .is_some_and(|side| side.ended & (ready::HANG_UP | ready::ERROR) != 0);
            let unread = if broken && direction == Direction::ToBackend {
                Turn::SourceLost
            } else {
                Turn::Waits
            };
            if pipe.finished {
                return unread;
            }
            match pipe.flush(sink) {
                Some(true) => {}
                Some(false) => return unread,
                None => return Turn::SinkLost,
            }
            if pipe.source_ended {
                return Turn::Ended;
            }
            let Some(source) = source else {
                return Turn::Waits;
            };
            let count = match source.receive(hot) {
                Received::Data(count) => count,
                Received::Blocked => return Turn::Waits,
                Received::Ended => {
                    pipe.source_ended = true;
                    return Turn::Ended;
                }
                Received::Lost => return Turn::SourceLost,
            };
            let bytes = &hot[..count];
            // Not after ReadyForQuery, which may have come earlier in this turn.
            if watched && self.connections[id as usize].session.watches_backend() {
                self.feed(id, Input::BackendData(bytes), now);
                let connection = &self.connections[id as usize];
                if connection.session.state().is_relay() {
                    self.stats.ready_took(connection.since.elapsed());
                }
            }
            let connection = &mut self.connections[id as usize];
            connection.active = now;
            let (pipe, _, sink) = connection.direction(direction);
            let dropped = pipe.drops;
            let passed = pipe.pass(sink, bytes);
            if !dropped {
                connection.relayed[direction as usize] += count as u64;
                self.stats.relayed(direction, count as u64);
            }
            if passed.is_none() {
                return Turn::SinkLost;
            }
        }
        Turn::More
    }

    /// Tells the session what came to an end.
    fn conclude(&mut self, id: u32, direction: Direction, turn: Turn, now: Instant) {
        let connection = &mut self.connections[id as usize];
        let input = match (direction, turn) {
            (_, Turn::Waits | Turn::More) => return,
            (Direction::ToBackend, Turn::SinkLost) => {
                // What the backend said last may still be on its way to the
                // client; only the client's bytes have nowhere to go.
                connection.up.drops = true;
                connection.backend_broke = connection
                    .backend
                    .as_ref()
                    .is_some_and(|backend| backend.ended & ready::PEER_ENDED == 0);
                return self.enqueue(id);
            }
            (Direction::ToBackend, Turn::Ended) => {
                connection.up.finished = true;
                Input::ClientEnded
            }
            (Direction::ToBackend, Turn::SourceLost) | (Direction::ToClient, Turn::SinkLost) => {
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
                last = client.receive(&mut hot);
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
