//! A thousand clients that ask for endless results and never read them, beside
//! sixteen that want to be served.

use std::io::{ErrorKind, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gate_tests::backend::{FakeBackend, Script};
use gate_tests::crowd;
use gate_tests::gate::Gate;
use gate_tests::kernel::net::sysctl;
use gate_tests::pair::{free_listener, welcome};
use gate_tests::suite::Plane;
use gate_tests::wire;

use crate::Test;

pub const TESTS: &[Test] = &[(
    "a_thousand_readers_that_never_read_hold_up_nobody",
    never_read,
)];

const SOON: Duration = Duration::from_secs(5);

fn joined<T>(handle: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    handle.join().ok().context("a thread panicked")?
}

/// A backend that answers a login with a flood that has no end.
struct Flood {
    address: SocketAddr,
    over: Arc<AtomicBool>,
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

impl Flood {
    /// One thread for all: a socket that takes no more is tried again later.
    fn start() -> Result<Self> {
        let listener = free_listener()?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let over = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&over);
        thread::spawn(move || {
            let login = wire::login("app", "prod");
            let row = wire::message(b'D', &[b'x'; 16_000]);
            // With each, how much of a row it has.
            let mut open: Vec<(TcpStream, usize)> = Vec::new();
            while !until.load(Ordering::Relaxed) {
                while let Ok((mut stream, _)) = listener.accept() {
                    let ready = stream.set_nonblocking(false).is_ok()
                        && welcome(&mut stream, &login).is_ok()
                        && stream.set_nonblocking(true).is_ok();
                    if ready {
                        open.push((stream, 0));
                    }
                }
                open.retain_mut(|(stream, sent)| match stream.write(&row[*sent..]) {
                    Ok(count) => {
                        *sent = (*sent + count) % row.len();
                        true
                    }
                    Err(error) => error.kind() == ErrorKind::WouldBlock,
                });
                thread::sleep(Duration::from_millis(5));
            }
        });
        Ok(Self { address, over })
    }
}

/// Each side keeps its bytes in buffers of its own: all of them together must
/// leave the machine's memory for TCP to others.
fn small_buffers() -> Result<()> {
    sysctl("net/ipv4/tcp_wmem", "4096 16384 65536")?;
    sysctl("net/ipv4/tcp_rmem", "4096 65536 65536")
}

fn never_read() -> Result<()> {
    const STALLED: usize = 1000;
    small_buffers()?;
    let flood = Flood::start()?;
    let live = FakeBackend::start(Script::Trusting)?;
    let settings = format!(
        "[limits]\nmax_connections = 2000\n[workers]\ncount = 2\n\
         [backend.live]\naddress = \"{}\"\n[database.stage]\nbackend = \"live\"",
        live.address()
    );
    let gate = Gate::start(Plane::Kernel, flood.address, &settings)?;
    let before = gate.usage()?.resident_bytes;
    let storm = crowd::storm(gate.address(), STALLED, "app", "prod");
    ensure!(
        storm.sessions.len() == STALLED,
        "{:?}",
        storm.failures.first()
    );
    let end = Instant::now() + Duration::from_secs(3);
    let slowest = thread::scope(|scope| -> Result<Duration> {
        let clients: Vec<_> = (0..16)
            .map(|number| {
                let gate = &gate;
                scope.spawn(move || -> Result<Duration> {
                    let mut session = gate.open("app", "stage")?;
                    let mut all = Vec::new();
                    let own = format!("client {number}");
                    while Instant::now() < end {
                        let start = Instant::now();
                        ensure!(session.value(&own)? == own, "another client's bytes");
                        all.push(start.elapsed());
                    }
                    all.sort();
                    ensure!(all.len() >= 20, "{} answers in 3 s", all.len());
                    Ok(all[all.len() - 2])
                })
            })
            .collect();
        let mut slowest = Duration::ZERO;
        for client in clients {
            slowest = slowest.max(joined(client)?);
        }
        Ok(slowest)
    })?;
    let grown = gate.usage()?.resident_bytes.saturating_sub(before);
    println!("slowest answer {slowest:?}, gate grew by {grown} bytes");
    ensure!(slowest < Duration::from_secs(1), "{slowest:?}");
    ensure!(grown < STALLED as u64 * (128 << 10), "gate grew by {grown}");
    // One of them begins to read: it gets whole messages in order.
    let mut sessions = storm.sessions;
    let mut reader = sessions.swap_remove(500);
    for _ in 0..200 {
        let row = reader.wire.message()?.context("the flood has no end")?;
        ensure!(row.tag == b'D' && row.body.iter().all(|byte| *byte == b'x'));
    }
    // Their backend does not end at a FIN.
    drop((sessions, reader, flood));
    gate.wait_empty(SOON * 2)
}
