//! What a worker holds for one connection.

use std::io::{self, Read, Write};
use std::time::Instant;

use socket2::Socket;

use crate::ledger::Entry;
use crate::ring::{Kind, ready};
use crate::session::Session;
use crate::session::outcome::ConnectFailure;
use crate::sessions::Source;
use crate::stats::Direction;

/// How a connection's sockets are driven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The client's bytes go to the session.
    Startup,
    /// The backend is being connected; the client is watched but not read.
    Dialing,
    /// Bytes go both ways.
    Relaying,
    /// The client was sent FIN; what it sends is dropped.
    Lingering,
    /// Waits for the last completions of its polls.
    Closing,
}

/// Where the poll of a socket stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PollState {
    /// None is armed: the socket may be closed.
    Idle,
    /// Armed.
    Armed,
    /// Cancelled, its last completion is still to come.
    Ending,
}

/// One of a connection's two sockets.
#[derive(Debug)]
pub struct Side {
    /// Non-blocking.
    pub socket: Socket,
    /// Its poll.
    pub poll: PollState,
    /// All bits of [`ready`] seen so far that do not go away: the peer's end,
    /// a hang-up, an error.
    pub ended: u32,
    /// To be closed as soon as its poll has ended.
    pub retired: bool,
    readable: bool,
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

impl Side {
    /// A side whose socket may have bytes already.
    pub fn new(socket: Socket) -> Self {
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
        const LASTING: u32 = ready::PEER_ENDED | ready::HANG_UP | ready::ERROR;
        self.ended |= bits & LASTING;
        if bits & (ready::READ | LASTING) != 0 {
            self.readable = true;
        }
    }

    /// Reads once.
    pub fn receive(&mut self, buffer: &mut [u8]) -> Received {
        if !self.readable {
            return Received::Blocked;
        }
        loop {
            return match (&self.socket).read(buffer) {
                Ok(0) => Received::Ended,
                Ok(count) => {
                    // A short read has emptied the socket, and whatever comes
                    // later is reported, except an end that was reported already.
                    self.readable = count == buffer.len() || self.ended != 0;
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

    /// Writes as much as the socket takes; `None` if the connection broke.
    pub fn send(&self, bytes: &[u8]) -> Option<usize> {
        loop {
            match (&self.socket).write(bytes) {
                Ok(count) => return Some(count),
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => return Some(0),
                    _ => return None,
                },
            }
        }
    }
}

/// One direction of a relay. Holds bytes only while its receiver is slower
/// than its sender, and then reads no more.
#[derive(Debug, Default)]
pub struct Pipe {
    spill: Vec<u8>,
    sent: usize,
    /// The sender's FIN was read.
    pub source_ended: bool,
    /// Nobody wants the bytes any more: read and drop them.
    pub drops: bool,
    /// Its end was reported; nothing is read any more.
    pub finished: bool,
}

impl Pipe {
    /// A pipe that first sends `bytes`.
    pub fn starting_with(bytes: Vec<u8>) -> Self {
        Self {
            spill: bytes,
            ..Self::default()
        }
    }

    /// Sends what was held back. Returns whether nothing is left, or `None` if
    /// the receiver's connection broke.
    pub fn flush(&mut self, sink: Option<&Side>) -> Option<bool> {
        if self.spill.is_empty() {
            return Some(true);
        }
        if !self.drops {
            self.sent += sink?.send(&self.spill[self.sent..])?;
            if self.sent < self.spill.len() {
                return Some(false);
            }
        }
        // Gives the memory back: an idle session holds no buffer.
        self.spill = Vec::new();
        self.sent = 0;
        Some(true)
    }

    /// Sends fresh bytes, and holds back what the receiver does not take.
    /// Returns `None` if its connection broke.
    pub fn pass(&mut self, sink: Option<&Side>, bytes: &[u8]) -> Option<()> {
        if self.drops {
            return Some(());
        }
        let sent = sink?.send(bytes)?;
        self.spill.extend_from_slice(&bytes[sent..]);
        Some(())
    }
}

/// See the module.
pub struct Connection {
    /// Tells late completions of an earlier owner of this index.
    pub generation: u32,
    /// Decides.
    pub session: Session,
    /// The listener's place in the configuration.
    pub listener: usize,
    /// The client's address.
    pub source: Source,
    /// Its entry in the ledger; none without a client.
    pub entry: Option<Entry>,
    /// None for a cancel of gate's own.
    pub client: Option<Side>,
    /// From the dial on.
    pub backend: Option<Side>,
    /// How the sockets are driven.
    pub mode: Mode,
    /// Client to backend.
    pub up: Pipe,
    /// Backend to client.
    pub down: Pipe,
    /// The deadline in force, as the timers know it.
    pub deadline: Option<Instant>,
    /// When it was accepted.
    pub since: Instant,
    /// Bytes passed on, by [`Direction`].
    pub relayed: [u64; 2],
    /// When bytes last went either way.
    pub active: Instant,
    /// When the backend was dialled.
    pub dialled: Instant,
    /// The dial failed before there was anything to poll.
    pub dial_error: Option<ConnectFailure>,
    /// The backend's place in the configuration.
    pub backend_index: usize,
    /// End the client's connection with RST.
    pub reset_client: bool,
    /// A send to the backend failed before it had ended: that took the error off
    /// the socket, whose next read then looks like an orderly end.
    pub backend_broke: bool,
    /// Waits in the worker's queue of work left over.
    pub queued: bool,
    /// Descriptors it holds of those that sessions may hold.
    pub fds: u64,
    /// Lives on the worker's spare descriptor.
    pub on_spare: bool,
    /// Was refused because descriptors ran out.
    pub on_reserve: bool,
    /// Was evicted while pending.
    pub evicted: bool,
}

impl Connection {
    /// A connection with no socket yet.
    pub fn new(session: Session, listener: usize, source: Source, now: Instant) -> Self {
        Self {
            generation: 0,
            session,
            listener,
            source,
            entry: None,
            client: None,
            backend: None,
            mode: Mode::Startup,
            up: Pipe::default(),
            down: Pipe::default(),
            deadline: None,
            since: now,
            relayed: [0; 2],
            active: now,
            dialled: now,
            dial_error: None,
            backend_index: 0,
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
    pub fn side(&mut self, kind: Kind) -> &mut Option<Side> {
        match kind {
            Kind::Client => &mut self.client,
            _ => &mut self.backend,
        }
    }

    /// One direction's pipe, sender and receiver.
    pub fn direction(
        &mut self,
        direction: Direction,
    ) -> (&mut Pipe, Option<&mut Side>, Option<&Side>) {
        let client = self.client.as_mut();
        let backend = self.backend.as_mut().filter(|side| !side.retired);
        match direction {
            Direction::ToBackend => (&mut self.up, client, backend.map(|side| &*side)),
            Direction::ToClient => (&mut self.down, backend, client.map(|side| &*side)),
        }
    }

    /// Whether every poll has come to its end, so that all may be closed.
    pub fn is_quiet(&self) -> bool {
        let quiet = |side: &Option<Side>| {
            side.as_ref()
                .is_none_or(|side| side.poll == PollState::Idle)
        };
        quiet(&self.client) && quiet(&self.backend)
    }
}
