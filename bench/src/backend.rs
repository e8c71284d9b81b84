//! A server that speaks enough of the PostgreSQL protocol to be relayed to, and
//! costs as little as it can: everybody is let in, requests say what they want
//! in answer (see [`wire`]). It listens by TCP and on a unix socket.

mod inbox;
mod listen;

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use slab::Slab;
use socket2::Socket;

use crate::load::crew::{Place, bind};
use crate::load::event_loop::EventLoop;
use crate::load::streams::{Source, Turn, discard};
use crate::peer::scratch::Scratch;
use crate::wire;
use inbox::{Asked, Inbox};

/// Before the next accept when one failed for want of something.
const BREATH: Duration = Duration::from_millis(1);
const READ_BYTES: usize = 256 * 1024;
/// A packet that claims to be longer is no startup packet
/// (`MAX_STARTUP_PACKET_LENGTH`, src/include/libpq/pqcomm.h).
const STARTUP_BYTES_MAX: usize = 10_004;
/// Epoll's number of the listening socket.
const TCP: usize = usize::MAX;
/// Of the one on disk.
const UNIX: usize = usize::MAX - 1;

/// The server; ends when dropped.
pub struct Backend {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its unix socket, named as PostgreSQL names them.
    pub socket: PathBuf,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Where that is.
    _folder: Scratch,
}

#[derive(Default)]
struct Shared {
    over: AtomicBool,
    uploaded: AtomicU64,
}

impl Backend {
    /// Starts a thread `backend-N` for each CPU.
    ///
    /// # Errors
    /// It cannot listen, or no threads are left.
    pub fn start(listen: IpAddr, place: &Place) -> Result<Self> {
        let first = listen::tcp((listen, 0).into()).context("the backend cannot listen")?;
        let address = first.local_addr()?;
        let address = address.as_socket().context("an address of TCP")?;
        let folder = Scratch::new("backend")?;
        let socket = folder.path(&format!(".s.PGSQL.{}", address.port()));
        let unix = listen::unix(&socket)
            .with_context(|| format!("the backend cannot listen on {}", socket.display()))?;
        let mut backend = Self {
            address,
            socket,
            shared: Arc::default(),
            threads: Vec::new(),
            _folder: folder,
        };
        let mut first = Some(first);
        for index in 0..place.threads() {
            let tcp = first.take().map_or_else(|| listen::tcp(address), Ok)?;
            let listeners = [(TCP, tcp), (UNIX, unix.try_clone()?)];
            let shared = Arc::clone(&backend.shared);
            let cpu = place.cpus.get(index).copied();
            let thread = std::thread::Builder::new().name(format!("backend-{index}"));
            backend.threads.push(thread.spawn(move || {
                let ended = bind(cpu).and_then(|()| Thread::new(listeners, &shared)?.run());
                if let Err(error) = ended {
                    eprintln!("gate-bench: the backend ended: {error:#}");
                }
            })?);
        }
        Ok(backend)
    }

    /// Whether all of it still runs.
    ///
    /// # Errors
    /// A thread of it has ended; it has said why.
    pub fn ensure_runs(&self) -> Result<()> {
        let ended = self.threads.iter().any(JoinHandle::is_finished);
        anyhow::ensure!(!ended, "a thread of the backend has ended");
        Ok(())
    }

    /// Bytes of uploads so far, over all sessions.
    #[must_use]
    pub fn uploaded(&self) -> u64 {
        self.shared.uploaded.load(Ordering::Relaxed)
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // It has said why, if it panicked.
            let _ = thread.join();
        }
    }
}

/// No descriptors or no memory just now.
fn is_shortage(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM]
        .map(Some)
        .contains(&code)
}

struct Thread<'a> {
    /// By epoll's number.
    listeners: [(usize, Socket); 2],
    shared: &'a Shared,
    events: EventLoop,
    sessions: Slab<Session>,
    /// Sessions that can go on at once, whatever epoll tells.
    ready: VecDeque<usize>,
    replies: BTreeMap<usize, Arc<[u8]>>,
    source: Source,
    buffer: Vec<u8>,
    /// Somebody may wait, though epoll told of it already.
    ready_to_accept: bool,
}

struct Session {
    stream: Socket,
    /// A unix socket cannot throw bytes away without copying them.
    is_unix: bool,
    state: State,
    /// Of a reply, what the socket did not take yet.
    unsent: Option<(Arc<[u8]>, usize)>,
}

enum State {
    /// No startup packet yet, or not all of it.
    Startup(Vec<u8>),
    /// Messages come in.
    Messages(Inbox),
    /// An endless result goes out.
    Download { offset: u64 },
    /// What comes in is counted and thrown away.
    Upload,
}

impl<'a> Thread<'a> {
    fn new(listeners: [(usize, Socket); 2], shared: &'a Shared) -> Result<Self> {
        let events = EventLoop::new()?;
        for (token, listener) in &listeners {
            events.add(listener, *token)?;
        }
        Ok(Self {
            listeners,
            shared,
            events,
            sessions: Slab::new(),
            ready: VecDeque::new(),
            replies: BTreeMap::new(),
            source: Source::new()?,
            buffer: vec![0; READ_BYTES],
            ready_to_accept: false,
        })
    }

    fn run(mut self) -> Result<()> {
        let mut told = Vec::new();
        while !self.shared.over.load(Ordering::Relaxed) {
            let until = (!self.ready.is_empty()).then(std::time::Instant::now);
            self.events.wait(until, &mut told)?;
            if std::mem::take(&mut self.ready_to_accept) {
                self.accept_all()?;
            }
            for event in &told {
                match event.token {
                    TCP | UNIX => self.accept_all()?,
                    token => self.serve(token),
                }
            }
            for _ in 0..self.ready.len() {
                if let Some(token) = self.ready.pop_front() {
                    self.serve(token);
                }
            }
        }
        Ok(())
    }

    fn accept_all(&mut self) -> Result<()> {
        (0..self.listeners.len()).try_for_each(|index| self.accept(index))
    }

    fn accept(&mut self, index: usize) -> Result<()> {
        loop {
            let (number, listener) = &self.listeners[index];
            let is_unix = *number == UNIX;
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                // The load will say that it was not served; later runs will be.
                Err(error) if is_shortage(&error) => {
                    std::thread::sleep(BREATH);
                    self.ready_to_accept = true;
                    return Ok(());
                }
                Err(error) => return Err(error).context("accept"),
            };
            stream.set_nonblocking(true)?;
            let entry = self.sessions.vacant_entry();
            self.events.add(&stream, entry.key())?;
            let token = entry.key();
            entry.insert(Session {
                stream,
                is_unix,
                state: State::Startup(Vec::new()),
                unsent: None,
            });
            // The startup packet is often there already.
            self.serve(token);
        }
    }

    /// Goes on with a session; one that has ended, or speaks otherwise, is closed.
    fn serve(&mut self, token: usize) {
        let Some(session) = self.sessions.get_mut(token) else {
            return;
        };
        let mut tools = Tools {
            replies: &mut self.replies,
            source: &mut self.source,
            buffer: &mut self.buffer,
            uploaded: &self.shared.uploaded,
        };
        match session.go_on(&mut tools) {
            Ok(true) => {
                if !self.ready.contains(&token) {
                    self.ready.push_back(token);
                }
            }
            Ok(false) => {}
            Err(_) => drop(self.sessions.remove(token)),
        }
    }
}

/// What all sessions of a thread share.
struct Tools<'a> {
    replies: &'a mut BTreeMap<usize, Arc<[u8]>>,
    source: &'a mut Source,
    buffer: &'a mut [u8],
    uploaded: &'a AtomicU64,
}

impl Session {
    /// Whether it can go on at once. An error ends it.
    fn go_on(&mut self, tools: &mut Tools<'_>) -> Result<bool> {
        self.flush()?;
        loop {
            match &mut self.state {
                State::Download { offset } => {
                    return Ok(tools.source.send(&self.stream, offset)?.more);
                }
                State::Upload => {
                    let turn = if self.is_unix {
                        read_away(&mut self.stream, tools.buffer)?
                    } else {
                        discard(&self.stream)?
                    };
                    tools.uploaded.fetch_add(turn.bytes, Ordering::Relaxed);
                    return Ok(turn.more);
                }
                State::Startup(_) | State::Messages(_) => {}
            }
            // A client that does not read its reply is not read from either.
            if self.unsent.is_some() {
                return Ok(false);
            }
            let bytes = match self.stream.read(tools.buffer) {
                Ok(0) => anyhow::bail!("the client ended"),
                Ok(bytes) => bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error.into()),
            };
            let drained = bytes < tools.buffer.len();
            self.take_in(&tools.buffer[..bytes], tools.replies)?;
            let goes_on = !matches!(self.state, State::Startup(_) | State::Messages(_));
            // A short read has emptied the socket: what comes later is told again.
            if drained && !goes_on {
                return Ok(false);
            }
        }
    }

    fn take_in(
        &mut self,
        mut bytes: &[u8],
        replies: &mut BTreeMap<usize, Arc<[u8]>>,
    ) -> Result<()> {
        if let State::Startup(packet) = &mut self.state {
            packet.extend_from_slice(bytes);
            if !is_whole_startup(packet)? {
                return Ok(());
            }
            self.state = State::Messages(Inbox::default());
            return self.send(wire::welcome().into());
        }
        while let State::Messages(inbox) = &mut self.state
            && !bytes.is_empty()
        {
            let Some(asked) = inbox.take(&mut bytes)? else {
                break;
            };
            self.answer(asked, replies)?;
        }
        Ok(())
    }

    fn answer(&mut self, asked: Asked, replies: &mut BTreeMap<usize, Arc<[u8]>>) -> Result<()> {
        let Asked::Query(command) = asked else {
            anyhow::ensure!(matches!(asked, Asked::Other), "the client terminates");
            return Ok(());
        };
        if let Some(bytes) = wire::reply_bytes(&command) {
            let reply = replies.entry(bytes);
            let reply = Arc::clone(reply.or_insert_with(|| wire::reply(bytes).into()));
            return self.send(reply);
        }
        if command == wire::DOWNLOAD.as_bytes() {
            self.send(wire::copy_begins(b'H').into())?;
            self.state = State::Download { offset: 0 };
        } else if command == wire::UPLOAD.as_bytes() {
            self.send(wire::copy_begins(b'G').into())?;
            self.state = State::Upload;
        } else {
            // Such as a pool's `DISCARD ALL`.
            self.send(wire::done().into())?;
        }
        Ok(())
    }

    fn send(&mut self, bytes: Arc<[u8]>) -> Result<()> {
        anyhow::ensure!(
            self.unsent.is_none(),
            "the client does not wait for answers"
        );
        self.unsent = Some((bytes, 0));
        self.flush()
    }

    fn flush(&mut self) -> Result<()> {
        while let Some((bytes, sent)) = &mut self.unsent {
            match self.stream.write(&bytes[*sent..]) {
                Ok(written) => *sent += written,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            if *sent == bytes.len() {
                self.unsent = None;
            }
        }
        Ok(())
    }
}

/// Throws away what has come in, up to a buffer of it.
fn read_away(stream: &mut Socket, buffer: &mut [u8]) -> Result<Turn> {
    match stream.read(buffer) {
        Ok(0) => anyhow::bail!("the client ended"),
        Ok(bytes) => Ok(Turn {
            bytes: bytes as u64,
            more: true,
        }),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Turn::default()),
        Err(error) => Err(error.into()),
    }
}

fn is_whole_startup(packet: &[u8]) -> Result<bool> {
    let Some((length, _)) = packet.split_first_chunk() else {
        return Ok(false);
    };
    let length = usize::try_from(u32::from_be_bytes(*length))?;
    anyhow::ensure!(
        (8..=STARTUP_BYTES_MAX).contains(&length) && packet.len() <= length,
        "no startup packet"
    );
    Ok(packet.len() == length)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::load::session;

    #[test]
    fn it_lets_in_and_answers() {
        let backend = Backend::start(Ipv4Addr::LOCALHOST.into(), &Place::default()).unwrap();
        let mut session = session::open(backend.address).unwrap();
        session.set_nonblocking(false).unwrap();
        for (bytes, reply_bytes) in [(64, 200), (65536, 100_000)] {
            session
                .write_all(&wire::request(bytes, reply_bytes))
                .unwrap();
            let mut reply = vec![0; reply_bytes];
            session.read_exact(&mut reply).unwrap();
            assert_eq!(reply, wire::reply(reply_bytes));
        }
        session.write_all(&wire::query(wire::UPLOAD)).unwrap();
        let mut begins = [0; 8];
        session.read_exact(&mut begins).unwrap();
        session.write_all(&[7; 12345]).unwrap();
        while backend.uploaded() < 12345 {
            std::thread::yield_now();
        }
        assert_eq!(backend.uploaded(), 12345);
    }

    #[test]
    fn it_serves_a_unix_socket_too_and_removes_it() {
        let backend = Backend::start(Ipv4Addr::LOCALHOST.into(), &Place::default()).unwrap();
        let name = format!(".s.PGSQL.{}", backend.address.port());
        assert!(backend.socket.ends_with(name));
        let mut session = UnixStream::connect(&backend.socket).unwrap();
        let read = |session: &mut UnixStream, expected: Vec<u8>| {
            let mut found = vec![0; expected.len()];
            session.read_exact(&mut found).unwrap();
            assert_eq!(found, expected);
        };
        let startup = wire::startup_packet(session::USER, session::DATABASE);
        session.write_all(&startup).unwrap();
        read(&mut session, wire::welcome());
        session.write_all(&wire::request(64, 70_000)).unwrap();
        read(&mut session, wire::reply(70_000));
        session.write_all(&wire::query(wire::UPLOAD)).unwrap();
        read(&mut session, wire::copy_begins(b'G'));
        session.write_all(&vec![7; 1_000_000]).unwrap();
        while backend.uploaded() < 1_000_000 {
            std::thread::yield_now();
        }
        let socket = backend.socket.clone();
        drop(backend);
        assert!(!socket.exists());
    }
}
