//! The real machine: a ring, and plain calls on sockets and pipes.

use std::fs::File;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gate_common::abi::AdmitRequest;
use rustix::net::{RecvFlags, SendFlags};
use socket2::Socket;

use super::machine::{Completion, Key, Machine, Submitted, Watch};
use crate::config::Backend;
use crate::host::{self, Pipe};
use crate::kernel;
use crate::ring::{Ring, RingError};
use crate::state::State;

/// See the module. Belongs to the thread that made it.
pub struct Linux {
    ring: Ring,
    state: Arc<State>,
    worker: usize,
    spare: Option<File>,
}

impl Linux {
    /// The machine of one worker.
    ///
    /// # Errors
    /// No ring is to be had.
    pub fn new(state: Arc<State>, worker: usize) -> Result<Self, RingError> {
        Ok(Self {
            ring: Ring::new()?,
            state,
            worker,
            spare: None,
        })
    }
}

impl Machine for Linux {
    type Listener = Socket;
    type Socket = Socket;
    type Pipe = Pipe;

    fn now(&self) -> Instant {
        Instant::now()
    }

    fn accept(&mut self, listener: &Socket, watch: Watch, key: Key) -> io::Result<()> {
        self.ring.accept(listener.as_fd(), watch, key)
    }

    fn accept_now(&mut self, listener: &Socket) -> io::Result<Socket> {
        let (socket, _) = listener.accept()?;
        // accept(2), unlike the ring's, does not pass the flag on.
        socket.set_nonblocking(true)?;
        Ok(socket)
    }

    fn poll(&mut self, socket: &Socket, watch: Watch, key: Key) -> io::Result<()> {
        self.ring.poll(socket.as_fd(), watch, key)
    }

    fn poll_waker(&mut self, key: Key) -> io::Result<()> {
        let waker = self.state.wakers[self.worker].as_fd();
        self.ring.poll(waker, Watch::Once, key)
    }

    fn clear_waker(&mut self) {
        self.state.wakers[self.worker].clear();
    }

    fn admit(
        &mut self,
        client: &Socket,
        request: &AdmitRequest,
        key: Key,
    ) -> io::Result<Submitted> {
        if self.ring.admit(client.as_fd(), request, key)? {
            Ok(Submitted::InFlight)
        } else {
            Ok(Submitted::Answered(kernel::admit(client.as_fd(), request)))
        }
    }

    fn cancel(&mut self, key: Key) -> io::Result<()> {
        self.ring.cancel(key)
    }

    fn wait(&mut self, timeout: Duration, out: &mut Vec<Completion<Socket>>) -> io::Result<()> {
        self.ring.wait(timeout, out)
    }

    fn connect(&mut self, backend: &Backend, address: usize) -> io::Result<Socket> {
        let address = backend.addresses.get(address);
        host::connect(address.ok_or(io::ErrorKind::NotFound)?, &backend.tcp)
    }

    fn connected(&mut self, socket: &Socket) -> io::Result<bool> {
        match (socket.take_error()?, socket.peer_addr()) {
            (None, peer) => Ok(peer.is_ok()),
            (Some(error), _) => Err(error),
        }
    }

    fn peer(&mut self, socket: &Socket) -> Option<SocketAddr> {
        socket.peer_addr().ok()?.as_socket()
    }

    fn receive(&mut self, socket: &Socket, buffer: &mut [u8]) -> io::Result<usize> {
        // Without the C library's cancellation points: this is the hot path.
        let (count, _) = rustix::net::recv(socket, buffer, RecvFlags::empty())?;
        Ok(count)
    }

    fn send(&mut self, socket: &Socket, bytes: &[u8], more: bool) -> io::Result<usize> {
        let flags = if more {
            SendFlags::NOSIGNAL | SendFlags::MORE
        } else {
            SendFlags::NOSIGNAL
        };
        Ok(rustix::net::send(socket, bytes, flags)?)
    }

    fn widen(&mut self, socket: &Socket) {
        host::widen(socket);
    }

    fn end(&mut self, socket: &Socket) {
        // A peer that is gone is told nothing, and a poll says so.
        let _ = socket.shutdown(Shutdown::Write);
    }

    fn close(&mut self, socket: Socket) {
        drop(socket);
    }

    fn reset(&mut self, socket: Socket) {
        // A failure leaves the orderly close.
        let _ = socket.set_linger(Some(Duration::ZERO));
        drop(socket);
    }

    fn pipe(&mut self) -> io::Result<Pipe> {
        Pipe::new(super::PIPE_BYTES)
    }

    fn fill(&mut self, source: &Socket, pipe: &Pipe, bytes: usize) -> io::Result<usize> {
        pipe.fill(source.as_fd(), bytes)
    }

    fn drain(&mut self, pipe: &Pipe, sink: &Socket, bytes: usize) -> io::Result<usize> {
        pipe.drain(sink.as_fd(), bytes)
    }

    fn keep_spare(&mut self) -> bool {
        if self.spare.is_none() {
            self.spare = File::open("/dev/null").ok();
        }
        self.spare.is_some()
    }

    fn give_up_spare(&mut self) -> bool {
        self.spare.take().is_some()
    }
}
