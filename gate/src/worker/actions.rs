//! Carries out what a session decides.

use std::time::Instant;

use super::Worker;
use super::admit::Answer;
use super::connection::{Connection, Mode, PollState};
use super::flow::Flow;
use super::machine::{Key, Kind, Machine, Watch};
use crate::proto::refusal::Refusal;
use crate::session::event::{Action, Count, Input};

impl<M: Machine> Worker<M> {
    /// Puts a connection into the table.
    pub(super) fn insert(&mut self, mut connection: Connection<M>) -> u32 {
        self.generation = self.generation.wrapping_add(1);
        connection.generation = self.generation;
        let id = self.connections.insert(connection) as u32;
        self.stats.holds(self.connections.len());
        id
    }

    /// Begins a connection: its bytes may be here already.
    pub(super) fn start(&mut self, id: u32, now: Instant) {
        let mut actions = std::mem::take(&mut self.actions);
        self.connections[id as usize].session.start(&mut actions);
        self.carry_out(id, actions, now);
        if self.connections[id as usize].client.is_some() {
            self.advance(id, now);
            self.watch(id, Kind::Client);
        }
    }

    /// Feeds the session one input and does what it says.
    pub(super) fn feed(&mut self, id: u32, input: Input<'_>, now: Instant) {
        let mut actions = std::mem::take(&mut self.actions);
        self.connections[id as usize]
            .session
            .handle(input, &mut actions);
        self.carry_out(id, actions, now);
    }

    fn carry_out(&mut self, id: u32, mut actions: Vec<Action>, now: Instant) {
        let mut next = 0;
        while next < actions.len() {
            let action = std::mem::replace(&mut actions[next], Action::DropBackendData);
            next += 1;
            if let Action::Admit(who) = action {
                let answer = self.admit(id, &who, now);
                for input in answer.into_iter().flat_map(Answer::inputs) {
                    self.connections[id as usize]
                        .session
                        .handle(input, &mut actions);
                }
            } else if let Action::Refuse(refusal) = action {
                if self.refuse(id, &refusal) {
                    self.connections[id as usize]
                        .session
                        .handle(Input::ClientEnded, &mut actions);
                }
            } else {
                self.act(id, action, now);
            }
        }
        actions.clear();
        self.actions = actions;
    }

    fn act(&mut self, id: u32, action: Action, now: Instant) {
        let connection = &mut self.connections[id as usize];
        match action {
            Action::Reply(byte) => {
                if let Some(client) = &connection.client {
                    // A client that cannot take one byte is lost, and a poll
                    // will say so.
                    let _ = client.send(&mut self.machine, &[byte]);
                }
            }
            // Carried out by `carry_out`.
            Action::Admit(_) | Action::Refuse(_) => {}
            Action::Dial => self.dial(id, now),
            Action::DialNext => self.dial_next(id, now),
            Action::Relay(first) => {
                connection.up = Flow::starting_with(first);
                connection.mode = Mode::Relaying;
                self.enqueue(id);
            }
            Action::EndWait(outcome) => {
                self.stats.waited(outcome);
                self.end_wait(id);
            }
            Action::EndBackend => {
                if let Some(backend) = &connection.backend {
                    self.machine.end(&backend.socket);
                }
            }
            // A FIN would tell the client that it has got everything.
            Action::EndClient if connection.down.held() > 0 => connection.reset_client = true,
            Action::EndClient => {
                if let Some(client) = &connection.client {
                    self.machine.end(&client.socket);
                }
            }
            Action::DropClientData => {
                connection.mode = Mode::Lingering;
                self.enqueue(id);
            }
            Action::CloseBackend => self.retire_backend(id, now),
            Action::DropBackendData => {
                connection.up.finished = true;
                self.pipes.take_back(connection.up.drop_all());
                self.pipes.take_back(connection.down.drop_all());
                self.enqueue(id);
            }
            Action::CancelQuery(packet) => {
                let place = (connection.backend_index, connection.address);
                self.cancel_query(packet, place);
            }
            // Closed by a failure that the session does not know of.
            Action::Deadline(_) if connection.mode == Mode::Closing => {}
            Action::Deadline(deadline) => {
                let at = deadline.map(|deadline| now + deadline);
                let old = std::mem::replace(&mut connection.deadline, at);
                self.timers.replace(id, old, at);
            }
            Action::Count(count) => self.count(id, count),
            Action::Close { reset_client } => self.close(id, reset_client),
        }
    }

    /// Tells the client why it is not served. Returns whether it can be closed at
    /// once, as PostgreSQL does: everything it sent was read, and its protocol
    /// has it wait for an answer. Otherwise what it still sends would be answered
    /// with RST, which could overtake the message.
    fn refuse(&mut self, id: u32, refusal: &Refusal) -> bool {
        let connection = &mut self.connections[id as usize];
        let is_first_answer = connection.backend.is_none();
        connection.mode = Mode::Lingering;
        let Some(client) = &connection.client else {
            return false;
        };
        // The FIN rides on the segment of the message. A client that takes
        // neither is lost, and a poll will say so.
        let bytes = refusal.encode();
        let sent = self.machine.send(&client.socket, &bytes, true);
        let is_told = matches!(sent, Ok(count) if count == bytes.len());
        if is_told && is_first_answer && client.poll == PollState::Idle && !client.readable {
            // Its close ends its being pending, too.
            return true;
        }
        // What it has sent is to be dropped. A poll of one report would tell;
        // one of changes may have told before.
        let drops = client.poll == PollState::Changes;
        self.has_spoken(id);
        if is_first_answer {
            self.give_backend_fd(id);
        }
        if let Some(client) = &self.connections[id as usize].client {
            self.machine.end(&client.socket);
        }
        if drops {
            self.enqueue(id);
        }
        false
    }

    fn count(&mut self, id: u32, count: Count) {
        let connection = &self.connections[id as usize];
        let backend = usize::from(connection.backend_index);
        match count {
            Count::Rejected(reason) => {
                self.stats
                    .rejected(usize::from(connection.listener), reason);
            }
            Count::StartupFailed(failure) => {
                self.stats.startup_failed(failure);
                if tracing::enabled!(tracing::Level::DEBUG) {
                    let source = self.source(id);
                    tracing::debug!(%source, reason = failure.label(), "no valid startup");
                }
            }
            Count::ConnectFailed(failure) => {
                self.stats.connect_failed(backend, failure);
                let backend = &self.config.backends[backend];
                tracing::debug!(
                    backend = backend.name,
                    reason = failure.label(),
                    "the backend cannot be reached"
                );
            }
            // Those that gate sends by itself are not a client's.
            Count::Cancel(outcome) => {
                if connection.client.is_some() {
                    self.stats.cancelled(outcome);
                }
            }
            Count::Closed(reason) => self.stats.closed(reason),
        }
    }

    /// Has a socket's readiness reported, as the connection's mode needs it. A
    /// connection that is refused never pays for a poll of every change, which
    /// would have to be cancelled.
    pub(super) fn watch(&mut self, id: u32, kind: Kind) {
        let connection = &mut self.connections[id as usize];
        let watch = match connection.mode {
            Mode::Startup | Mode::Lingering => Watch::Once,
            Mode::Waiting | Mode::Dialing | Mode::Relaying => Watch::Changes,
            // The kernel's answer comes at once.
            Mode::Admitting | Mode::Closing => return,
        };
        let key = Key::new(kind, id, connection.generation);
        let Some(side) = connection.side(kind) else {
            return;
        };
        if side.poll != PollState::Idle || side.retired {
            return;
        }
        match self.machine.poll(&side.socket, watch, key) {
            Ok(()) => {
                side.poll = match watch {
                    Watch::Once => PollState::Once,
                    Watch::Changes => PollState::Changes,
                };
            }
            Err(error) => {
                tracing::error!(%error, "a socket cannot be polled");
                self.close(id, true);
            }
        }
    }
}
