//! Admission: the ledger is asked, the kernel answers.

use std::os::fd::AsFd;
use std::time::Instant;

use gate_common::errno::AdmitErrno;

use super::Worker;
use super::connection::Mode;
use super::machine::{Key, Kind, Machine, Submitted};
use crate::ledger::{Applicant, STALE_RETRIES, Step};
use crate::proto::first_packet::Identity;
use crate::session::event::Input;
use crate::session::outcome::Reason;

impl<M: Machine> Worker<M> {
    /// Asks the ledger. `None`: the kernel's answer comes with its completion.
    pub(super) fn admit(&mut self, id: u32, who: &Identity) -> Option<Result<(), Reason>> {
        self.pending.remove(id);
        let connection = &mut self.connections[id as usize];
        connection.pending = false;
        connection.mode = Mode::Admitting;
        connection.asked = 0;
        connection.backend_index = match &who.database {
            Some(database) => self.config.databases.get(database).copied().unwrap_or(0) as u16,
            None => 0,
        };
        self.ask(id, who)
    }

    fn ask(&mut self, id: u32, who: &Identity) -> Option<Result<(), Reason>> {
        let connection = &mut self.connections[id as usize];
        let (Some(client), Some(entry)) = (&connection.client, &connection.entry) else {
            return Some(Err(Reason::MaxConnections));
        };
        let backend = &self.config.backends[usize::from(connection.backend_index)];
        let applicant = applicant(who, &backend.name);
        loop {
            let request = match self.state.ledger.admit(&mut self.names, entry, &applicant) {
                Step::Decided(verdict) => break Some(verdict),
                Step::Ask(request) => request,
            };
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
        if connection.mode == Mode::Closing {
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
            self.feed(key.index, Input::Admission(verdict), now);
            self.watch(key.index, Kind::Client);
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
