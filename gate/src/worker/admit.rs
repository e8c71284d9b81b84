//! Admission: the ledger is asked, the kernel answers.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use gate_common::errno::AdmitErrno;

use super::Worker;
use super::connection::Mode;
use super::machine::{Key, Kind, Machine, Submitted};
use crate::admission::{Join, Ticket, WaitsFor};
use crate::ledger::{Applicant, STALE_RETRIES, Step};
use crate::proto::first_packet::Identity;
use crate::session::event::Input;
use crate::session::outcome::Reason;
use crate::waiting::{self, LOOK_AGAIN};

/// What a session is told that asked for its slots.
#[derive(Clone, Copy, Debug)]
pub enum Answer {
    /// The ledger's.
    Verdict(Result<(), Reason>),
    /// It waits.
    Wait {
        /// For so long.
        wait: Duration,
        /// Why it was refused.
        reason: Reason,
        /// It is first of its line, and asks once more before it sleeps.
        is_head: bool,
    },
}

/// What a worker knows of its clients that wait for a slot.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    /// How many they are.
    pub count: usize,
    /// When they ask again.
    pub look_at: Option<Instant>,
}

impl Answer {
    /// As the session hears it.
    pub fn inputs(self) -> impl Iterator<Item = Input<'static>> {
        let (first, second) = match self {
            Self::Verdict(verdict) => (Input::Admission(verdict), None),
            Self::Wait {
                wait,
                reason,
                is_head,
            } => (Input::Wait { wait, reason }, is_head.then_some(Input::Turn)),
        };
        std::iter::once(first).chain(second)
    }
}

impl<M: Machine> Worker<M> {
    /// A session asks for its slots. Returns what it is to be told; nothing if
    /// the kernel's answer comes with a completion.
    pub(super) fn admit(&mut self, id: u32, who: &Identity, now: Instant) -> Option<Answer> {
        self.pending.remove(id);
        let connection = &mut self.connections[id as usize];
        connection.asked = 0;
        if !connection.session.is_waiting() {
            connection.active = now;
            connection.backend_index = match &who.database {
                Some(database) => self.config.databases.get(database).copied().unwrap_or(0) as u16,
                None => 0,
            };
            // Behind others of its user it does not ask: first come, first
            // served.
            if let Some(limit) = self.state.waiting.line_of(&who.user) {
                return Some(self.join(id, who, limit));
            }
        }
        self.connections[id as usize].mode = Mode::Admitting;
        let verdict = self.ask(id, who)?;
        Some(self.answer(id, who, verdict))
    }

    /// What a verdict means for the session: a refusal may be worth a wait.
    fn answer(&mut self, id: u32, who: &Identity, verdict: Result<(), Reason>) -> Answer {
        let connection = &mut self.connections[id as usize];
        connection.admitted = verdict.is_ok();
        if connection.session.is_waiting() {
            connection.mode = Mode::Waiting;
            return Answer::Verdict(verdict);
        }
        let took = self
            .machine
            .now()
            .saturating_duration_since(connection.active);
        self.stats.admission_took(took);
        let backend = &self.config.backends[usize::from(connection.backend_index)];
        let limit = match verdict {
            Ok(()) => None,
            Err(reason) => waiting::waits_for(reason, &applicant(who, &backend.name)),
        };
        match limit {
            Some(limit) => self.join(id, who, limit),
            None => Answer::Verdict(verdict),
        }
    }

    /// Joins the line of its user, if this limit lets clients wait.
    fn join(&mut self, id: u32, who: &Identity, limit: WaitsFor) -> Answer {
        let reason = waiting::reason_of(&limit);
        let policy = self.config.limits.waits.policy(&limit);
        if !policy.waits() {
            return Answer::Verdict(Err(reason));
        }
        let ticket = self.ticket(id);
        let waiting = &self.state.waiting;
        let is_head = match waiting.join(ticket, &who.user, limit, policy.max_waiting) {
            Join::TooMany => return Answer::Verdict(Err(reason)),
            Join::Head => true,
            Join::Behind => false,
        };
        self.has_spoken(id);
        let connection = &mut self.connections[id as usize];
        connection.waits = true;
        connection.mode = Mode::Waiting;
        self.waiters.count += 1;
        Answer::Wait {
            wait: policy.wait,
            reason,
            is_head,
        }
    }

    /// The session waits no more.
    pub(super) fn end_wait(&mut self, id: u32) {
        if std::mem::take(&mut self.connections[id as usize].waits) {
            self.waiters.count -= 1;
            if self.waiters.count == 0 {
                // A look that nobody waits for would never be taken.
                self.waiters.look_at = None;
            }
            self.state.end_wait(self.ticket(id));
        }
    }

    /// Lets those ask whose turn it is.
    pub(super) fn offer_turns(&mut self, now: Instant) {
        self.waiters.look_at = (self.waiters.count > 0).then(|| now + LOOK_AGAIN);
        for ticket in self.state.waiting.ready(self.id as u16) {
            let connection = self.connections.get(ticket.id as usize);
            if connection.is_some_and(|connection| {
                connection.generation == ticket.generation && connection.mode == Mode::Waiting
            }) {
                self.feed(ticket.id, Input::Turn, now);
            }
        }
    }

    fn ticket(&self, id: u32) -> Ticket {
        Ticket {
            worker: self.id as u16,
            id,
            generation: self.connections[id as usize].generation,
        }
    }

    fn ask(&mut self, id: u32, who: &Identity) -> Option<Result<(), Reason>> {
        let connection = &mut self.connections[id as usize];
        let (Some(client), Some(entry)) = (&connection.client, &connection.entry) else {
            return Some(Err(Reason::MaxConnections));
        };
        let backend = &self.config.backends[usize::from(connection.backend_index)];
        let applicant = applicant(who, &backend.name);
        loop {
            let step = self.state.ledger.admit(&mut self.names, entry, &applicant);
            let request = match step {
                Step::Refused(reason) => break Some(Err(reason)),
                Step::Decided(verdict) => {
                    connection.pending = false;
                    break Some(verdict);
                }
                Step::Ask(request) => request,
            };
            connection.pending = false;
            connection.asked += 1;
            let key = Key::new(Kind::Admit, id, connection.generation);
            let answer = match self.machine.admit(&client.socket, &request, key) {
                Ok(Submitted::InFlight) => {
                    connection.admitting = true;
                    break None;
                }
                Ok(Submitted::Answered(answer)) => answer,
                Err(error) => {
                    tracing::error!(%error, "an admission cannot be asked for");
                    break Some(Err(Reason::MaxConnections));
                }
            };
            let ledger = &self.state.ledger;
            let decided = ledger.answered(&mut self.names, &applicant, answer);
            if decided.is_some() || usize::from(connection.asked) >= STALE_RETRIES {
                break Some(decided.unwrap_or(Err(Reason::NamesFull)));
            }
        }
    }

    /// The kernel answered.
    pub(super) fn on_admitted(&mut self, key: Key, answer: Result<(), AdmitErrno>, now: Instant) {
        let Some(connection) = self.connections.get_mut(key.index as usize) else {
            return;
        };
        if Key::new(key.kind, key.index, connection.generation) != key {
            return;
        }
        connection.admitting = false;
        // Also if nobody wants it any more.
        connection.admitted = answer.is_ok();
        if connection.mode == Mode::Closing {
            return self.advance(key.index, now);
        }
        if !connection.session.awaits_admission() {
            // Refused meanwhile, by a deadline or a drain. What the kernel took
            // comes back with the close.
            return self.advance(key.index, now);
        }
        let Some(who) = connection.session.identity().cloned() else {
            return;
        };
        let backend = &self.config.backends[usize::from(connection.backend_index)];
        let applicant = applicant(&who, &backend.name);
        let ledger = &self.state.ledger;
        let verdict = match ledger.answered(&mut self.names, &applicant, answer) {
            None if usize::from(connection.asked) < STALE_RETRIES => self.ask(key.index, &who),
            None => Some(Err(Reason::NamesFull)),
            decided => decided,
        };
        if let Some(verdict) = verdict {
            let answer = self.answer(key.index, &who, verdict);
            for input in answer.inputs() {
                self.feed(key.index, input, now);
            }
            self.watch(key.index, Kind::Client);
            // It may have left meanwhile.
            self.advance(key.index, now);
        }
    }

    /// Takes a connection out of those that have not said what they want, if the
    /// ledger did not do so at its admission.
    pub(super) fn has_spoken(&mut self, id: u32) {
        self.pending.remove(id);
        let connection = &mut self.connections[id as usize];
        if std::mem::take(&mut connection.pending)
            && let (Some(client), Some(entry)) = (&connection.client, &connection.entry)
        {
            self.state.ledger.spoken(client.socket.as_fd(), entry);
        }
    }
}

fn applicant<'a>(who: &'a Identity, backend: &'a str) -> Applicant<'a> {
    Applicant {
        user: &who.user,
        database: who.database.as_deref(),
        backend: backend.as_bytes(),
    }
}
