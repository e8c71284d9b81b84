//! Connecting to backends, one address after the other.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Worker;
use super::connection::{Connection, Mode, Side};
use super::machine::{Kind, Machine};
use crate::config::Address;
use crate::host::{FDS_PER_SESSION, connect_failure};
use crate::session::Session;
use crate::session::event::Input;
use crate::session::outcome::ConnectFailure;
use crate::state::Phase;

/// Identities that a worker shares among its sessions; past it, it starts anew.
const IDENTITIES_MAX: usize = 4096;
/// CancelRequests under way at once: of clients, who hold two descriptors each for
/// as long as a server that hangs lets them, and of gate's own, which hold one.
/// One packet of a stranger's becomes one for each address of each backend.
const CANCELS_MAX: u64 = 64;
/// The share of the descriptors of sessions that either may hold, if it is less.
const CANCELS_SHARE: u64 = 16;
/// Those that wait for their turn; what is beyond is left to the deadlines.
const CANCELS_WAITING_MAX: usize = 16_384;
/// How long a dial that found no descriptor or a full backlog rests.
const REDIAL: Duration = Duration::from_millis(5);
/// How many of them may fail again at a time: a server that hangs with a full
/// backlog must not keep the loop busy.
const REDIALS_MAX: usize = 64;

/// A CancelRequest, with the backend and the address that it is for.
pub(super) type Cancel = (Vec<u8>, (u16, u8));

/// What a worker knows of dialling.
#[derive(Debug, Default)]
pub(super) struct Dialing {
    /// Connections, with their generation, whose backend is dialled again.
    pub again: Vec<(u32, u32)>,
    /// When that is.
    pub again_at: Option<Instant>,
    /// CancelRequests of clients that are under way.
    pub client_cancels: u64,
    /// CancelRequests of gate's own that are under way.
    pub cancels: u64,
    /// Those that are not yet: for sessions whose client is gone.
    pub of_sessions: VecDeque<Cancel>,
    /// The same of clients, which may be strangers'.
    pub of_clients: VecDeque<Cancel>,
}

impl<M: Machine> Worker<M> {
    /// Connects to the backend. A failure is fed in the next round, as every
    /// other outcome of a dial is.
    pub(super) fn dial(&mut self, id: u32, now: Instant) {
        self.has_spoken(id);
        self.source(id);
        let connection = &mut self.connections[id as usize];
        connection.mode = Mode::Dialing;
        if let Some(who) = connection.session.identity() {
            // Many sessions are of one user and one database.
            if let Some(shared) = self.identities.get(who) {
                connection.session.share_identity(Arc::clone(shared));
            } else {
                if self.identities.len() >= IDENTITIES_MAX {
                    self.identities.clear();
                }
                self.identities.insert(Arc::clone(who));
            }
        } else {
            if connection.client.is_some() {
                if self.dialing.client_cancels >= self.cancels_max(FDS_PER_SESSION) {
                    let input = if self.dialing.of_clients.len() < CANCELS_WAITING_MAX {
                        self.cancel_everywhere(id, None);
                        Input::CancelQueued
                    } else {
                        Input::ConnectFailed(ConnectFailure::Host)
                    };
                    return self.feed(id, input, now);
                }
                self.connections[id as usize].cancels = true;
                self.dialing.client_cancels += 1;
                let first = self.state.backends.order(0).next().unwrap_or(0);
                self.cancel_everywhere(id, Some(first));
            }
            if !self.keep_fd_for_cancel(id) {
                self.connections[id as usize].dial_error = Some(ConnectFailure::Host);
                return self.enqueue(id);
            }
        }
        self.connect_backend(id, now);
        self.enqueue(id);
    }

    /// The address that was dialled cannot be reached: gives it up and dials
    /// another one.
    pub(super) fn dial_next(&mut self, id: u32, now: Instant) {
        self.connections[id as usize].dials_next = true;
        self.retire_backend(id, now);
    }

    /// Dials the next address of the session's backend.
    pub(super) fn connect_backend(&mut self, id: u32, now: Instant) {
        let connection = &mut self.connections[id as usize];
        let place = usize::from(connection.backend_index);
        let untried = |address: &usize| connection.tried & 1 << address == 0;
        let address = self.state.backends.order(place).find(untried).unwrap_or(0);
        connection.address = address as u8;
        // Not the round's clock: a connect on loopback is over before the next.
        connection.active = self.machine.now();
        match self.machine.connect(&self.config.backends[place], address) {
            Ok(socket) => {
                connection.tried |= 1 << address;
                connection.backend = Some(Side::new(socket));
                self.watch(id, Kind::Backend);
            }
            // Its descriptor was kept, but another worker's accept has run ahead
            // of the budget and is about to give it back. Or the backlog of a
            // unix socket is full.
            Err(error)
                if error.kind() == io::ErrorKind::WouldBlock
                    || matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) =>
            {
                self.dialing.again.push((id, connection.generation));
                self.dialing.again_at.get_or_insert(now + REDIAL);
            }
            Err(error) => {
                connection.tried |= 1 << address;
                connection.dial_error = Some(connect_failure(&error));
                self.enqueue(id);
            }
        }
    }

    /// The address that was dialled did not answer, or answered no.
    pub(super) fn dial_failed(&mut self, id: u32, failure: ConnectFailure, now: Instant) {
        let connection = &mut self.connections[id as usize];
        let place = usize::from(connection.backend_index);
        let address = usize::from(connection.address);
        // Also one that was never reached, for want of a descriptor or of room in
        // its backlog: it has had its time.
        connection.tried |= 1 << address;
        let backends = &self.state.backends;
        backends.failed(place, address, failure, now);
        let another = backends
            .order(place)
            .any(|address| connection.tried & 1 << address == 0);
        let input = if another {
            Input::AddressFailed(failure)
        } else {
            Input::ConnectFailed(failure)
        };
        self.feed(id, input, now);
    }

    /// Why a dial did not end in time.
    pub(super) fn overdue(&self, id: u32) -> ConnectFailure {
        let connection = &self.connections[id as usize];
        let backend = &self.config.backends[usize::from(connection.backend_index)];
        match backend.addresses.get(usize::from(connection.address)) {
            // No descriptor was left to dial with. A full unix backlog leaves no
            // socket either, but is the server's.
            Some(Address::Tcp(_)) if connection.backend.is_none() => ConnectFailure::Host,
            _ => ConnectFailure::Timeout,
        }
    }

    /// Dials again what found no descriptor or a full backlog; the connect
    /// deadline ends it.
    pub(super) fn redial(&mut self, now: Instant) {
        self.dialing.again_at = None;
        let mut waiting = std::mem::take(&mut self.dialing.again).into_iter();
        for (id, generation) in waiting.by_ref() {
            let connection = self.connections.get(id as usize);
            let waits = |connection: &Connection<M>| {
                connection.generation == generation
                    && connection.mode == Mode::Dialing
                    && connection.backend.is_none()
                    && connection.dial_error.is_none()
            };
            if connection.is_some_and(waits) {
                self.connect_backend(id, now);
            }
            if self.dialing.again.len() >= REDIALS_MAX {
                break;
            }
        }
        // Those that had no turn come first the next time.
        self.dialing.again.splice(0..0, waiting);
    }

    /// A CancelRequest does not say which server it is for: every address of
    /// every backend gets it, and ignores a key that is not its own. The
    /// client's connection takes one of the first backend.
    fn cancel_everywhere(&mut self, id: u32, own: Option<usize>) {
        let connection = &mut self.connections[id as usize];
        let Some(packet) = connection.session.cancel_packet() else {
            return;
        };
        connection.tried = own.map_or(!0, |own| !(1 << own));
        let counts: Vec<usize> = self
            .config
            .backends
            .iter()
            .map(|backend| backend.addresses.len())
            .collect();
        for (backend, addresses) in counts.into_iter().enumerate() {
            for address in (0..addresses).filter(|address| (backend, Some(*address)) != (0, own)) {
                let place = (backend as u16, address as u8);
                queue(&mut self.dialing.of_clients, (packet.clone(), place));
            }
        }
    }

    /// How many CancelRequests of a kind this worker may have under way, if each
    /// holds so many descriptors.
    fn cancels_max(&self, fds: u64) -> u64 {
        let workers = self.state.stats.len() as u64;
        let share = self.state.session_fds_max / (CANCELS_SHARE * fds * workers);
        share.clamp(1, CANCELS_MAX)
    }

    /// Sends a CancelRequest to an address of a backend, over a connection of
    /// gate's own, at the end of this round or when some of those under way have
    /// ended.
    pub(super) fn cancel_query(&mut self, packet: Vec<u8>, place: (u16, u8)) {
        queue(&mut self.dialing.of_sessions, (packet, place));
    }

    /// Sends those whose turn it is. Clients' take half of the places at most, so
    /// that a stranger's, for a server that hangs, do not keep back the others.
    pub(super) fn send_cancels(&mut self, now: Instant) {
        if self.phase == Phase::Stopping {
            self.dialing.of_sessions.clear();
            self.dialing.of_clients.clear();
        }
        let max = self.cancels_max(1);
        while self.dialing.cancels < max
            && let Some(cancel) = self.dialing.of_sessions.pop_front()
        {
            self.send_cancel(cancel, now);
        }
        while self.dialing.cancels < max.div_ceil(2)
            && let Some(cancel) = self.dialing.of_clients.pop_front()
        {
            self.send_cancel(cancel, now);
        }
    }

    fn send_cancel(&mut self, (packet, place): Cancel, now: Instant) {
        let session = Session::cancel(Arc::clone(&self.deadlines), packet);
        let mut connection = Connection::new(session, 0, now);
        let (backend, address) = place;
        connection.backend_index = backend;
        connection.tried = !(1 << address);
        self.dialing.cancels += 1;
        let id = self.insert(connection);
        self.start(id, now);
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
        } else if self.accepting.on_reserve < reserve {
            self.accepting.on_reserve += 1;
            connection.on_reserve = true;
        } else {
            return false;
        }
        true
    }
}

fn queue(cancels: &mut VecDeque<Cancel>, cancel: Cancel) {
    if cancels.len() < CANCELS_WAITING_MAX {
        cancels.push_back(cancel);
    }
}
