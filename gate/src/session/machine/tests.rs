//! The session machine: the schedules that matter by name, with an invariant
//! check after each step.

use std::time::Duration;

use super::*;
use crate::session::event::{Action, CANCEL_AGAIN, Count, Deadlines, Input};
use crate::session::outcome::{CancelOutcome, ConnectFailure, WaitOutcome};

mod ends;
mod schedules;

const DEADLINES: Deadlines = Deadlines {
    startup: Duration::from_secs(15),
    connect: Duration::from_secs(5),
    auth: Duration::from_secs(60),
    cancel: Duration::from_secs(10),
    idle: Duration::ZERO,
    half_close: Duration::ZERO,
    abandoned: Duration::from_secs(60),
};

const SSL_REQUEST: &[u8] = &[0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];

fn startup_packet() -> Vec<u8> {
    let body = b"user\0app\0database\0prod\0\0";
    let mut packet = (body.len() as u32 + 8).to_be_bytes().to_vec();
    packet.extend_from_slice(&0x0003_0000_u32.to_be_bytes());
    packet.extend_from_slice(body);
    packet
}

fn cancel_packet() -> Vec<u8> {
    [16_u32, 80_877_102, 4711, 42]
        .into_iter()
        .flat_map(u32::to_be_bytes)
        .collect()
}

/// AuthenticationOk, BackendKeyData, ReadyForQuery.
fn login_bytes() -> Vec<u8> {
    let mut bytes = b"R\0\0\0\x08\0\0\0\0K\0\0\0\x0c".to_vec();
    bytes.extend_from_slice(&cancel_packet()[8..]);
    bytes.extend_from_slice(b"Z\0\0\0\x05I");
    bytes
}

/// What a worker would hold for the session, and what must never be.
struct Driver {
    session: Session,
    armed: bool,
    dialled: bool,
    connected: bool,
    relaying: bool,
    backend_spoke: bool,
    backend_closed: bool,
    client_told: bool,
    admitted: bool,
    /// A refusal of the ledger makes it wait.
    waits: bool,
    waiting: bool,
    closed: bool,
    ends: usize,
    backend_ended: usize,
    actions: Vec<Action>,
    refusal: Option<Refusal>,
}

impl Driver {
    fn new(doomed: Option<Reason>) -> Self {
        let mut driver = Self {
            session: Session::new(DEADLINES, doomed),
            armed: false,
            dialled: false,
            connected: false,
            relaying: false,
            backend_spoke: false,
            backend_closed: false,
            client_told: false,
            admitted: false,
            waits: false,
            waiting: false,
            closed: false,
            ends: 0,
            backend_ended: 0,
            actions: Vec::new(),
            refusal: None,
        };
        let mut out = Vec::new();
        driver.session.start(&mut out);
        driver.apply(out, Ok(()));
        driver
    }

    fn feed(&mut self, input: Input<'_>, ledger: Result<(), Reason>) {
        self.connected |= matches!(input, Input::Connected);
        self.backend_spoke |= matches!(input, Input::BackendData(_));
        let mut out = Vec::new();
        self.session.handle(input, &mut out);
        self.apply(out, ledger);
        self.check();
    }

    fn apply(&mut self, out: Vec<Action>, ledger: Result<(), Reason>) {
        for action in out {
            assert!(!self.closed, "{action:?} after Close");
            self.actions.push(action.clone());
            match action {
                Action::Admit(_) => {
                    assert!(!self.admitted && !self.dialled);
                    self.admitted = ledger.is_ok();
                    assert_eq!(self.waiting, self.session.is_waiting());
                    let answer = match ledger {
                        Err(reason) if self.waits && !self.waiting => {
                            self.waiting = true;
                            let wait = Duration::from_millis(200);
                            Input::Wait { wait, reason }
                        }
                        _ => Input::Admission(ledger),
                    };
                    self.feed(answer, ledger);
                }
                Action::EndWait(_) => {
                    assert!(self.waiting, "it does not wait");
                    self.waiting = false;
                }
                Action::Dial => {
                    assert!(!self.waiting && !self.dialled, "a second dial");
                    self.dialled = true;
                }
                Action::DialNext => {
                    assert!(self.dialled && !self.connected && self.armed);
                    assert!(!self.backend_closed);
                }
                Action::Relay(first) => {
                    assert!(self.connected && !self.relaying && !first.is_empty());
                    self.relaying = true;
                }
                Action::Refuse(refusal) => {
                    assert!(!self.client_told && !self.backend_spoke);
                    self.client_told = true;
                    self.refusal = Some(refusal);
                }
                Action::EndClient => {
                    assert!(!self.client_told && self.relaying);
                    self.client_told = true;
                }
                Action::EndBackend => {
                    assert!(self.relaying && !self.backend_closed);
                    self.backend_ended += 1;
                    assert_eq!(self.backend_ended, 1);
                }
                Action::CloseBackend => {
                    assert!(self.dialled && !self.backend_closed);
                    self.backend_closed = true;
                }
                Action::Deadline(deadline) => self.armed = deadline.is_some(),
                Action::Count(count) => self.count(count),
                Action::Close { .. } => self.closed = true,
                Action::DropClientData => assert!(self.client_told),
                Action::Reply(_) | Action::DropBackendData | Action::CancelQuery(_) => {}
            }
        }
    }

    fn count(&mut self, count: Count) {
        match count {
            Count::ConnectFailed(_) => assert!(self.dialled),
            Count::Closed(_) => {
                assert!(self.admitted, "a session that never was is not closed");
                self.ends += 1;
            }
            Count::Rejected(_) => {
                assert!(!self.admitted, "an admitted session is not rejected");
                self.ends += 1;
            }
            Count::StartupFailed(_) | Count::Cancel(_) => self.ends += 1,
        }
    }

    fn check(&self) {
        assert_eq!(self.waiting, self.session.is_waiting());
        assert!(self.ends <= 1, "two outcomes: {:?}", self.actions);
        if self.closed {
            assert_eq!(
                self.ends, 1,
                "closed without an outcome: {:?}",
                self.actions
            );
            assert!(!self.armed, "a deadline outlives its session");
            return;
        }
        // Whoever waits for a client or for a backend that may never answer
        // has a deadline; only an established relay may wait for good.
        let established = self.relaying && !self.client_told;
        assert!(self.armed || established, "{:?}", self.actions);
    }

    fn counts(&self) -> Vec<Count> {
        let counts = self.actions.iter().filter_map(|action| match action {
            Action::Count(count) => Some(*count),
            _ => None,
        });
        counts.collect()
    }

    fn has(&self, wanted: &Action) -> bool {
        self.actions.contains(wanted)
    }
}

fn established() -> Driver {
    let mut driver = Driver::new(None);
    driver.feed(Input::ClientData(&startup_packet()), Ok(()));
    driver.feed(Input::Connected, Ok(()));
    driver.feed(Input::BackendData(&login_bytes()), Ok(()));
    driver
}

#[test]
fn one_connection_from_startup_to_its_end() {
    let mut driver = Driver::new(None);
    for byte in [SSL_REQUEST, &startup_packet()].concat() {
        driver.feed(Input::ClientData(&[byte]), Ok(()));
    }
    assert!(driver.has(&Action::Reply(b'N')) && driver.has(&Action::Dial));
    driver.feed(Input::Connected, Ok(()));
    assert!(driver.has(&Action::Relay(startup_packet())));
    driver.feed(Input::BackendData(&login_bytes()), Ok(()));
    driver.feed(Input::ClientEnded, Ok(()));
    assert!(driver.has(&Action::EndBackend) && !driver.closed);
    driver.feed(Input::BackendEnded, Ok(()));
    assert!(driver.closed);
    assert_eq!(driver.counts(), [Count::Closed(CloseReason::ClientClosed)]);
}

#[test]
fn d3_bytes_behind_an_ssl_request_are_never_a_startup_packet() {
    let mut driver = Driver::new(None);
    let injected = [SSL_REQUEST, &startup_packet()].concat();
    driver.feed(Input::ClientData(&injected), Ok(()));
    assert_eq!(driver.refusal, Some(Refusal::UnencryptedAfterSsl));
    assert!(!driver.dialled && !driver.admitted);
}

#[test]
fn a_refused_client_learns_which_limit_and_lingers_until_it_closes() {
    for (reason, refusal) in [
        (Reason::MaxConnections, Refusal::TooManyClients),
        (Reason::User, Refusal::TooManyForRole(b"app".to_vec())),
        (
            Reason::Database,
            Refusal::TooManyForDatabase(b"prod".to_vec()),
        ),
        (Reason::Backend, Refusal::TooManyClients),
        (Reason::NamesFull, Refusal::TooManyClients),
    ] {
        let mut driver = Driver::new(None);
        driver.feed(Input::ClientData(&startup_packet()), Err(reason));
        assert_eq!(driver.refusal, Some(refusal));
        assert!(!driver.closed && !driver.dialled);
        driver.feed(Input::ClientEnded, Ok(()));
        assert!(driver.closed);
        assert_eq!(driver.counts(), [Count::Rejected(reason)]);
    }
}

#[test]
fn an_over_or_draining_client_is_refused_without_asking_the_ledger() {
    for (doom, refusal) in [
        (Reason::OverCeiling, Refusal::TooManyClients),
        (Reason::Draining, Refusal::ShuttingDown),
    ] {
        let mut driver = Driver::new(Some(doom));
        driver.feed(Input::ClientData(SSL_REQUEST), Ok(()));
        driver.feed(Input::ClientData(&startup_packet()), Ok(()));
        assert_eq!(driver.refusal, Some(refusal));
        assert!(!driver.admitted && !driver.dialled);
    }
}

#[test]
fn c1_a_cancel_request_needs_no_slot_even_over_the_ceiling() {
    let mut driver = Driver::new(Some(Reason::OverCeiling));
    driver.feed(
        Input::ClientData(&cancel_packet()),
        Err(Reason::MaxConnections),
    );
    driver.feed(Input::Connected, Ok(()));
    assert!(driver.has(&Action::Relay(cancel_packet())) && !driver.admitted);
    driver.feed(Input::ClientEnded, Ok(()));
    assert!(!driver.closed, "the request is on its way");
    driver.feed(Input::BackendEnded, Ok(()));
    assert!(driver.closed);
    assert_eq!(driver.counts(), [Count::Cancel(CancelOutcome::Forwarded)]);
}

#[test]
fn a_cancel_request_that_gate_sends_in_turn_closes_its_client() {
    let mut driver = Driver::new(None);
    driver.feed(Input::ClientData(&cancel_packet()), Ok(()));
    driver.feed(Input::CancelQueued, Ok(()));
    assert!(driver.closed);
    assert_eq!(driver.counts(), [Count::Cancel(CancelOutcome::Queued)]);
}

fn waiting() -> Driver {
    let mut driver = Driver::new(None);
    driver.waits = true;
    driver.feed(Input::ClientData(&startup_packet()), Err(Reason::User));
    assert!(driver.waiting && driver.refusal.is_none() && driver.counts().is_empty());
    let wait = Some(Duration::from_millis(200));
    assert_eq!(driver.actions.last(), Some(&Action::Deadline(wait)));
    driver
}

#[test]
fn k_a_client_that_waits_asks_at_its_turn_until_it_is_admitted() {
    let mut driver = waiting();
    let asked = |driver: &Driver| {
        let actions = driver.actions.iter();
        let asked = actions.filter(|action| matches!(action, Action::Admit(_)));
        asked.count()
    };
    driver.feed(Input::Turn, Err(Reason::MaxConnections));
    assert_eq!((driver.waiting, asked(&driver)), (true, 2));
    driver.feed(Input::Turn, Ok(()));
    assert!(driver.has(&Action::EndWait(WaitOutcome::Admitted)) && driver.dialled);
    driver.feed(Input::Turn, Ok(()));
    assert_eq!(asked(&driver), 3, "a late wake-up is nobody's turn");
    driver.feed(Input::Connected, Ok(()));
    assert!(driver.has(&Action::Relay(startup_packet())));
}

#[test]
fn k_a_wait_ends_once_whatever_ends_it() {
    let user = Refusal::TooManyForRole(b"app".to_vec());
    let table = [
        (
            Input::DeadlinePassed,
            WaitOutcome::Refused,
            Reason::User,
            Some(user),
        ),
        (
            Input::Stop,
            WaitOutcome::Refused,
            Reason::Draining,
            Some(Refusal::ShuttingDown),
        ),
        (Input::ClientEnded, WaitOutcome::Left, Reason::User, None),
        (Input::ClientLost, WaitOutcome::Left, Reason::User, None),
    ];
    for (input, outcome, reason, refusal) in table {
        let mut driver = waiting();
        // What refuses it meanwhile is not what it waits for.
        driver.feed(Input::Turn, Err(Reason::MaxConnections));
        driver.feed(input, Ok(()));
        assert!(driver.has(&Action::EndWait(outcome)), "{input:?}");
        assert_eq!(driver.refusal, refusal, "{input:?}");
        assert_eq!(driver.closed, outcome == WaitOutcome::Left, "{input:?}");
        driver.feed(Input::ClientEnded, Ok(()));
        assert!(driver.closed && !driver.dialled);
        assert_eq!(driver.counts(), [Count::Rejected(reason)]);
    }
}

#[test]
fn f1_a_client_that_waits_when_gate_drains_is_told_at_its_next_turn() {
    let mut driver = waiting();
    driver.session.doom(Reason::Draining);
    driver.feed(Input::Turn, Ok(()));
    assert_eq!(driver.refusal, Some(Refusal::ShuttingDown));
    assert_eq!(driver.counts(), [Count::Rejected(Reason::Draining)]);
}

#[test]
fn a_backend_with_another_address_is_dialled_there() {
    let mut driver = Driver::new(None);
    driver.feed(Input::ClientData(&startup_packet()), Ok(()));
    driver.feed(Input::AddressFailed(ConnectFailure::Refused), Ok(()));
    assert!(driver.has(&Action::DialNext) && driver.refusal.is_none());
    driver.feed(Input::Connected, Ok(()));
    assert!(driver.relaying);
    driver.feed(Input::BackendData(&login_bytes()), Ok(()));
    driver.feed(Input::ClientEnded, Ok(()));
    driver.feed(Input::BackendEnded, Ok(()));
    assert_eq!(
        driver.counts(),
        [
            Count::ConnectFailed(ConnectFailure::Refused),
            Count::Closed(CloseReason::ClientClosed)
        ]
    );
}

#[test]
fn f1_a_session_that_is_stopped_before_its_first_byte_is_told_57p03() {
    for inputs in [&[][..], &[Input::Connected]] {
        let mut driver = Driver::new(None);
        driver.feed(Input::ClientData(&startup_packet()), Ok(()));
        for input in inputs {
            driver.feed(*input, Ok(()));
        }
        driver.feed(Input::Stop, Ok(()));
        assert_eq!(driver.refusal, Some(Refusal::ShuttingDown));
        driver.feed(Input::ClientEnded, Ok(()));
        assert!(driver.closed);
        assert_eq!(driver.counts(), [Count::Closed(CloseReason::Drained)]);
    }
}

#[test]
fn f1_a_session_that_is_stopped_while_the_ledger_is_asked_is_told_57p03() {
    let answers = [
        (Ok(()), Count::Closed(CloseReason::Drained)),
        (Err(Reason::User), Count::Rejected(Reason::User)),
    ];
    for (answer, outcome) in answers {
        let mut session = Session::new(DEADLINES, None);
        let mut out = Vec::new();
        session.handle(Input::ClientData(&startup_packet()), &mut out);
        session.handle(Input::Stop, &mut out);
        out.clear();
        session.handle(Input::Admission(answer), &mut out);
        assert!(out.contains(&Action::Count(outcome)), "{out:?}");
        assert!(out.iter().any(|action| matches!(action, Action::Refuse(_))));
        assert!(!out.contains(&Action::Dial));
    }
}

#[test]
fn e1_one_deadline_covers_the_whole_startup_phase() {
    let mut driver = Driver::new(None);
    for byte in startup_packet().iter().take(20) {
        driver.feed(Input::ClientData(&[*byte]), Ok(()));
    }
    let deadlines = driver.actions.iter();
    let deadlines = deadlines.filter(|action| matches!(action, Action::Deadline(_)));
    assert_eq!(deadlines.count(), 1, "bytes do not extend it");
    driver.feed(Input::DeadlinePassed, Ok(()));
    assert!(driver.closed && driver.refusal.is_none());
}

#[test]
fn each_step_shows_its_state() {
    let packet = startup_packet();
    let login = login_bytes();
    let steps = [
        (Input::ClientData(&packet), SessionState::Waiting),
        (Input::Admission(Ok(())), SessionState::Connecting),
        (Input::Connected, SessionState::Login),
        (Input::BackendData(&login), SessionState::Active),
        (Input::ClientEnded, SessionState::HalfClosed),
        (Input::ClientLost, SessionState::Abandoned),
        (Input::BackendEnded, SessionState::Ending),
    ];
    let mut session = Session::new(DEADLINES, None);
    assert_eq!(session.state(), SessionState::Startup);
    for (input, state) in steps {
        session.handle(input, &mut Vec::new());
        assert_eq!(session.state(), state, "after {input:?}");
        assert_eq!(
            session.state().is_relay(),
            matches!(state, SessionState::Active | SessionState::HalfClosed)
        );
    }
    let cancel = Session::cancel(DEADLINES, cancel_packet());
    assert_eq!(cancel.state(), SessionState::Cancel);
}
