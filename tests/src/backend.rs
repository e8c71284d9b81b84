//! Scripted backends: what a PostgreSQL in trouble does to gate.

use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use socket2::{Domain, SockRef, Socket, Type};

use crate::wire::{self, message};

/// What the backend does with a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Script {
    /// Lets everybody in and answers each query with its own text.
    Trusting,
    /// As `Trusting`, but never answers a query and does not end at FIN or
    /// CancelRequest: only [`FakeBackend::release`] ends it.
    Stubborn,
    /// Lets everybody in, then neither reads nor closes: thousands cost no thread.
    Parks,
    /// Reads the startup packet and says nothing more.
    Silent,
    /// Reads the startup packet and resets.
    Resets,
    /// Reads the startup packet and closes without a word.
    Closes,
    /// Answers the startup packet with FATAL 53300.
    Full,
}

#[derive(Debug)]
struct State {
    script: Mutex<Script>,
    startups: Mutex<Vec<Vec<u8>>>,
    cancels: Mutex<Vec<Vec<u8>>>,
    parked: Mutex<Vec<TcpStream>>,
    accepted: AtomicUsize,
    open: AtomicUsize,
    stop: AtomicBool,
    released: AtomicBool,
}

/// A listener on 127.0.0.1 with a script; stops when dropped.
#[derive(Debug)]
pub struct FakeBackend {
    address: SocketAddr,
    state: Arc<State>,
}

impl FakeBackend {
    /// Starts on a port of its own.
    ///
    /// # Errors
    /// When no socket can be made.
    pub fn start(script: Script) -> Result<Self> {
        Self::start_on(crate::host::free_port(), script)
    }

    /// Starts on a port where so far nobody answered.
    ///
    /// # Errors
    /// When the port is busy.
    pub fn start_on(port: u16, script: Script) -> Result<Self> {
        let address: SocketAddr = (Ipv4Addr::LOCALHOST, port).into();
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.bind(&address.into()).context("bind the backend")?;
        socket.listen(4096)?;
        let listener: TcpListener = socket.into();
        let state = Arc::new(State {
            script: Mutex::new(script),
            startups: Mutex::default(),
            cancels: Mutex::default(),
            parked: Mutex::default(),
            accepted: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            released: AtomicBool::new(false),
        });
        let shared = Arc::clone(&state);
        thread::spawn(move || accept_loop(&listener, &shared));
        Ok(Self { address, state })
    }

    /// Where it listens.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes the script for connections to come.
    pub fn switch(&self, script: Script) {
        *lock(&self.state.script) = script;
    }

    /// Ends the connections of a stubborn backend, and those that are parked.
    pub fn release(&self) {
        lock(&self.state.parked).clear();
        self.state.released.store(true, Ordering::SeqCst);
    }

    /// Answers one query of each connection that is parked; returns how many.
    ///
    /// # Errors
    /// When one sends none.
    pub fn answer_parked(&self) -> io::Result<usize> {
        let mut parked = lock(&self.state.parked);
        for stream in parked.iter_mut() {
            stream.set_read_timeout(Some(wire::READ_LIMIT))?;
            stream.read_exact(&mut [0])?;
            let body = read_packet(stream)?;
            let text = &body[4..body.len().saturating_sub(1).max(4)];
            io::Write::write_all(stream, &echo(text))?;
        }
        Ok(parked.len())
    }

    /// Connections accepted so far.
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.state.accepted.load(Ordering::SeqCst)
    }

    /// Connections that this side has not closed.
    #[must_use]
    pub fn open(&self) -> usize {
        self.state.open.load(Ordering::SeqCst)
    }

    /// The startup packets so far, whole.
    #[must_use]
    pub fn startups(&self) -> Vec<Vec<u8>> {
        lock(&self.state.startups).clone()
    }

    /// The CancelRequests so far, whole.
    #[must_use]
    pub fn cancels(&self) -> Vec<Vec<u8>> {
        lock(&self.state.cancels).clone()
    }
}

impl Drop for FakeBackend {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        // Wakes the accept loop, which then sees `stop`.
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accept_loop(listener: &TcpListener, state: &Arc<State>) {
    for stream in listener.incoming() {
        if state.stop.load(Ordering::SeqCst) {
            return;
        }
        let Ok(stream) = stream else { continue };
        state.accepted.fetch_add(1, Ordering::SeqCst);
        state.open.fetch_add(1, Ordering::SeqCst);
        let shared = Arc::clone(state);
        // Hundreds at a time: a small stack each.
        let started = thread::Builder::new().stack_size(128 << 10).spawn(move || {
            let _ = serve(stream, &shared);
            shared.open.fetch_sub(1, Ordering::SeqCst);
        });
        if started.is_err() {
            state.open.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

fn serve(mut stream: TcpStream, state: &State) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut first = read_packet(&mut stream)?;
    if first == wire::GSSENC_REQUEST {
        io::Write::write_all(&mut stream, b"N")?;
        first = read_packet(&mut stream)?;
    }
    if first.get(4..8) == Some(&wire::CANCEL_CODE.to_be_bytes()) {
        lock(&state.cancels).push(first);
        return Ok(());
    }
    lock(&state.startups).push(first);
    let script = *lock(&state.script);
    match script {
        Script::Trusting | Script::Stubborn => {
            welcome(&mut stream)?;
            converse(&mut stream, state, script)
        }
        Script::Parks => {
            welcome(&mut stream)?;
            lock(&state.parked).push(stream);
            Ok(())
        }
        Script::Silent => wait_for_end(&mut stream),
        Script::Resets => SockRef::from(&stream).set_linger(Some(Duration::ZERO)),
        Script::Closes => Ok(()),
        Script::Full => {
            let body = b"SFATAL\0VFATAL\0C53300\0Msorry, too many clients already\0\0";
            io::Write::write_all(&mut stream, &message(b'E', body))
        }
    }
}

/// A packet without a type byte, its length included.
fn read_packet(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut packet = vec![0; 4];
    stream.read_exact(&mut packet)?;
    let length = u32::from_be_bytes([packet[0], packet[1], packet[2], packet[3]]);
    packet.resize((length as usize).clamp(4, 1 << 20), 0);
    stream.read_exact(&mut packet[4..])?;
    Ok(packet)
}

fn welcome(stream: &mut TcpStream) -> io::Result<()> {
    let mut answer = message(b'R', &[0; 4]);
    answer.extend(message(b'S', b"server_version\0fake\0"));
    answer.extend(message(b'K', &[0, 0, 0, 7, 1, 2, 3, 4]));
    answer.extend(message(b'Z', b"I"));
    io::Write::write_all(stream, &answer)
}

fn converse(stream: &mut TcpStream, state: &State, script: Script) -> io::Result<()> {
    loop {
        let mut tag = [0];
        if stream.read(&mut tag)? == 0 {
            break;
        }
        let body = read_packet(stream)?;
        match (tag[0], script) {
            (b'X', Script::Trusting) => return Ok(()),
            (b'Q', Script::Trusting) => {
                let text = &body[4..body.len().saturating_sub(1).max(4)];
                io::Write::write_all(stream, &echo(text))?;
            }
            _ => {}
        }
    }
    while script == Script::Stubborn
        && !state.released.load(Ordering::SeqCst)
        && !state.stop.load(Ordering::SeqCst)
    {
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// One row of one column that holds the query's own text.
fn echo(text: &[u8]) -> Vec<u8> {
    let mut description = 1_u16.to_be_bytes().to_vec();
    description.extend_from_slice(b"echo\0");
    // Table, column, type `text`, length, modifier, text format.
    description.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 25]);
    description.extend_from_slice(&[0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0]);
    let mut row = 1_u16.to_be_bytes().to_vec();
    row.extend_from_slice(&(text.len() as u32).to_be_bytes());
    row.extend_from_slice(text);
    let mut answer = message(b'T', &description);
    answer.extend(message(b'D', &row));
    answer.extend(message(b'C', b"SELECT 1\0"));
    answer.extend(message(b'Z', b"I"));
    answer
}

fn wait_for_end(stream: &mut TcpStream) -> io::Result<()> {
    let mut buffer = [0; 256];
    while stream.read(&mut buffer)? > 0 {}
    Ok(())
}
