//! From the first byte to the backend's connection.

use std::sync::Arc;

use super::{Phase, Session};
use crate::proto::first_packet::{self, FirstPacket, Identity, Invalid};
use crate::proto::refusal::Refusal;
use crate::session::event::{Action, Count, Input};
use crate::session::outcome::{CloseReason, ConnectFailure, Reason, StartupFailure, WaitOutcome};

/// Answer to SSLRequest and GSSENCRequest: not here.
const NOT_SUPPORTED: u8 = b'N';

impl Session {
    pub(super) fn in_startup(&mut self, input: Input<'_>, out: &mut Vec<Action>) {
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

    pub(super) fn in_admission(&mut self, input: Input<'_>, out: &mut Vec<Action>) {
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

    pub(super) fn dial(&mut self, out: &mut Vec<Action>) {
        self.phase = Phase::Dialing;
        out.push(Action::Deadline(Some(self.deadlines.connect)));
        out.push(Action::Dial);
    }

    pub(super) fn in_waiting(&mut self, reason: Reason, input: Input<'_>, out: &mut Vec<Action>) {
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

    pub(super) fn in_dialing(&mut self, input: Input<'_>, out: &mut Vec<Action>) {
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
}
