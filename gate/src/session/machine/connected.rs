//! From the backend's connection to the end.

use super::{Phase, Session};
use crate::proto::refusal::Refusal;
use crate::session::event::{Action, Count, Input};
use crate::session::outcome::{CancelOutcome, CloseReason};

impl Session {
    pub(super) fn in_relay(&mut self, input: Input<'_>, out: &mut Vec<Action>) {
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
            Input::ClientLost => {
                let reason = if self.is_login_refused() {
                    CloseReason::LoginFailed
                } else {
                    CloseReason::ClientReset
                };
                self.abandon(reason, out);
            }
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
                    // Whichever side is the first to close then.
                    _ if self.is_login_refused() => CloseReason::LoginFailed,
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

    /// Whether the server has said why it lets nobody in.
    fn is_login_refused(&self) -> bool {
        let login = self.opening.as_ref().map(|opening| opening.login.seen());
        login.is_some_and(|seen| seen.error)
    }

    /// The deadline of an established session, counted from the last byte.
    pub(super) fn quiet_deadline(&self) -> Action {
        let quiet = self.quiet_time(&self.deadlines);
        Action::Deadline(quiet.filter(|quiet| !quiet.is_zero()))
    }

    pub(super) fn refuse_stopping(&mut self, out: &mut Vec<Action>) {
        out.push(Action::Count(Count::Closed(CloseReason::Drained)));
        out.push(Action::CloseBackend);
        self.refuse(Refusal::ShuttingDown, out);
    }

    pub(super) fn refuse_unanswered(&mut self, reason: CloseReason, out: &mut Vec<Action>) {
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
    pub(super) fn abandon(&mut self, reason: CloseReason, out: &mut Vec<Action>) {
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

    pub(super) fn in_abandoned(&mut self, input: Input<'_>, out: &mut Vec<Action>) {
        let reason = match input {
            Input::BackendEnded | Input::BackendLost => self.abandoned,
            Input::DeadlinePassed => CloseReason::AbandonedTimeout,
            Input::Stop => CloseReason::Drained,
            _ => return,
        };
        self.close_counted(Count::Closed(reason), out);
    }

    pub(super) fn in_cancel(&mut self, input: Input<'_>, out: &mut Vec<Action>) {
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
}
