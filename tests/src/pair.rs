//! Sessions of which a test holds both ends, and bytes whose order can be checked.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::host;
use crate::session::Session;
use crate::wire::{self, Wire, message};

/// A backend that the test plays itself, connection by connection.
#[derive(Debug)]
pub struct HeldBackend {
    listener: TcpListener,
}

/// An admitted session, past ReadyForQuery, when bytes need to be no messages.
#[derive(Debug)]
pub struct Pair {
    /// The client's end.
    pub client: TcpStream,
    /// The backend's end.
    pub backend: TcpStream,
}

impl HeldBackend {
    /// Listens on 127.0.0.1.
    ///
    /// # Errors
    /// When the port is busy.
    pub fn start() -> Result<Self> {
        Self::of(free_listener()?)
    }

    /// Listens on an address.
    ///
    /// # Errors
    /// When it is busy or not of this machine.
    pub fn on(address: SocketAddr) -> Result<Self> {
        Self::of(TcpListener::bind(address)?)
    }

    fn of(listener: TcpListener) -> Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self { listener })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// What getsockname(2) says.
    pub fn address(&self) -> Result<SocketAddr> {
        Ok(self.listener.local_addr()?)
    }

    /// The next connection, accepted.
    ///
    /// # Errors
    /// When none comes in ten seconds.
    pub fn accept(&self) -> Result<TcpStream> {
        let deadline = Instant::now() + wire::READ_LIMIT;
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    patient(&stream)?;
                    return Ok(stream);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
            ensure!(Instant::now() < deadline, "nobody connects to the backend");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Closes the connections that wait, such as cancels of gate's own.
    pub fn forget(&self) {
        while self.listener.accept().is_ok() {}
    }

    /// Opens a session through gate at `address`. One at a time.
    ///
    /// # Errors
    /// When a step of the login fails.
    pub fn open(&self, address: SocketAddr, user: &str, database: &str) -> Result<Pair> {
        let mut client = Wire::connect(address)?;
        client.send(&wire::login(user, database))?;
        let mut backend = self.accept()?;
        welcome(&mut backend, &wire::login(user, database))?;
        let client = Session::finish(client)?.wire.stream().try_clone()?;
        patient(&client)?;
        Ok(Pair { client, backend })
    }
}

/// A listener on 127.0.0.1.
///
/// # Errors
/// When it cannot be bound.
pub fn free_listener() -> Result<TcpListener> {
    let address = (Ipv4Addr::LOCALHOST, host::free_port());
    TcpListener::bind(address).with_context(|| format!("bind {address:?}"))
}

/// Reads the startup packet, which must be this one, and lets the client in.
///
/// # Errors
/// When it differs, or does not come.
pub fn welcome(backend: &mut TcpStream, expected: &[u8]) -> Result<()> {
    let (head, body) = expected.split_at(8);
    for part in [head, body] {
        // A CancelRequest is shorter: its first bytes say so.
        let mut packet = vec![0; part.len()];
        backend.read_exact(&mut packet).context("startup packet")?;
        ensure!(packet == part, "another packet: {packet:?}");
    }
    let mut answer = message(b'R', &[0; 4]);
    answer.extend(message(b'K', &[0, 0, 0, 7, 1, 2, 3, 4]));
    answer.extend(message(b'Z', b"I"));
    Ok(backend.write_all(&answer)?)
}

/// Long deadlines, so that a test on a busy machine ends and says why.
fn patient(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(30)))?;
    stream.set_write_timeout(Some(Duration::from_secs(30)))
}

/// An endless stream of bytes that its seed determines.
#[derive(Debug)]
pub struct Pattern {
    block: Vec<u8>,
    /// Bytes sent or checked so far.
    pub position: usize,
}

/// A prime: no size of a buffer, page or pipe divides it.
const PERIOD: usize = 524_287;

impl Pattern {
    /// The stream of a seed, from its beginning.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let block = std::iter::repeat_with(|| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        });
        Self {
            block: block.take(PERIOD).collect(),
            position: 0,
        }
    }

    /// Sends the next bytes.
    ///
    /// # Errors
    /// What send says.
    pub fn send(&mut self, mut stream: &TcpStream, mut count: usize) -> io::Result<()> {
        while count > 0 {
            let chunk = self.next(count);
            let sent = stream.write(chunk)?;
            self.position += sent;
            count -= sent;
        }
        Ok(())
    }

    /// Receives the next bytes, which must be these.
    ///
    /// # Errors
    /// A byte differs, or the stream ends.
    pub fn receive(&mut self, stream: &TcpStream, count: usize) -> Result<()> {
        let end = self.position + count;
        while self.position < end {
            ensure!(self.read(stream, end)?, "ends at {}", self.position);
        }
        Ok(())
    }

    /// Receives up to FIN; returns how many bytes of the pattern came in all.
    ///
    /// # Errors
    /// A byte differs, or the stream ends in another way.
    pub fn receive_all(&mut self, stream: &TcpStream) -> Result<usize> {
        while self.read(stream, usize::MAX)? {}
        Ok(self.position)
    }

    /// Receives up to RST; returns how many bytes of the pattern came in all.
    ///
    /// # Errors
    /// A byte differs, or the stream ends in another way.
    pub fn receive_to_reset(&mut self, stream: &TcpStream) -> Result<usize> {
        loop {
            match self.read(stream, usize::MAX) {
                Ok(true) => {}
                Ok(false) => bail!("FIN after {} bytes", self.position),
                Err(error) => {
                    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
                    if kind == Some(io::ErrorKind::ConnectionReset) {
                        return Ok(self.position);
                    }
                    return Err(error);
                }
            }
        }
    }

    /// Reads once; false is the end.
    fn read(&mut self, mut stream: &TcpStream, end: usize) -> Result<bool> {
        let mut buffer = vec![0; (end - self.position).min(256 << 10)];
        let count = stream.read(&mut buffer)?;
        let mut got = &buffer[..count];
        while !got.is_empty() {
            let expected = self.next(got.len()).len();
            let (now, later) = got.split_at(expected);
            ensure!(
                self.next(expected) == now,
                "other bytes after {}",
                self.position
            );
            self.position += expected;
            got = later;
        }
        Ok(count > 0)
    }

    fn next(&self, count: usize) -> &[u8] {
        let start = self.position % PERIOD;
        &self.block[start..(start + count).min(PERIOD)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_sees_one_wrong_byte_and_a_missing_one() -> Result<()> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        for (skipped, seed) in [(0, 1), (1, 1), (0, 2)] {
            let sender = TcpStream::connect(listener.local_addr()?)?;
            let (receiver, _) = listener.accept()?;
            let mut pattern = Pattern::new(seed);
            pattern.position = skipped;
            pattern.send(&sender, 5000)?;
            drop(sender);
            let seen = Pattern::new(1).receive_all(&receiver);
            assert_eq!(seen.is_ok(), (skipped, seed) == (0, 1), "{seen:?}");
        }
        Ok(())
    }
}
