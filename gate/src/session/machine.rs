//! The session machine.

use std::sync::Arc;
use std::time::Duration;

use super::event::{Action, Count, Deadlines, Input, LINGER, OVER_STARTUP};
use super::outcome::{
    CancelOutcome, CloseReason, ConnectFailure, Reason, SessionState, StartupFailure, WaitOutcome,
};
use crate::proto::backend::{BackendKey, LoginScanner};
use crate::proto::first_packet::{self, FirstPacket, Identity, Invalid, Negotiated};
use crate::proto::refusal::Refusal;

/// Answer to SSLRequest and GSSENCRequest: not here.
const NOT_SUPPORTED: u8 = b'N';

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

    fn in_startup(&mut self, input: Input<'_>, out: &mut Vec<Action>) {
        let count = match input {
            Input::ClientData(bytes) => {
                self.opening().first.extend_from_slice(bytes);
                return self.read_first(out);
            }
            Input::ClientEnded | Input::ClientLost => {
                Count::StartupFailed(StartupFailure::AbandonedStartup)
            }
            Input::DeadlinePassed => Count::StartupFailed(StartupFailure::StartupTimeout),
            Input::Evict => Count::Rejected(Reason::MaxPending),
            Input::Stop => Count::Rejected(Reason::Draining),
            _ => return,
        };
        self.close_counted(count, out);
    }

    /// Reads as many first packets as have come.
    fn read_first(&mut self, out: &mut Vec<Action>) {
        loop {
            let opening = self.opening();
            match first_packet::parse(&opening.first, opening.negotiated) {
                FirstPacket::Incomplete => return,
                FirstPacket::SslRequest { length } => {
                    opening.negotiated.ssl = true;
                    if !self.decline(length, Refusal::UnencryptedAfterSsl, out) {
                        return;
                    }
                }
                FirstPacket::GssencRequest { length } => {
                    opening.negotiated.gssenc = true;
                    if !self.decline(length, Refusal::UnencryptedAfterGssenc, out) {
                        return;
                    }
                }
                FirstPacket::Cancel { length } => {
                    opening.first.truncate(length);
                    self.phase = Phase::CancelDialing;
                    out.push(Action::Deadline(Some(self.deadlines.cancel)));
                    return out.push(Action::Dial);
                }
                FirstPacket::Startup { who, .. } => return self.ask(who, out),
                FirstPacket::Invalid(Invalid::Silent(_)) => {
                    let count = Count::StartupFailed(StartupFailure::BadStartup);
                    return self.close_counted(count, out);
                }
                FirstPacket::Invalid(Invalid::Refused(refusal)) => {
                    out.push(Action::Count(Count::StartupFailed(
                        StartupFailure::BadStartup,
                    )));
                    return self.refuse(refusal, out);
                }
            }
        }
    }

    /// Answers an encryption request with no. Bytes that came behind it were
    /// never encrypted and may be an attacker's: they are not read as a startup
    /// packet. Returns whether the session goes on.
    fn decline(&mut self, length: usize, injected: Refusal, out: &mut Vec<Action>) -> bool {
        out.push(Action::Reply(NOT_SUPPORTED));
        let first = &mut self.opening().first;
        if first.len() > length {
            out.push(Action::Count(Count::StartupFailed(
                StartupFailure::BadStartup,
            )));
            self.refuse(injected, out);
            return false;
        }
        first.clear();
        true
    }

    fn ask(&mut self, who: Identity, out: &mut Vec<Action>) {
        let who = Arc::new(who);
        self.identity = Some(who.clone());
        if let Some(reason) = self.doomed {
            return self.reject(reason, out);
        }
        self.phase = Phase::Admission;
        out.push(Action::Admit(who));
    }

    fn in_admission(&mut self, input: Input<'_>, out: &mut Vec<Action>) {
        match (input, self.doomed) {
            // What came up while the ledger was asked.
            (Input::Stop, _) => self.doom(Reason::Draining),
            (Input::Admission(Ok(())), Some(_)) => {
                out.push(Action::Count(Count::Closed(CloseReason::Drained)));
                self.refuse(Refusal::ShuttingDown, out);
            }
            (Input::Wait { .. }, Some(reason)) => {
                out.push(Action::EndWait(WaitOutcome::Refused));
                self.reject(reason, out);
            }
            (Input::Admission(Ok(())), None) => self.dial(out),
            (Input::Admission(Err(reason)), _) => self.reject(reason, out),
            (Input::Wait { wait, reason }, None) => {
                self.phase = Phase::Waiting(reason);
                out.push(Action::Deadline(Some(wait)));
            }
            _ => {}
        }
    }

    fn dial(&mut self, out: &mut Vec<Action>) {
        self.phase = Phase::Dialing;
        out.push(Action::Deadline(Some(self.deadlines.connect)));
        out.push(Action::Dial);
    }

    fn in_waiting(&mut self, reason: Reason, input: Input<'_>, out: &mut Vec<Action>) {
        let refused_for = match (input, self.doomed) {
            (Input::Turn, Some(doom)) => doom,
            (Input::DeadlinePassed, _) => reason,
            (Input::Stop, _) => Reason::Draining,
            (Input::Turn, None) => {
                return out.extend(self.identity.clone().map(Action::Admit));
            }
            (Input::Admission(Ok(())), _) => {
                out.push(Action::EndWait(WaitOutcome::Admitted));
                return self.dial(out);
            }
            // It asked and was not admitted: that is its outcome, though it did
            // not stay to hear it.
            (Input::ClientEnded | Input::ClientLost, _) => {
                out.push(Action::EndWait(WaitOutcome::Left));
                return self.close_counted(Count::Rejected(reason), out);
            }
            _ => return,
        };
        out.push(Action::EndWait(WaitOutcome::Refused));
        self.reject(refused_for, out);
    }

    fn in_dialing(&mut self, input: Input<'_>, out: &mut Vec<Action>) {
        let failure = match input {
            Input::Connected => {
                self.phase = Phase::Login;
                out.push(Action::Deadline(Some(self.deadlines.auth)));
                return out.push(Action::Relay(self.take_first()));
            }
            Input::AddressFailed(failure) => {
                out.push(Action::Count(Count::ConnectFailed(failure)));
                out.push(Action::Deadline(Some(self.deadlines.connect)));
                return out.push(Action::DialNext);
            }
            Input::ConnectFailed(failure) => failure,
            Input::DeadlinePassed => ConnectFailure::Timeout,
            Input::ClientEnded | Input::ClientLost => {
                return self.close_counted(Count::Closed(CloseReason::ClientLeftDial), out);
            }
            Input::Stop => return self.refuse_stopping(out),
            _ => return,
        };
        out.push(Action::Count(Count::ConnectFailed(failure)));
        out.push(Action::Count(Count::Closed(CloseReason::ConnectFailed)));
        out.push(Action::CloseBackend);
        self.refuse(Refusal::NotAccepting, out);
    }

    fn in_relay(&mut self, input: Input<'_>, out: &mut Vec<Action>) {
        let logging_in = self.phase == Phase::Login;
        match input {
            Input::BackendData(bytes) if logging_in => self.watch_login(bytes, out),
            Input::ClientEnded if !self.client_ended => {
                // A half-close: the backend may still have much to say, and
                // the slot is held until it has.
                self.client_ended = true;
                out.push(Action::EndBackend);
                if !logging_in {
                    out.push(self.quiet_deadline());
                }
            }
            Input::ClientLost => self.abandon(CloseReason::ClientReset, out),
            // A balancer in front of a dead server accepts and closes: a bare
            // FIN would make pools connect again at once.
            Input::BackendEnded | Input::BackendLost if logging_in && !self.backend_spoke => {
                self.refuse_unanswered(CloseReason::LoginFailed, out);
            }
            Input::DeadlinePassed if logging_in && !self.backend_spoke => {
                self.refuse_unanswered(CloseReason::AuthTimeout, out);
            }
            Input::BackendEnded => {
                let reason = match (logging_in, self.client_ended) {
                    (_, true) => CloseReason::ClientClosed,
                    (true, false) => CloseReason::LoginFailed,
                    (false, false) => CloseReason::BackendClosed,
                };
                out.push(Action::Count(Count::Closed(reason)));
                if self.client_ended {
                    return self.close(false, out);
                }
                out.push(Action::CloseBackend);
                out.push(Action::EndClient);
                out.push(Action::DropClientData);
                self.linger(out);
            }
            Input::BackendLost => {
                let reason = if logging_in {
                    CloseReason::LoginFailed
                } else {
                    CloseReason::BackendReset
                };
                out.push(Action::Count(Count::Closed(reason)));
                self.close(true, out);
            }
            Input::DeadlinePassed => {
                // The client has had its time, but the backend may be at work.
                let reason = match (logging_in, self.client_ended) {
                    (true, _) => CloseReason::AuthTimeout,
                    (false, false) => CloseReason::IdleTimeout,
                    (false, true) => CloseReason::HalfCloseTimeout,
                };
                out.push(Action::EndClient);
                self.abandon(reason, out);
            }
            Input::Stop if !self.backend_spoke => self.refuse_stopping(out),
            Input::Stop => self.close_counted(Count::Closed(CloseReason::Drained), out),
            _ => {}
        }
    }

    /// The deadline of an established session, counted from the last byte.
    fn quiet_deadline(&self) -> Action {
        let quiet = self.quiet_time(&self.deadlines);
        Action::Deadline(quiet.filter(|quiet| !quiet.is_zero()))
    }

    fn refuse_stopping(&mut self, out: &mut Vec<Action>) {
        out.push(Action::Count(Count::Closed(CloseReason::Drained)));
        out.push(Action::CloseBackend);
        self.refuse(Refusal::ShuttingDown, out);
    }

    fn refuse_unanswered(&mut self, reason: CloseReason, out: &mut Vec<Action>) {
        out.push(Action::Count(Count::Closed(reason)));
        out.push(Action::CloseBackend);
        self.refuse(Refusal::NotAccepting, out);
    }

    fn watch_login(&mut self, bytes: &[u8], out: &mut Vec<Action>) {
        self.backend_spoke = true;
        let login = &mut self.opening().login;
        if login.scan(bytes).ready {
            self.key = login.key();
            self.opening = None;
            self.phase = Phase::Relay;
            out.push(self.quiet_deadline());
        }
    }

    /// The client is gone but its backend may be at work: the slot stays taken
    /// until the backend has ended, or reconnecting in a loop would outrun the
    /// limit.
    fn abandon(&mut self, reason: CloseReason, out: &mut Vec<Action>) {
        self.phase = Phase::Abandoned;
        self.abandoned = reason;
        out.push(Action::DropBackendData);
        let opening = self.opening.take();
        let of_login = || opening.and_then(|opening| opening.login.key());
        if let Some(key) = self.key.take().or_else(of_login) {
            out.push(Action::CancelQuery(key.cancel_request()));
        }
        if !self.client_ended {
            self.client_ended = true;
            out.push(Action::EndBackend);
        }
        out.push(Action::Deadline(Some(self.deadlines.abandoned)));
    }

    fn in_abandoned(&mut self, input: Input<'_>, out: &mut Vec<Action>) {
        let reason = match input {
            Input::BackendEnded | Input::BackendLost => self.abandoned,
            Input::DeadlinePassed => CloseReason::AbandonedTimeout,
            Input::Stop => CloseReason::Drained,
            _ => return,
        };
        self.close_counted(Count::Closed(reason), out);
    }

    fn in_cancel(&mut self, input: Input<'_>, out: &mut Vec<Action>) {
        let outcome = match input {
            Input::Connected if self.phase == Phase::CancelDialing => {
                self.phase = Phase::Cancelling;
                return out.push(Action::Relay(self.take_first()));
            }
            // The backend's connection survives its client here: the request
            // is on its way, and the client may rightly not wait for the end.
            Input::ClientEnded | Input::ClientLost => {
                self.client_ended = true;
                return;
            }
            Input::BackendEnded | Input::BackendLost => CancelOutcome::Forwarded,
            Input::ConnectFailed(failure) => {
                out.push(Action::Count(Count::ConnectFailed(failure)));
                CancelOutcome::Failed
            }
            Input::DeadlinePassed => CancelOutcome::TimedOut,
            Input::Stop => CancelOutcome::Abandoned,
            _ => return,
        };
        self.close_counted(Count::Cancel(outcome), out);
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
#[path = "machine_tests.rs"]
mod tests;
