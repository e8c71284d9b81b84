//! Bulk: endless results to clients, or endless uploads from them.
//!
//! The ends do as little as they can, so that the way between them is what is
//! measured: bytes are sent from one file in memory by sendfile(2), and thrown
//! away by the kernel (`MSG_TRUNC`) where they are received.

use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use anyhow::{Context, Result, bail};
use rustix::fs::{MemfdFlags, memfd_create, sendfile};
use rustix::io::Errno;
use socket2::SockRef;

use super::crew::{Crew, Member, Place};
use super::event_loop::EventLoop;
use super::session;
use super::tally::Tally;
use crate::wire;

/// Asked of the kernel in one call.
const BYTES_PER_CALL: usize = 1 << 20;
/// Then another stream has its turn.
const CALLS_PER_TURN: usize = 8;

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From server to client, as a result.
    Down,
    /// From client to server, as COPY FROM STDIN.
    Up,
}

/// Starts streaming; sessions are open before this returns. Downwards the tally
/// counts bytes received; upwards the backend does.
///
/// # Errors
/// A session was not let in.
pub fn start(place: &Place, target: SocketAddr, streams: usize, way: Way) -> Result<Crew> {
    let sessions = session::open_all(target, streams)?;
    Crew::start_sharing(place, sessions, move |member, mine| run(&member, mine, way))
}

fn run(member: &Member, mut streams: Vec<TcpStream>, way: Way) -> Result<Tally> {
    let mut tally = Tally::new();
    let mut events = EventLoop::new()?;
    let mut source = Source::new()?;
    let mut offsets = vec![0; streams.len()];
    for (token, stream) in streams.iter_mut().enumerate() {
        let command = match way {
            Way::Down => wire::DOWNLOAD,
            Way::Up => wire::UPLOAD,
        };
        stream.write_all(&wire::query(command))?;
        events.add(&*stream, token)?;
    }
    let mut told = Vec::new();
    // Streams that can go on at once, whatever epoll tells.
    let mut ready: Vec<usize> = (0..streams.len()).collect();
    let mut next = Vec::new();
    while !member.phase.is_over() {
        for token in ready.drain(..) {
            let stream = &streams[token];
            let turn = match way {
                Way::Down => discard(stream)?,
                Way::Up => source.send(stream, &mut offsets[token])?,
            };
            if way == Way::Down && member.phase.is_measured() {
                tally.bytes += turn.bytes;
            }
            if turn.more {
                next.push(token);
            }
        }
        std::mem::swap(&mut ready, &mut next);
        // With streams that can go on there is no time to wait.
        let until = (!ready.is_empty()).then(std::time::Instant::now);
        events.wait(until, &mut told)?;
        for event in &told {
            let wanted = match way {
                Way::Down => event.readable,
                Way::Up => event.writable,
            };
            if wanted && !ready.contains(&event.token) {
                ready.push(event.token);
            }
        }
    }
    Ok(tally)
}

/// What a stream did in its turn.
#[derive(Clone, Copy, Debug, Default)]
pub struct Turn {
    /// Moved.
    pub bytes: u64,
    /// It could have gone on.
    pub more: bool,
}

/// Throws away what has come in, without copying it.
///
/// # Errors
/// The other side has ended, or reset the connection.
pub fn discard(stream: &impl AsRawFd) -> Result<Turn> {
    let mut turn = Turn::default();
    for _ in 0..CALLS_PER_TURN {
        match truncated(stream, BYTES_PER_CALL) {
            Ok(0) => bail!("the other side ended a stream"),
            Ok(bytes) => turn.bytes += bytes as u64,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(turn),
            Err(error) => return Err(error).context("a stream broke"),
        }
    }
    turn.more = true;
    Ok(turn)
}

/// recv(2) that copies nothing: for TCP, `MSG_TRUNC` throws the bytes away (tcp(7)).
fn truncated(stream: &impl AsRawFd, bytes: usize) -> std::io::Result<usize> {
    // SAFETY: with MSG_TRUNC a TCP socket writes nothing to the address it is given
    // (tcp_recvmsg_locked copies only without the flag), so none is given.
    let received = unsafe {
        libc::recv(
            stream.as_raw_fd(),
            std::ptr::null_mut(),
            bytes,
            libc::MSG_TRUNC,
        )
    };
    usize::try_from(received).map_err(|_| std::io::Error::last_os_error())
}

/// Whole CopyData messages in memory of the kernel.
pub struct Source {
    file: OwnedFd,
    bytes: u64,
}

impl Source {
    /// Some MiB of them.
    ///
    /// # Errors
    /// No memory.
    pub fn new() -> Result<Self> {
        let data = wire::copy_data(4 << 20);
        let file = memfd_create("gate-bench-stream", MemfdFlags::CLOEXEC)?;
        let mut writer = std::fs::File::from(file);
        writer.write_all(&data)?;
        Ok(Self {
            file: writer.into(),
            bytes: data.len() as u64,
        })
    }

    /// Sends from `offset` on, over and over.
    ///
    /// # Errors
    /// The other side has ended, or reset the connection.
    pub fn send(&mut self, stream: &impl AsFd, offset: &mut u64) -> Result<Turn> {
        let mut turn = Turn::default();
        for _ in 0..CALLS_PER_TURN {
            if *offset == self.bytes {
                *offset = 0;
            }
            match sendfile(stream, &self.file, Some(offset), BYTES_PER_CALL) {
                Ok(bytes) => turn.bytes += bytes as u64,
                Err(Errno::AGAIN) => return Ok(turn),
                Err(error) => return Err(error).context("a stream broke"),
            }
        }
        turn.more = true;
        Ok(turn)
    }
}

/// Makes a reader that never reads as small as it can be, so that many of them
/// fit into the kernel's memory for TCP.
///
/// # Errors
/// Never, for a socket.
pub fn shrink(stream: &TcpStream) -> Result<()> {
    Ok(SockRef::from(stream).set_recv_buffer_size(4096)?)
}
