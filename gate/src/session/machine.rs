//! The session machine: its state, and what every phase needs.

mod connected;
mod opening;

use std::sync::Arc;
use std::time::Duration;

use super::event::{Action, Count, Deadlines, Input, LINGER, OVER_STARTUP};
use super::outcome::{CloseReason, Reason, SessionState};
use crate::proto::backend::{BackendKey, LoginScanner};
use crate::proto::first_packet::{Identity, Negotiated};
use crate::proto::refusal::Refusal;

/// See the module. Small, for an idle one stays as it is: what only the
/// beginning needs is given up at its end.
#[derive(Debug)]
pub struct Session {
    phase: Phase,
    /// Refused whatever it says.
    doomed: Option<Reason>,
    /// The backend has sent at least one byte, which went to the client.
    backend_spoke: bool,
    client_ended: bool,
    /// Why [`Phase::Abandoned`] was entered.
    abandoned: CloseReason,
    deadlines: Arc<Deadlines>,
    identity: Option<Arc<Identity>>,
    /// None once the login is over.
    opening: Option<Box<Opening>>,
    /// Of the backend, once the login is over.
    key: Option<BackendKey>,
}

/// What a session needs until its login is over.
#[derive(Debug, Default)]
struct Opening {
    /// The startup packet so far, with what came behind it.
    first: Vec<u8>,
    negotiated: Negotiated,
    login: LoginScanner,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Waits for a valid startup packet.
    Startup,
    /// Waits for the ledger.
    Admission,
    /// Waits in the queue for a place under the limit that refused it.
    Waiting(Reason),
    /// Waits for the backend's connection.
    Dialing,
    /// Relays, and watches the backend for ReadyForQuery.
    Login,
    /// Relays.
    Relay,
    /// A CancelRequest: waits for the backend's connection.
    CancelDialing,
    /// A CancelRequest: waits for the backend to close.
    Cancelling,
    /// The client is gone, the backend is not.
    Abandoned,
    /// The client has been sent FIN; waits for its own.
    Lingering,
    /// [`Action::Close`] was given.
    Closed,
}

impl Session {
    /// A session of a client that has just been accepted. With `doomed` it is
    /// refused for that reason once it has said who it is.
    #[must_use]
    pub fn new(deadlines: impl Into<Arc<Deadlines>>, doomed: Option<Reason>) -> Self {
        Self {
            phase: Phase::Startup,
            doomed,
            backend_spoke: false,
            client_ended: false,
            abandoned: CloseReason::ClientReset,
            deadlines: deadlines.into(),
            identity: None,
            opening: Some(Box::default()),
            key: None,
        }
    }

    /// A session without a client that hands a CancelRequest to the backend.
    #[must_use]
    pub fn cancel(deadlines: impl Into<Arc<Deadlines>>, packet: Vec<u8>) -> Self {
        let opening = Opening {
            first: packet,
            ..Opening::default()
        };
        Self {
            phase: Phase::CancelDialing,
            opening: Some(Box::new(opening)),
            client_ended: true,
            ..Self::new(deadlines, None)
        }
    }

    /// The first actions of a new session.
    pub fn start(&mut self, out: &mut Vec<Action>) {
        let deadline = match self.phase {
            Phase::CancelDialing => {
                out.push(Action::Dial);
                self.deadlines.cancel
            }
            _ if self.doomed.is_some() => OVER_STARTUP.min(self.deadlines.startup),
            _ => self.deadlines.startup,
        };
        out.push(Action::Deadline(Some(deadline)));
    }

    /// Refuses this session, once it has said who it is, for a reason that
    /// came up after it was accepted.
    pub fn doom(&mut self, reason: Reason) {
        self.doomed.get_or_insert(reason);
    }

    /// What it does now.
    #[must_use]
    pub fn state(&self) -> SessionState {
        match self.phase {
            Phase::Startup => SessionState::Startup,
            Phase::Admission | Phase::Waiting(_) => SessionState::Waiting,
            Phase::Dialing => SessionState::Connecting,
            Phase::Login => SessionState::Login,
            Phase::Relay if self.client_ended => SessionState::HalfClosed,
            Phase::Relay => SessionState::Active,
            Phase::CancelDialing | Phase::Cancelling => SessionState::Cancel,
            Phase::Abandoned => SessionState::Abandoned,
            Phase::Lingering | Phase::Closed => SessionState::Ending,
        }
    }

    /// Whether a valid first packet is still missing.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.phase == Phase::Startup
    }

    /// Whether the ledger's answer is still wanted.
    #[must_use]
    pub fn awaits_admission(&self) -> bool {
        matches!(self.phase, Phase::Admission | Phase::Waiting(_))
    }

    /// Whether the client waits in the queue: a refusal leaves it there.
    #[must_use]
    pub fn is_waiting(&self) -> bool {
        matches!(self.phase, Phase::Waiting(_))
    }

    /// Whether the backend's bytes are to be shown before they are passed on.
    #[must_use]
    pub fn watches_backend(&self) -> bool {
        self.phase == Phase::Login
    }

    /// How long the session may be silent, if the deadline in force is about
    /// that; zero for ever.
    #[must_use]
    pub fn quiet_time(&self, deadlines: &Deadlines) -> Option<Duration> {
        (self.phase == Phase::Relay).then_some(if self.client_ended {
            deadlines.half_close
        } else {
            deadlines.idle
        })
    }

    /// Whether the deadline in force is that of one address of a backend.
    #[must_use]
    pub fn is_dialing(&self) -> bool {
        self.phase == Phase::Dialing
    }

    /// Whom the startup packet named.
    #[must_use]
    pub fn identity(&self) -> Option<&Arc<Identity>> {
        self.identity.as_ref()
    }

    /// Shares the memory of an equal identity with other sessions.
    pub fn share_identity(&mut self, shared: Arc<Identity>) {
        if self.identity.as_ref() == Some(&shared) {
            self.identity = Some(shared);
        }
    }

    /// The CancelRequest that is to be dialled for.
    #[must_use]
    pub fn cancel_packet(&self) -> Option<Vec<u8>> {
        let opening = self.opening.as_ref()?;
        (self.phase == Phase::CancelDialing).then(|| opening.first.clone())
    }

    /// One step. `out` receives what is to be done, in order.
    pub fn handle(&mut self, input: Input<'_>, out: &mut Vec<Action>) {
        match self.phase {
            Phase::Startup => self.in_startup(input, out),
            Phase::Admission => self.in_admission(input, out),
            Phase::Waiting(reason) => self.in_waiting(reason, input, out),
            Phase::Dialing => self.in_dialing(input, out),
            Phase::Login | Phase::Relay => self.in_relay(input, out),
            Phase::CancelDialing | Phase::Cancelling => self.in_cancel(input, out),
            Phase::Abandoned => self.in_abandoned(input, out),
            Phase::Lingering => self.in_lingering(input, out),
            Phase::Closed => {}
        }
    }

    fn opening(&mut self) -> &mut Opening {
        self.opening.get_or_insert_default()
    }

    fn take_first(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.opening().first)
    }

    fn in_lingering(&mut self, input: Input<'_>, out: &mut Vec<Action>) {
        if let Input::ClientEnded | Input::ClientLost | Input::DeadlinePassed | Input::Stop = input
        {
            self.close(false, out);
        }
    }

    /// Refuses for a limit or for the drain.
    fn reject(&mut self, reason: Reason, out: &mut Vec<Action>) {
        out.push(Action::Count(Count::Rejected(reason)));
        let refusal = match (reason, self.identity.as_deref()) {
            (Reason::User, Some(who)) => Refusal::TooManyForRole(who.user.clone()),
            (
                Reason::Database,
                Some(Identity {
                    database: Some(database),
                    ..
                }),
            ) => Refusal::TooManyForDatabase(database.clone()),
            (Reason::Draining, _) => Refusal::ShuttingDown,
            _ => Refusal::TooManyClients,
        };
        self.refuse(refusal, out);
    }

    fn refuse(&mut self, refusal: Refusal, out: &mut Vec<Action>) {
        self.opening = None;
        out.push(Action::Refuse(refusal));
        self.linger(out);
    }

    fn linger(&mut self, out: &mut Vec<Action>) {
        self.phase = Phase::Lingering;
        out.push(Action::Deadline(Some(LINGER)));
    }

    fn close_counted(&mut self, count: Count, out: &mut Vec<Action>) {
        out.push(Action::Count(count));
        self.close(false, out);
    }

    fn close(&mut self, reset_client: bool, out: &mut Vec<Action>) {
        self.phase = Phase::Closed;
        out.push(Action::Deadline(None));
        out.push(Action::Close { reset_client });
    }
}

#[cfg(test)]
mod tests;
