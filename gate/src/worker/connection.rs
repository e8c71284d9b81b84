//! What a worker holds for one connection.

use std::io;
use std::time::Instant;

use super::flow::Flow;
use super::machine::{Kind, Machine, ready};
use crate::ledger::Entry;
use crate::session::Session;
use crate::session::outcome::ConnectFailure;
use crate::sessions::Source;
use crate::stats::Direction;

/// How a connection's sockets are driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The client's bytes go to the session.
    Startup,
    /// The kernel is asked for the session's slots.
    Admitting,
    /// It waits for a slot; the client is watched but not read.
    Waiting,
    /// The backend is being connected; the client is watched but not read.
    Dialing,
    /// Bytes go both ways.
    Relaying,
    /// The client was sent FIN; what it sends is dropped.
    Lingering,
    /// Waits for the last completions of its operations.
    Closing,
}

/// Where the poll of a socket stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollState {
    /// None is armed: the socket may be closed.
    Idle,
    /// Armed for one report.
    Once,
    /// Armed for every change.
    Changes,
    /// Cancelled, its last completion is still to come.
    Ending,
}

/// One of a connection's two sockets.
#[derive(Debug)]
pub struct Side<S> {
    /// Non-blocking.
    pub socket: S,
    /// Its poll.
    pub poll: PollState,
    /// All bits of [`ready`] seen so far that do not go away: the peer's end,
    /// a hang-up, an error.
    ended: u16,
    /// To be closed as soon as its poll has ended.
    pub retired: bool,
    /// There may be something to read.
    pub readable: bool,
}

/// What a read brought.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// So many bytes.
    Data(usize),
    /// Nothing for now; a poll will tell.
    Blocked,
    /// The peer's FIN.
    Ended,
    /// The connection broke.
    Lost,
}

/// Why a socket takes nothing any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gone {
    /// Its peer had ended before the connection did: all its bytes can be read.
    Ended,
    /// The connection broke.
    Broken,
}

impl Gone {
    /// What a failed send says. An RST that comes after FIN is EPIPE
    /// (`tcp_reset`); a poll's bits are the same for both.
    pub fn of(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::Ended,
            _ => Self::Broken,
        }
    }
}

impl<S> Side<S> {
    /// A side whose socket may have bytes already.
    pub fn new(socket: S) -> Self {
        Self {
            socket,
            poll: PollState::Idle,
            ended: 0,
            retired: false,
            readable: true,
        }
    }

    /// Notes what a poll said.
    pub fn note(&mut self, bits: u32) {
        const LASTING: u32 = ready::PEER_ENDED | ready::HANG_UP | ready::ERROR | ready::URGENT;
        self.ended |= (bits & LASTING) as u16;
        if bits & (ready::READ | LASTING) != 0 {
            self.readable = true;
        }
    }

    /// Whether a poll said that the peer ended its side.
    pub fn peer_ended(&self) -> bool {
        self.has(ready::PEER_ENDED)
    }

    /// Whether a poll said that the connection is over in both directions.
    pub fn is_broken(&self) -> bool {
        self.has(ready::HANG_UP | ready::ERROR)
    }

    /// Whether a poll said anything that lasts.
    pub fn has_ended(&self) -> bool {
        self.ended != 0
    }

    const fn has(&self, bits: u32) -> bool {
        self.ended as u32 & bits != 0
    }

    /// Reads once.
    pub fn receive<M: Machine<Socket = S>>(
        &mut self,
        machine: &mut M,
        buffer: &mut [u8],
    ) -> Received {
        if !self.readable {
            return Received::Blocked;
        }
        loop {
            return match machine.receive(&self.socket, buffer) {
                Ok(0) => Received::Ended,
                Ok(count) => {
                    // A short read has emptied the socket, and whatever comes
                    // later is reported, except an end that was reported already.
                    self.readable = count == buffer.len() || self.has_ended();
                    Received::Data(count)
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::WouldBlock => {
                        self.readable = false;
                        Received::Blocked
                    }
                    _ => Received::Lost,
                },
            };
        }
    }

    /// Writes as much as the socket takes.
    pub fn send<M: Machine<Socket = S>>(
        &self,
        machine: &mut M,
        bytes: &[u8],
    ) -> Result<usize, Gone> {
        loop {
            match machine.send(&self.socket, bytes, false) {
                Ok(count) => return Ok(count),
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => return Ok(0),
                    _ => return Err(Gone::of(&error)),
                },
            }
        }
    }
}

/// See the module.
pub struct Connection<M: Machine> {
    /// Tells late completions of an earlier owner of this index.
    pub generation: u32,
    /// Decides.
    pub session: Session,
    /// Its entry in the ledger; none without a client.
    pub entry: Option<Entry>,
    /// None for a cancel of gate's own.
    pub client: Option<Side<M::Socket>>,
    /// From the dial on.
    pub backend: Option<Side<M::Socket>>,
    /// Client to backend.
    pub up: Flow<M::Pipe>,
    /// Backend to client.
    pub down: Flow<M::Pipe>,
    /// The deadline in force, as the timers know it.
    pub deadline: Option<Instant>,
    /// When it was accepted.
    pub born: Instant,
    /// When something last happened: it was accepted, its backend was dialled,
    /// bytes went either way.
    pub active: Instant,
    /// Bytes passed on, by [`Direction`].
    pub relayed: [u64; 2],
    /// The client's address, once somebody needs it: it costs a system call, and
    /// who is refused at once needs none.
    pub source: Source,
    /// The listener's place in the configuration.
    pub listener: u16,
    /// The backend's place in the configuration.
    pub backend_index: u16,
    /// The address that is dialled, or was: its place in the backend's.
    pub address: u8,
    /// Addresses that were tried, a bit each.
    pub tried: u16,
    /// Another address is dialled as soon as this one's socket is closed.
    pub dials_next: bool,
    /// How the sockets are driven.
    pub mode: Mode,
    /// Has a place in the queue of those that wait.
    pub waits: bool,
    /// Counted as pending by the ledger.
    pub pending: bool,
    /// How often the kernel was asked for this session's slots.
    pub asked: u8,
    /// The kernel's answer is still to come.
    pub admitting: bool,
    /// Holds slots.
    pub admitted: bool,
    /// The dial failed before there was anything to poll.
    pub dial_error: Option<ConnectFailure>,
    /// End the client's connection with RST.
    pub reset_client: bool,
    /// A send to the backend failed before it had ended: that took the error off
    /// the socket, whose next read then looks like an orderly end.
    pub backend_broke: bool,
    /// Waits in the worker's queue of work left over.
    pub queued: bool,
    /// Descriptors it holds of those that sessions may hold.
    pub fds: u8,
    /// Lives on the worker's spare descriptor.
    pub on_spare: bool,
    /// Was refused because descriptors ran out.
    pub on_reserve: bool,
    /// Was evicted while pending.
    pub evicted: bool,
}

/// One direction of a relay: its flow, sender and receiver.
pub type Ends<'a, M> = (
    &'a mut Flow<<M as Machine>::Pipe>,
    Option<&'a mut Side<<M as Machine>::Socket>>,
    Option<&'a Side<<M as Machine>::Socket>>,
);

impl<M: Machine> Connection<M> {
    /// A connection with no socket yet.
    pub fn new(session: Session, listener: u16, now: Instant) -> Self {
        Self {
            generation: 0,
            session,
            entry: None,
            client: None,
            backend: None,
            up: Flow::default(),
            down: Flow::default(),
            deadline: None,
            born: now,
            active: now,
            relayed: [0; 2],
            source: Source::NOWHERE,
            listener,
            backend_index: 0,
            address: 0,
            tried: 0,
            dials_next: false,
            mode: Mode::Startup,
            waits: false,
            pending: false,
            asked: 0,
            admitting: false,
            admitted: false,
            dial_error: None,
            reset_client: false,
            backend_broke: false,
            queued: false,
            fds: 0,
            on_spare: false,
            on_reserve: false,
            evicted: false,
        }
    }

    /// The socket that an operation's kind is about.
    pub fn side(&mut self, kind: Kind) -> &mut Option<Side<M::Socket>> {
        match kind {
            Kind::Backend => &mut self.backend,
            _ => &mut self.client,
        }
    }

    /// One direction's flow, sender and receiver.
    pub fn direction(&mut self, direction: Direction) -> Ends<'_, M> {
        let client = self.client.as_mut();
        let backend = self.backend.as_mut().filter(|side| !side.retired);
        match direction {
            Direction::ToBackend => (&mut self.up, client, backend.map(|side| &*side)),
            Direction::ToClient => (&mut self.down, backend, client.map(|side| &*side)),
        }
    }

    /// Whether a direction has much to move.
    pub fn is_bulk(&self) -> bool {
        self.up.is_bulk() || self.down.is_bulk()
    }

    /// Notes bytes that were passed on.
    pub fn passed(&mut self, direction: Direction, bytes: usize, now: Instant) {
        self.active = now;
        self.relayed[direction as usize] += bytes as u64;
    }

    /// Whether every operation has come to its end, so that all may be closed.
    pub fn is_quiet(&self) -> bool {
        let quiet = |side: &Option<Side<M::Socket>>| {
            side.as_ref()
                .is_none_or(|side| side.poll == PollState::Idle)
        };
        quiet(&self.client) && quiet(&self.backend) && !self.admitting
    }
}

#[cfg(test)]
mod tests {
    use super::super::Linux;
    use super::*;

    /// docs/performance.md promises what an idle session costs: its place in the
    /// worker's table is most of that.
    #[test]
    fn an_idle_session_is_small() {
        assert!(size_of::<Session>() <= 56, "{}", size_of::<Session>());
        let size = size_of::<Connection<Linux>>();
        assert!(size <= 264, "{size} bytes");
    }
}
