//! What a worker needs of the machine that it runs on.
//!
//! Everything that is not memory of the worker's own goes through [`Machine`]:
//! sockets, the ring, pipes, the clock. [`super::Linux`] is the real one; the
//! simulator of the tests is another, so that it drives the very code that
//! serves clients.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use gate_common::abi::AdmitRequest;
use gate_common::errno::AdmitErrno;

use crate::config::Backend;

/// What an operation is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    /// A listener's accept.
    Accept = 1,
    /// Readiness of a session's client.
    Client = 2,
    /// Readiness of a session's backend.
    Backend = 3,
    /// The worker's own wake-up.
    Waker = 4,
    /// The admission of a session's client.
    Admit = 5,
}

/// Names an operation: an index with the generation it is meant for, never a
/// pointer, so that a late completion is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// What the operation is about.
    pub kind: Kind,
    /// Index in the owner's table.
    pub index: u32,
    /// Generation of that index, 24 bits.
    pub generation: u32,
}

impl Key {
    /// Bits of a generation that a key keeps.
    pub const GENERATION_BITS: u32 = 24;

    /// A key; the generation is cut to 24 bits.
    #[must_use]
    pub const fn new(kind: Kind, index: u32, generation: u32) -> Self {
        Self {
            kind,
            index,
            generation: generation & ((1 << Self::GENERATION_BITS) - 1),
        }
    }
}

/// Bits of [`Event::Ready`], as poll(2) has them.
pub mod ready {
    /// There may be bytes to read.
    pub const READ: u32 = libc::POLLIN as u32;
    /// There may be room to write.
    pub const WRITE: u32 = libc::POLLOUT as u32;
    /// There is an urgent byte, at which reads end early.
    pub const URGENT: u32 = libc::POLLPRI as u32;
    /// The peer has ended its side.
    pub const PEER_ENDED: u32 = libc::POLLRDHUP as u32;
    /// Both sides have ended.
    pub const HANG_UP: u32 = libc::POLLHUP as u32;
    /// The socket has an error.
    pub const ERROR: u32 = libc::POLLERR as u32;
}

/// How long a poll or an accept goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// One report, of what is to be read or has ended; then it is over. One
    /// connection.
    Once,
    /// Each change of readiness for reading and writing until it is cancelled,
    /// as an edge-triggered epoll does. Every connection.
    Changes,
}

/// What came of an operation.
#[derive(Debug)]
pub enum Event<S> {
    /// A connection was accepted: non-blocking, closed on exec.
    Accepted(S),
    /// Accepting failed.
    AcceptFailed(io::Error),
    /// A descriptor is ready for what the bits of [`ready`] say.
    Ready(u32),
    /// A poll ended, by cancel or by error.
    PollEnded,
    /// The kernel's answer to an admission.
    Admitted(Result<(), AdmitErrno>),
}

/// One completion.
#[derive(Debug)]
pub struct Completion<S> {
    /// The operation's key.
    pub key: Key,
    /// What came of it.
    pub event: Event<S>,
    /// Whether the operation goes on. If not, it may be armed again.
    pub more: bool,
}

/// An admission that was handed to the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// The answer comes as [`Event::Admitted`].
    InFlight,
    /// The answer is here already.
    Answered(Result<(), AdmitErrno>),
}

/// See the module. Every call returns at once, [`Machine::wait`] aside.
pub trait Machine {
    /// A bound, listening socket.
    type Listener;
    /// A connected or connecting stream socket. Its descriptor is closed by
    /// [`Machine::close`] or when it is dropped, never under an operation.
    type Socket: AsFd + fmt::Debug;
    /// A pipe of which the worker holds both ends; closed when it is dropped.
    type Pipe: fmt::Debug;

    /// Now.
    fn now(&self) -> Instant;

    /// Accepts one connection, or connections until an error ends it.
    ///
    /// # Errors
    /// The operation cannot be submitted.
    fn accept(&mut self, listener: &Self::Listener, watch: Watch, key: Key) -> io::Result<()>;

    /// Accepts one connection now.
    ///
    /// # Errors
    /// As accept(2).
    fn accept_now(&mut self, listener: &Self::Listener) -> io::Result<Self::Socket>;

    /// Reports a socket's readiness.
    ///
    /// # Errors
    /// The operation cannot be submitted.
    fn poll(&mut self, socket: &Self::Socket, watch: Watch, key: Key) -> io::Result<()>;

    /// Reports the wake-ups of the worker with this number.
    ///
    /// # Errors
    /// The operation cannot be submitted.
    fn poll_waker(&mut self, key: Key) -> io::Result<()>;

    /// Takes back all wake-ups so far.
    fn clear_waker(&mut self);

    /// Asks the kernel for a client's slots.
    ///
    /// # Errors
    /// The operation cannot be submitted.
    fn admit(
        &mut self,
        client: &Self::Socket,
        request: &AdmitRequest,
        key: Key,
    ) -> io::Result<Submitted>;

    /// Ends an operation; its last completion still comes.
    ///
    /// # Errors
    /// The operation cannot be submitted.
    fn cancel(&mut self, key: Key) -> io::Result<()>;

    /// Submits what is queued, waits for a completion or the timeout, and
    /// appends all completions there are.
    ///
    /// # Errors
    /// The ring itself failed; nothing is lost, but nothing more will come.
    fn wait(
        &mut self,
        timeout: Duration,
        out: &mut Vec<Completion<Self::Socket>>,
    ) -> io::Result<()>;

    /// Begins to connect to an address of a backend (its place in
    /// [`Backend::addresses`]).
    ///
    /// # Errors
    /// As connect(2), EINPROGRESS aside.
    fn connect(&mut self, backend: &Backend, address: usize) -> io::Result<Self::Socket>;

    /// Whether a connecting socket is connected.
    ///
    /// # Errors
    /// Why it will never be.
    fn connected(&mut self, socket: &Self::Socket) -> io::Result<bool>;

    /// The peer's address; `None` if it is gone or has none.
    fn peer(&mut self, socket: &Self::Socket) -> Option<SocketAddr>;

    /// Reads; 0 is the peer's end.
    ///
    /// # Errors
    /// As recv(2).
    fn receive(&mut self, socket: &Self::Socket, buffer: &mut [u8]) -> io::Result<usize>;

    /// Writes as much as the socket takes. With `more` the bytes may wait for
    /// what follows at once: more bytes or the end.
    ///
    /// # Errors
    /// As send(2).
    fn send(&mut self, socket: &Self::Socket, bytes: &[u8], more: bool) -> io::Result<usize>;

    /// Lets more bytes wait for a receiver that has shown that it takes them.
    fn widen(&mut self, socket: &Self::Socket);

    /// Sends FIN after all earlier bytes.
    fn end(&mut self, socket: &Self::Socket);

    /// Closes.
    fn close(&mut self, socket: Self::Socket);

    /// Closes with RST: nothing is left of the connection on this machine.
    fn reset(&mut self, socket: Self::Socket);

    /// A pipe that holds about [`super::PIPE_BYTES`].
    ///
    /// # Errors
    /// As pipe2(2), or the pipe is too small to be worth it.
    fn pipe(&mut self) -> io::Result<Self::Pipe>;

    /// Moves up to `bytes` from a socket into a pipe; 0 is the peer's end.
    ///
    /// # Errors
    /// As splice(2). EAGAIN: nothing to read, or no room in a pipe that is not
    /// empty.
    fn fill(&mut self, source: &Self::Socket, pipe: &Self::Pipe, bytes: usize)
    -> io::Result<usize>;

    /// Moves up to `bytes` from a pipe to a socket.
    ///
    /// # Errors
    /// As splice(2).
    fn drain(&mut self, pipe: &Self::Pipe, sink: &Self::Socket, bytes: usize) -> io::Result<usize>;

    /// Keeps a descriptor that can be given up when there is no other. Returns
    /// whether one is kept.
    fn keep_spare(&mut self) -> bool;

    /// Gives the kept descriptor up. Returns whether there was one.
    fn give_up_spare(&mut self) -> bool;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_generation_is_another_key() {
        assert_ne!(Key::new(Kind::Client, 1, 1), Key::new(Kind::Client, 1, 2));
    }
}
