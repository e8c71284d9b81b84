//! What a worker holds for a session, and what must never be.

use std::time::Duration;

use gate::proto::first_packet::PACKET_BYTES_MAX;
use gate::session::Session;
use gate::session::event::{Action, Count, Deadlines, Input, LINGER, OVER_STARTUP};
use gate::session::outcome::Reason;

/// A session, its worker's side of the contract, and the oracle.
pub struct Driver {
    session: Session,
    deadlines: Deadlines,
    now: Duration,
    held: Held,
    /// What the next admission answers.
    pub ledger: Result<(), Reason>,
    /// What the client sent since its last answer.
    sent: Vec<u8>,
    /// The ledger's answer comes later.
    pub defers: bool,
    /// The ledger was asked and has not answered.
    asked: bool,
    /// It stands in the queue for a slot.
    waits: bool,
    /// gate is told to end.
    stopped: bool,
    /// What the backend said while it was watched.
    said: Vec<u8>,
    doomed: bool,
    replies: usize,
    dialled: bool,
    connected: bool,
    relaying: bool,
    /// A byte of the backend was shown to the session and passed on.
    spoke: bool,
    /// Its end was told.
    backend_over: bool,
    /// The client was sent FIN.
    client_told: bool,
    backend_told: bool,
    drops_client: bool,
    drops_backend: bool,
    outcomes: usize,
    closed: bool,
}

/// How long a client may wait for a slot.
pub const WAIT: Duration = Duration::from_secs(3);

/// What has to be given back.
#[derive(Debug, Default, PartialEq, Eq)]
struct Held {
    client: bool,
    slot: bool,
    backend: bool,
    deadline: Option<Duration>,
}

impl Driver {
    /// A session of a client.
    pub fn new(deadlines: Deadlines, doomed: Option<Reason>) -> Self {
        let session = Session::new(deadlines, doomed);
        Self::begin(session, deadlines, doomed.is_some(), true, Vec::new())
    }

    /// A cancel of gate's own.
    pub fn cancel(deadlines: Deadlines, packet: &[u8]) -> Self {
        let session = Session::cancel(deadlines, packet.to_vec());
        Self::begin(session, deadlines, false, false, packet.to_vec())
    }

    fn begin(
        session: Session,
        deadlines: Deadlines,
        doomed: bool,
        client: bool,
        sent: Vec<u8>,
    ) -> Self {
        let mut driver = Self {
            session,
            deadlines,
            now: Duration::ZERO,
            held: Held {
                client,
                ..Held::default()
            },
            ledger: Ok(()),
            sent,
            defers: false,
            asked: false,
            waits: false,
            stopped: false,
            said: Vec::new(),
            doomed,
            replies: 0,
            dialled: false,
            connected: false,
            relaying: false,
            spoke: false,
            backend_over: false,
            client_told: false,
            backend_told: false,
            drops_client: false,
            drops_backend: false,
            outcomes: 0,
            closed: false,
        };
        let mut out = Vec::new();
        driver.session.start(&mut out);
        driver.carry_out(out);
        driver.check();
        driver
    }

    /// Dooms the session after it was accepted.
    pub fn doom(&mut self, reason: Reason) {
        self.session.doom(reason);
        self.doomed = true;
    }

    /// Feeds one input, if a worker could: it reports nothing of what it was told to close, reads
    /// a client only at the start, and tells each end once.
    pub fn feed(&mut self, input: Input<'_>) {
        let dialling = self.dialled && !self.connected && !self.client_told;
        let backend = self.relaying && self.held.backend && !self.backend_over;
        let possible = match input {
            Input::ClientData(_) | Input::Evict => self.session.is_pending(),
            Input::ClientEnded | Input::ClientLost => self.held.client,
            Input::Connected | Input::ConnectFailed(_) | Input::AddressFailed(_) => dialling,
            Input::CancelQueued => {
                dialling && self.held.client && self.session.identity().is_none()
            }
            Input::BackendData(_) => backend && self.session.watches_backend(),
            Input::BackendEnded | Input::BackendLost => backend && !self.drops_client,
            Input::DeadlinePassed => self.held.deadline.take_if(|at| *at <= self.now).is_some(),
            Input::Admission(_) => std::mem::take(&mut self.asked),
            // Who waits stays where it is, and who is refused joins no more.
            Input::Wait { .. } => {
                self.session.awaits_admission() && !self.waits && std::mem::take(&mut self.asked)
            }
            Input::Turn => self.waits && !self.asked,
            Input::Stop => true,
        };
        if !possible || self.closed {
            return;
        }
        match input {
            Input::ClientData(bytes) => self.sent.extend_from_slice(bytes),
            Input::Connected => self.connected = true,
            Input::BackendData(bytes) => {
                self.said.extend_from_slice(bytes);
                self.spoke |= !bytes.is_empty();
            }
            Input::BackendEnded | Input::BackendLost => self.backend_over = true,
            Input::Admission(answer) => self.held.slot = answer.is_ok(),
            Input::Wait { .. } => self.waits = true,
            Input::Stop => self.stopped = true,
            _ => {}
        }
        let mut out = Vec::new();
        self.session.handle(input, &mut out);
        self.carry_out(out);
        self.check();
    }

    /// Lets time pass.
    pub fn wait(&mut self, time: Duration) {
        self.now += time;
        self.feed(Input::DeadlinePassed);
    }

    /// Whatever came before, deadlines and the backend's end finish it, and nothing stays.
    pub fn finish(mut self) {
        self.feed(Input::Admission(self.ledger));
        for _ in 0..6 {
            match self.held.deadline {
                Some(at) => {
                    self.now = self.now.max(at);
                    self.feed(Input::DeadlinePassed);
                }
                None => self.feed(Input::BackendEnded),
            }
        }
        assert!(self.closed, "it never ends: {:?}", self.session);
        assert_eq!(self.held, Held::default());
        assert_eq!(self.outcomes, 1);
        // What comes late is not heard.
        let mut out = Vec::new();
        for input in [
            Input::ClientData(b"late"),
            Input::ClientLost,
            Input::Connected,
            Input::BackendData(b"late"),
            Input::BackendLost,
            Input::DeadlinePassed,
            Input::Evict,
            Input::Stop,
        ] {
            self.session.handle(input, &mut out);
        }
        assert_eq!(out, [], "after Close");
    }

    fn carry_out(&mut self, mut out: Vec<Action>) {
        let mut next = 0;
        while next < out.len() {
            let action = out[next].clone();
            next += 1;
            assert!(!self.closed, "{action:?} after Close");
            if let Action::Admit(who) = action {
                assert!(!self.held.slot && !self.dialled && !self.doomed);
                assert!(!self.asked, "asked twice");
                assert!(!who.user.is_empty() && self.session.identity() == Some(&who));
                if self.defers {
                    self.asked = true;
                    continue;
                }
                self.held.slot = self.ledger.is_ok();
                let answer = Input::Admission(self.ledger);
                self.session.handle(answer, &mut out);
            } else {
                self.act(action);
            }
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Reply(byte) => {
                assert_eq!(byte, b'N');
                self.replies += 1;
                assert!(self.replies <= 2 && !self.client_told && !self.dialled);
                // Bytes behind the request were not encrypted: they are refused.
                self.sent.clear();
            }
            Action::Admit(_) => unreachable!("carried out before"),
            Action::Dial => {
                assert!(!self.dialled, "a second dial");
                assert!(
                    self.held.slot || self.session.cancel_packet().is_some(),
                    "a dial without a slot"
                );
                self.dialled = true;
                self.held.backend = true;
            }
            Action::DialNext => {
                assert!(self.dialled && !self.connected && self.held.backend);
            }
            Action::EndWait(_) => {
                assert!(std::mem::take(&mut self.waits), "it does not wait");
            }
            Action::Relay(first) => {
                assert!(self.connected && !self.relaying && self.held.backend);
                assert!(!first.is_empty() && self.sent.starts_with(&first));
                assert!(!self.held.slot || first == self.sent, "bytes are lost");
                self.relaying = true;
            }
            Action::Refuse(_) => {
                assert!(self.held.client && !self.client_told && !self.spoke);
                self.client_told = true;
                self.drops_client = true;
            }
            Action::EndClient => {
                assert!(self.held.client && !self.client_told && self.relaying);
                self.client_told = true;
            }
            Action::EndBackend => {
                assert!(self.relaying && self.held.backend && !self.backend_told);
                self.backend_told = true;
            }
            Action::CloseBackend => {
                assert!(std::mem::take(&mut self.held.backend), "closed twice");
            }
            Action::DropClientData => {
                assert!(self.client_told);
                self.drops_client = true;
            }
            Action::DropBackendData => {
                assert!(self.held.backend && !self.drops_backend);
                self.drops_backend = true;
            }
            Action::CancelQuery(packet) => self.check_cancel(&packet),
            Action::Deadline(after) => {
                assert!(after.is_none_or(|after| after <= self.longest()));
                self.held.deadline = after.map(|after| self.now + after);
            }
            Action::Count(count) => self.count(count),
            Action::Close { reset_client } => {
                assert!(!reset_client || self.held.client);
                assert!(!self.waits, "it is gone and waits");
                let deadline = self.held.deadline.take();
                assert_eq!(deadline, None, "a deadline outlives its session");
                self.held = Held::default();
                self.closed = true;
            }
        }
    }

    fn longest(&self) -> Duration {
        let all = &self.deadlines;
        [
            all.startup,
            all.connect,
            all.auth,
            all.cancel,
            all.idle,
            all.half_close,
            all.abandoned,
            WAIT,
            LINGER,
            OVER_STARTUP,
        ]
        .into_iter()
        .max()
        .unwrap_or_default()
    }

    /// gate cancels only with a key that this backend gave.
    fn check_cancel(&self, packet: &[u8]) {
        let (head, key) = packet.split_at(8);
        assert_eq!(
            u32::from_be_bytes([head[0], head[1], head[2], head[3]]) as usize,
            packet.len()
        );
        assert_eq!(head[4..], 80_877_102_u32.to_be_bytes());
        let given = self.said.windows(key.len()).any(|window| window == key);
        assert!(given, "a key that nobody gave");
        assert!(self.drops_backend && !self.closed);
    }

    fn count(&mut self, count: Count) {
        match count {
            Count::ConnectFailed(_) => return assert!(self.dialled && !self.connected),
            Count::Closed(_) => assert!(self.held.slot, "a session that never was is not closed"),
            Count::Rejected(_) => assert!(!self.held.slot, "it was admitted"),
            Count::StartupFailed(_) => assert!(!self.held.slot && !self.dialled),
            Count::Cancel(_) => assert!(!self.held.slot && self.dialled),
        }
        self.outcomes += 1;
    }

    fn check(&self) {
        assert!(self.outcomes <= 1, "two outcomes");
        if self.closed {
            return assert_eq!(self.outcomes, 1, "closed without an outcome");
        }
        // Whoever waits for a client or for a backend that may never answer has a deadline; only
        // an established relay may wait for good.
        let established = self.relaying && !self.client_told && !self.session.is_pending();
        // The ledger always answers, and at once.
        assert!(
            self.held.deadline.is_some() || established || self.asked,
            "waits for ever"
        );
        assert!(
            !self.stopped || self.client_told || self.asked,
            "goes on after Stop"
        );
        if self.session.is_pending() {
            assert!(self.sent.len() < PACKET_BYTES_MAX, "collects without bound");
        }
    }
}
