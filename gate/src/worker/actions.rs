//! Carries out what a session decides.

use std::io;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use super::Worker;
use super::connection::{Connection, Mode, Pipe, PollState, Side};
use crate::ledger::Applicant;
use crate::proto::first_packet::Identity;
use crate::proto::refusal::Refusal;
use crate::ring::{Key, Kind};
use crate::session::Session;
use crate::session::event::{Action, Count, Input};
use crate::session::outcome::{ConnectFailure, Reason};
use crate::sessions::Source;

/// How long a dial that found no descriptor rests.
const REDIAL: Duration = Duration::from_millis(5);

/// Closes with RST: nothing is left of the connection on this machine.
pub(super) fn reset(socket: &Socket) {
    // A failure leaves the orderly close.
    let _ = socket.set_linger(Some(Duration::ZERO));
}

impl Worker {
    /// Puts a connection into the table.
    pub(super) fn insert(&mut self, mut connection: Connection) -> u32 {
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
            if self.connections[id as usize].mode != Mode::Closing {
                self.arm_or_close(id, Kind::Client);
            }
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
                let verdict = self.admit(id, &who);
                self.connections[id as usize]
                    .session
                    .handle(Input::Admission(verdict), &mut actions);
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
                    let _ = client.send(&[byte]);
                }
            }
            // Carried out by `carry_out`.
            Action::Admit(_) => {}
            Action::Dial => self.dial(id, now),
            Action::Relay(first) => {
                connection.up = Pipe::starting_with(first);
                connection.mode = Mode::Relaying;
                self.enqueue(id);
            }
            Action::Refuse(refusal) => self.refuse(id, &refusal),
            Action::EndBackend => {
                if let Some(backend) = &connection.backend {
                    let _ = backend.socket.shutdown(Shutdown::Write);
                }
            }
            Action::EndClient => {
                if let Some(client) = &connection.client {
                    let _ = client.socket.shutdown(Shutdown::Write);
                }
            }
            Action::DropClientData => {
                connection.mode = Mode::Lingering;
                self.enqueue(id);
            }
            Action::CloseBackend => self.retire_backend(id),
            Action::DropBackendData => {
                connection.up.finished = true;
                connection.down.drops = true;
                self.enqueue(id);
            }
            Action::CancelQuery(packet) => {
                let backend = connection.backend_index;
                self.cancel_query(packet, backend, now);
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

    /// Gives back the descriptor that was kept for a backend.
    pub(super) fn give_backend_fd(&mut self, id: u32) {
        let connection = &mut self.connections[id as usize];
        let of_client = u64::from(connection.client.is_some() && !connection.on_reserve);
        if connection.fds > of_client {
            connection.fds -= 1;
            self.state.give_fds(1);
        }
    }

    /// Keeps a descriptor for a cancel of gate's own: of the reserve if need be,
    /// so that a gate without descriptors can still end queries. A client's
    /// cancel has two already.
    fn keep_fd_for_cancel(&mut self, id: u32) -> bool {
        let reserve = self.reserve();
        let connection = &mut self.connections[id as usize];
        if connection.client.is_some() {
            return true;
        }
        if self.state.take_fds(1) {
            connection.fds += 1;
        } else if self.on_reserve < reserve {
            self.on_reserve += 1;
            connection.on_reserve = true;
        } else {
            return false;
        }
        true
    }

    /// Asks the ledger.
    fn admit(&mut self, id: u32, who: &Identity) -> Result<(), Reason> {
        self.pending.remove(id);
        let asked = Instant::now();
        let connection = &mut self.connections[id as usize];
        let (Some(client), Some(entry)) = (&connection.client, &connection.entry) else {
            return Err(Reason::MaxConnections);
        };
        connection.backend_index = match &who.database {
            Some(database) => self.config.databases.get(database).copied().unwrap_or(0),
            None => 0,
        };
        let backend = &self.config.backends[connection.backend_index];
        let applicant = Applicant {
            user: &who.user,
            database: who.database.as_deref(),
            backend: backend.name.as_bytes(),
        };
        let socket = client.socket.as_fd();
        let verdict = self
            .state
            .ledger
            .admit(&mut self.names, socket, entry, &applicant);
        self.stats.admission_took(asked.elapsed());
        verdict
    }

    /// Takes a connection out of those that have not said what they want, if the
    /// ledger did not do so at its admission.
    fn has_spoken(&mut self, id: u32) {
        let connection = &self.connections[id as usize];
        if self.pending.remove(id)
            && let (Some(client), Some(entry)) = (&connection.client, &connection.entry)
        {
            self.state.ledger.spoken(client.socket.as_fd(), entry);
        }
    }

    /// Connects to the backend. A failure is fed in the next round, as every
    /// other outcome of a dial is.
    fn dial(&mut self, id: u32, now: Instant) {
        self.has_spoken(id);
        let connection = &mut self.connections[id as usize];
        connection.mode = Mode::Dialing;
        if connection.session.identity().is_none() {
            if connection.client.is_some() {
                self.cancel_elsewhere(id, now);
            }
            if !self.keep_fd_for_cancel(id) {
                self.connections[id as usize].dial_error = Some(ConnectFailure::Host);
                return self.enqueue(id);
            }
        }
        self.connect_backend(id, now);
        self.enqueue(id);
    }

    fn connect_backend(&mut self, id: u32, now: Instant) {
        let connection = &mut self.connections[id as usize];
        // Not the round's clock: a connect on loopback is over before the next.
        connection.dialled = Instant::now();
        let backend = &self.config.backends[connection.backend_index];
        match connect(backend.address) {
            Ok(socket) => {
                connection.backend = Some(Side::new(socket));
                self.arm_or_close(id, Kind::Backend);
            }
            // Its descriptor was kept, but another worker's accept has run ahead
            // of the budget and is about to give it back.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                self.redials.push(id);
                self.redial_at.get_or_insert(now + REDIAL);
            }
            Err(error) => {
                connection.dial_error = Some(connect_failure(&error));
                self.enqueue(id);
            }
        }
    }

    /// Dials again what found no descriptor; the connect deadline ends it.
    pub(super) fn redial(&mut self, now: Instant) {
        self.redial_at = None;
        for id in std::mem::take(&mut self.redials) {
            let connection = self.connections.get(id as usize);
            let waits = |connection: &Connection| {
                connection.mode == Mode::Dialing && connection.backend.is_none()
            };
            if connection.is_some_and(waits) {
                self.connect_backend(id, now);
            }
        }
    }

    /// A CancelRequest does not say which backend it is for: every backend
    /// gets it, and ignores a key that is not its own.
    fn cancel_elsewhere(&mut self, id: u32, now: Instant) {
        if self.config.backends.len() > 1
            && let Some(packet) = self.connections[id as usize].session.cancel_packet()
        {
            for backend in 1..self.config.backends.len() {
                self.cancel_query(packet.clone(), backend, now);
            }
        }
    }

    /// Sends a CancelRequest over a connection of gate's own.
    fn cancel_query(&mut self, packet: Vec<u8>, backend: usize, now: Instant) {
        let session = Session::cancel(self.deadlines, packet);
        let mut connection = Connection::new(session, 0, Source::NOWHERE, now);
        connection.backend_index = backend;
        let id = self.insert(connection);
        self.start(id, now);
    }

    fn refuse(&mut self, id: u32, refusal: &Refusal) {
        self.has_spoken(id);
        if self.connections[id as usize].backend.is_none() {
            self.give_backend_fd(id);
        }
        let connection = &mut self.connections[id as usize];
        connection.mode = Mode::Lingering;
        if let Some(client) = &connection.client {
            // The FIN rides on the segment of the message. A client that takes
            // neither is lost, and a poll will say so.
            let _ = client
                .socket
                .send_with_flags(&refusal.encode(), libc::MSG_MORE | libc::MSG_NOSIGNAL);
            let _ = client.socket.shutdown(Shutdown::Write);
        }
        self.enqueue(id);
    }

    fn count(&mut self, id: u32, count: Count) {
        let connection = &self.connections[id as usize];
        match count {
            Count::Rejected(reason) => self.stats.rejected(connection.listener, reason),
            Count::StartupFailed(failure) => {
                self.stats.startup_failed(failure);
                let source = connection.source.ip();
                tracing::debug!(%source, reason = failure.label(), "no valid startup");
            }
            Count::ConnectFailed(failure) => {
                self.stats.connect_failed(connection.backend_index, failure);
                let backend = &self.config.backends[connection.backend_index];
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

    /// Closes the backend's socket, once its poll has ended.
    fn retire_backend(&mut self, id: u32) {
        let connection = &mut self.connections[id as usize];
        let Some(backend) = &mut connection.backend else {
            return;
        };
        backend.retired = true;
        if backend.poll == PollState::Idle {
            connection.backend = None;
            self.give_backend_fd(id);
        } else {
            self.cancel_poll(id, Kind::Backend);
        }
    }

    /// Closes everything, once no operation is in flight.
    fn close(&mut self, id: u32, reset_client: bool) {
        self.pending.remove(id);
        let connection = &mut self.connections[id as usize];
        connection.mode = Mode::Closing;
        connection.reset_client = reset_client;
        if let Some(deadline) = connection.deadline.take() {
            self.timers.replace(id, Some(deadline), None);
        }
        self.cancel_poll(id, Kind::Client);
        self.cancel_poll(id, Kind::Backend);
        if self.connections[id as usize].is_quiet() {
            self.finished.push(id);
        }
    }

    fn cancel_poll(&mut self, id: u32, kind: Kind) {
        let connection = &mut self.connections[id as usize];
        let key = Key::new(kind, id, connection.generation);
        let side = connection.side(kind);
        if let Some(side) = side
            && side.poll == PollState::Armed
        {
            side.poll = PollState::Ending;
            if let Err(error) = self.ring.cancel(key) {
                tracing::error!(%error, "a poll cannot be cancelled");
            }
        }
    }

    fn arm_or_close(&mut self, id: u32, kind: Kind) {
        if let Err(error) = self.arm(id, kind) {
            tracing::error!(%error, "a socket cannot be polled");
            self.close(id, true);
        }
    }
}

/// A socket that is connecting.
fn connect(address: std::net::SocketAddr) -> io::Result<Socket> {
    let kind = Type::STREAM.nonblocking().cloexec();
    let socket = Socket::new(Domain::for_address(address), kind, Some(Protocol::TCP))?;
    socket.set_tcp_nodelay(true)?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(socket),
    }
}

pub(super) fn connect_failure(error: &io::Error) -> ConnectFailure {
    match error.raw_os_error() {
        Some(libc::ECONNREFUSED) => ConnectFailure::Refused,
        Some(libc::ETIMEDOUT) => ConnectFailure::Timeout,
        Some(libc::ECONNRESET | libc::EPIPE | libc::ECONNABORTED) => ConnectFailure::Reset,
        Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENETDOWN | libc::EHOSTDOWN) => {
            ConnectFailure::Unreachable
        }
        Some(
            libc::EMFILE
            | libc::ENFILE
            | libc::ENOBUFS
            | libc::ENOMEM
            | libc::EADDRNOTAVAIL
            | libc::EPERM,
        ) => ConnectFailure::Host,
        _ => ConnectFailure::Other,
    }
}
