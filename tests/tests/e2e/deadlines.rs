//! Each deadline, as a client or an operator sees it: never early, and late by
//! at most 100 ms.

use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gate_tests::backend::{FakeBackend, Script};
use gate_tests::gate::{Gate, Plan};
use gate_tests::host;
use gate_tests::kernel::net::connect_nonblocking;
use gate_tests::pair::{HeldBackend, Pair};
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire::{self, Wire};
use socket2::{Domain, SockAddr, Socket, Type};

const SOON: Duration = Duration::from_secs(3);
/// Every deadline of these tests.
const AFTER: Duration = Duration::from_millis(500);
/// How much later it may be.
const LATE: Duration = Duration::from_millis(100);
/// The machine is busy: the best of so many is the proof.
const TRIES: usize = 3;

pub fn register(suite: &mut Suite) {
    suite.local("deadline_of_startup_is_exact", startup);
    suite.local("deadline_of_connect_is_exact", connect);
    suite.local(
        "deadline_of_connect_is_exact_on_a_full_unix_socket",
        connect_unix,
    );
    suite.local("deadline_of_auth_is_exact", auth);
    suite.local("deadline_of_cancel_is_exact", cancel);
    suite.local("deadline_of_idle_is_exact", idle);
    suite.local("deadline_of_half_close_is_exact", half_close);
    suite.local("deadline_of_abandoned_is_exact", abandoned);
    suite.local("deadline_of_drain_is_exact", drain);
}

fn settings(name: &str) -> String {
    format!(
        "[workers]\ncount = 1\n[timeouts]\n{name} = \"{}ms\"",
        AFTER.as_millis()
    )
}

/// Has `measure` tell how long it took, a few times. It begins to count before
/// gate can.
fn exact(mut measure: impl FnMut() -> Result<Duration>) -> Result<()> {
    let mut all = Vec::new();
    for _ in 0..TRIES {
        let took = measure()?;
        ensure!(took >= AFTER, "early: {took:?}");
        all.push(took);
    }
    let best = all.iter().min().context("no tries")?;
    ensure!(*best <= AFTER + LATE, "late: {all:?}");
    Ok(())
}

fn startup(stage: &Stage) -> Result<()> {
    let gate = Gate::start(stage.plane, stage.postgres.address(), &settings("startup"))?;
    exact(|| {
        let start = Instant::now();
        let mut wire = Wire::connect(gate.address())?;
        wire.send(&wire::SSL_REQUEST[..5])?;
        assert_eq!(wire.rest(SOON)?, b"");
        Ok(start.elapsed())
    })
}

/// An address that drops every SYN: its backlog is full and nobody accepts.
fn full_backlog() -> Result<(SocketAddr, Socket, Vec<Socket>)> {
    let address: SocketAddr = (Ipv4Addr::LOCALHOST, host::free_port()).into();
    let listener = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    listener.set_reuse_address(true)?;
    listener.bind(&address.into())?;
    listener.listen(0)?;
    let fillers: Result<Vec<_>, _> = (0..4).map(|_| connect_nonblocking(address)).collect();
    let fillers = fillers?;
    thread::sleep(Duration::from_millis(50));
    let refused = TcpStream::connect_timeout(&address, Duration::from_millis(200));
    ensure!(refused.is_err(), "the backlog is not full");
    Ok((address, listener, fillers))
}

fn connect(stage: &Stage) -> Result<()> {
    let (address, _listener, _fillers) = full_backlog()?;
    let gate = Gate::start(stage.plane, address, &settings("connect"))?;
    exact(|| refused_after(&gate))?;
    let timeouts = [("reason", "timeout")];
    let counted = gate
        .metrics()?
        .sum("gate_backend_connect_failures_total", &timeouts);
    assert_eq!(counted, TRIES as f64);
    gate.wait_empty(SOON)
}

/// Nothing can be polled there: the dial is tried again and again.
fn connect_unix(stage: &Stage) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join(".s.PGSQL.5432");
    let listener = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    listener.bind(&SockAddr::unix(&path)?)?;
    listener.listen(0)?;
    let _filler = UnixStream::connect(&path)?;
    let mut plan = Plan::new(stage.plane, stage.postgres.address(), &settings("connect"));
    plan.backend = path.display().to_string();
    let gate = Gate::start_plan(plan)?;
    exact(|| refused_after(&gate))?;
    gate.wait_empty(SOON)
}

/// How long it takes until a client is told that the server does not answer.
fn refused_after(gate: &Gate) -> Result<Duration> {
    let start = Instant::now();
    assert_eq!(gate.refused("app", "prod")?.code(), "57P03");
    Ok(start.elapsed())
}

fn auth(stage: &Stage) -> Result<()> {
    let silent = FakeBackend::start(Script::Silent)?;
    let gate = Gate::start(stage.plane, silent.address(), &settings("auth"))?;
    exact(|| refused_after(&gate))?;
    gate.wait_empty(SOON)
}

fn cancel(stage: &Stage) -> Result<()> {
    // Accepts in its backlog, and neither reads nor closes.
    let deaf = TcpListener::bind((Ipv4Addr::LOCALHOST, host::free_port()))?;
    let gate = Gate::start(stage.plane, deaf.local_addr()?, &settings("cancel"))?;
    exact(|| {
        let start = Instant::now();
        let mut wire = Wire::connect(gate.address())?;
        wire.send(&wire::cancel(1, b"nope"))?;
        assert_eq!(wire.rest(SOON)?, b"");
        Ok(start.elapsed())
    })?;
    gate.wait_empty(SOON)
}

fn idle(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let gate = Gate::start(stage.plane, backend.address(), &settings("idle"))?;
    exact(|| {
        let mut session = gate.open("app", "prod")?;
        // Bytes put it off.
        thread::sleep(AFTER / 2);
        let start = Instant::now();
        session.query("one more")?;
        let end = session.wire.rest(SOON)?;
        ensure!(end.is_empty(), "{end:?}");
        Ok(start.elapsed())
    })?;
    gate.wait_empty(SOON)
}

fn half_close(stage: &Stage) -> Result<()> {
    let held = HeldBackend::start()?;
    let gate = Gate::start(stage.plane, held.address()?, &settings("half_close"))?;
    exact(|| {
        let Pair {
            mut client,
            backend,
        } = held.open(gate.address(), "app", "prod")?;
        let start = Instant::now();
        client.shutdown(std::net::Shutdown::Write)?;
        assert_eq!(client.read(&mut [0; 16])?, 0);
        let took = start.elapsed();
        // The cancel that gate sends.
        drop((backend, held.accept()?));
        Ok(took)
    })?;
    gate.wait_empty(SOON)
}

fn abandoned(stage: &Stage) -> Result<()> {
    let held = HeldBackend::start()?;
    let gate = Gate::start(stage.plane, held.address()?, &settings("abandoned"))?;
    exact(|| {
        let Pair { client, backend } = held.open(gate.address(), "app", "prod")?;
        let start = Instant::now();
        socket2::SockRef::from(&client).set_linger(Some(Duration::ZERO))?;
        drop(client);
        gate.wait_connections(SOON, "the slot is back", |now| now.active() == 0)?;
        let took = start.elapsed();
        drop(backend);
        // The cancel that gate sent.
        held.forget();
        Ok(took)
    })?;
    let reasons = [("reason", "abandoned_timeout")];
    let counted = gate.metrics()?.sum("gate_sessions_closed_total", &reasons);
    assert_eq!(counted, TRIES as f64);
    Ok(())
}

fn drain(stage: &Stage) -> Result<()> {
    exact(|| {
        let settings = settings("drain");
        let mut gate = Gate::start(stage.plane, stage.postgres.address(), &settings)?;
        let _open = gate.open("app", "prod")?;
        let start = Instant::now();
        gate.signal(libc::SIGTERM)?;
        assert_eq!(gate.wait_exit(SOON)?.code(), Some(0));
        Ok(start.elapsed())
    })
}
