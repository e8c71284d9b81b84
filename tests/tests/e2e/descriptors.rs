//! A host whose descriptors run out under a running gate, and what is set on
//! gate's sockets.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gate_tests::backend::{FakeBackend, Script};
use gate_tests::gate::{Gate, Plan};
use gate_tests::host;
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire::{self, Wire};
use serde_json::Value;
use socket2::SockRef;

const SOON: Duration = Duration::from_secs(3);

pub fn register(suite: &mut Suite) {
    suite.both(
        "h1_running_out_and_recovering_are_said_once_each",
        said_once,
    );
    suite.both("h1_without_descriptors_clients_are_told_53300", told);
    suite.both(
        "h1_every_limit_is_reached_at_once_within_the_descriptors",
        all_at_once,
    );
    suite.both(
        "h1_descriptors_taken_from_a_running_gate_are_no_backends_fault",
        taken_away,
    );
    suite.both(
        "g4_both_sockets_notice_a_vanished_peer_by_default",
        socket_options,
    );
}

/// Sets the soft limit of another process's descriptors; returns the one before.
fn limit_files(pid: u32, soft: u64) -> Result<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    let pid = pid.cast_signed();
    // SAFETY: prlimit fills one live struct and reads none.
    let got = unsafe { libc::prlimit(pid, libc::RLIMIT_NOFILE, std::ptr::null(), &raw mut limit) };
    ensure!(got == 0, "{}", io::Error::last_os_error());
    let before = std::mem::replace(&mut limit.rlim_cur, soft);
    // SAFETY: prlimit reads one live struct.
    let set = unsafe {
        libc::prlimit(
            pid,
            libc::RLIMIT_NOFILE,
            &raw const limit,
            std::ptr::null_mut(),
        )
    };
    ensure!(set == 0, "{}", io::Error::last_os_error());
    Ok(before)
}

fn said_once(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let settings = "[limits]\nmax_connections = 0\nmax_pending = 0\nceiling = 2000\n\
                    [workers]\ncount = 1\n[timeouts]\nstartup = \"60s\"";
    let mut plan = Plan::new(stage.plane, backend.address(), settings);
    plan.nofile = Some(256);
    let mut gate = Gate::start_plan(plan)?;
    let mut session = gate.open("app", "prod")?;
    for round in 1..=3 {
        let silent: Vec<_> = (0..200)
            .filter_map(|_| Wire::connect(gate.address()).ok())
            .collect();
        host::eventually_true(SOON, "descriptors ran out", || {
            Ok(gate.logged("ran out") == round)
        })?;
        let spent = gate.usage()?.cpu;
        thread::sleep(Duration::from_millis(500));
        let spent = gate.usage()?.cpu - spent;
        assert!(spent < Duration::from_millis(100), "{spent:?} for nothing");
        ensure!(gate.is_running(), "gate ended");
        assert_eq!(session.value("served")?, "served");
        gate.metrics()?;
        drop(silent);
        gate.wait_connections(SOON, "the silent ones are gone", |now| now.pending() == 0)?;
        // Said when the first one is served.
        gate.open("guest", "prod")?.close()?;
        host::eventually_true(SOON, "it says that all is well", || {
            Ok(gate.logged("served again") == round)
        })?;
    }
    assert_eq!(gate.logged("ran out"), 3, "{:?}", gate.log());
    session.close()?;
    gate.wait_empty(SOON)
}

/// Sessions take what there is; whoever comes then is told 53300, in time.
fn told(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let mut plan = Plan::new(
        stage.plane,
        backend.address(),
        "[limits]\nmax_connections = 0\n[workers]\ncount = 1",
    );
    plan.nofile = Some(256);
    let gate = Gate::start_plan(plan)?;
    let mut inside = Vec::new();
    let refusal = loop {
        match gate.open("app", "prod") {
            Ok(session) => inside.push(session),
            Err(error) => break error,
        }
        ensure!(inside.len() < 128, "more sessions than descriptors");
    };
    ensure!(inside.len() >= 30, "{} sessions", inside.len());
    assert_eq!(refusal.code(), "53300", "{refusal}");
    for _ in 0..50 {
        let start = Instant::now();
        assert_eq!(gate.refused("app", "prod")?.code(), "53300");
        ensure!(start.elapsed() < SOON, "{:?}", start.elapsed());
    }
    assert_eq!(gate.logged("ran out"), 1, "{:?}", gate.log());
    for session in &mut inside {
        assert_eq!(session.value("still")?, "still");
    }
    inside.pop();
    let session = host::eventually(SOON, "a place is free", || {
        Ok(gate.open("app", "prod").ok())
    })?;
    drop((session, inside));
    gate.wait_empty(SOON)
}

/// As many silent clients, sessions and waiting clients as the limits allow that
/// gate made of so few descriptors.
fn all_at_once(stage: &Stage) -> Result<()> {
    const WAITING: usize = 12;
    let backend = FakeBackend::start(Script::Trusting)?;
    let settings = format!(
        "[limits]\nmax_connections = {{ max = \"auto\", wait = \"30s\", max_waiting = {WAITING} }}\n\
         [workers]\ncount = 2\n[timeouts]\nstartup = \"60s\""
    );
    let mut plan = Plan::new(stage.plane, backend.address(), &settings);
    plan.nofile = Some(256);
    let gate = Gate::start_plan(plan)?;
    let status =
        || -> Result<Value> { Ok(serde_json::from_str(&gate.gatectl(&["status", "--json"])?)?) };
    let began = status()?;
    let number = |value: &Value| value.as_u64().context("a number").map(|it| it as usize);
    let sessions_max = number(&began["process"]["lowered_to"])?;
    let pending_max = number(&began["process"]["pending_lowered_to"])?;
    ensure!(sessions_max >= 20 && pending_max >= 10, "{began}");
    let silent: Vec<Wire> = (0..pending_max)
        .map(|_| Ok(Wire::connect(gate.address())?))
        .collect::<Result<_>>()?;
    gate.wait_connections(SOON, "all are pending", |now| {
        now.pending() == pending_max as i64
    })?;
    let mut inside = gate.open_all(sessions_max, "app", "prod")?;
    let mut waiting = Vec::new();
    for _ in 0..WAITING {
        let mut wire = Wire::connect(gate.address())?;
        wire.send(&wire::login("app", "prod"))?;
        waiting.push(wire);
    }
    host::eventually_true(SOON, "all wait", || {
        Ok(status()?["process"]["waiting"] == WAITING)
    })?;
    ensure!(gate.usage()?.fds <= 256, "{:?}", gate.usage()?);
    let now = gate.connections()?;
    assert_eq!(now.active(), sessions_max as i64);
    // For each of two workers one made room for those who came after them.
    ensure!(now.pending() >= pending_max as i64 - 2, "{now:?}");
    assert_eq!(gate.logged("ran out"), 0, "{:?}", gate.log());
    // Beyond all limits, and told so.
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    assert_eq!(gate.metrics()?.sum("gate_accept_errors_total", &[]), 0.0);
    for session in &mut inside {
        assert_eq!(session.value("still")?, "still");
    }
    drop((silent, inside, waiting));
    gate.wait_empty(SOON)
}

/// Gate counted on its descriptors at start; then somebody lowers its limit.
fn taken_away(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let settings = "[workers]\ncount = 1\n[timeouts]\nconnect = \"300ms\"";
    let mut gate = Gate::start(stage.plane, backend.address(), settings)?;
    let mut session = gate.open("app", "prod")?;
    let pid = gate.pid()?;
    // Every place below is taken by sessions that are there already.
    let inside = gate.open_all(10, "app", "prod")?;
    let before = limit_files(pid, 10)?;
    // The accept that is armed goes by the old limit, but no backend can be dialled.
    for _ in 0..5 {
        assert_eq!(gate.refused("app", "prod")?.code(), "57P03");
    }
    let mut dialing = Wire::connect(gate.address())?;
    dialing.send(&wire::login("app", "prod"))?;
    let spent = gate.usage()?.cpu;
    thread::sleep(Duration::from_secs(1));
    let spent = gate.usage()?.cpu - spent;
    assert!(spent < Duration::from_millis(200), "{spent:?} for nothing");
    ensure!(gate.is_running(), "gate ended");
    assert_eq!(session.value("served")?, "served");
    // The want is this host's: the backend is as it was.
    assert_eq!(gate.logged("address down"), 0, "{:?}", gate.log());
    limit_files(pid, before)?;
    let failures = |reason| -> Result<f64> {
        let labels = [("reason", reason)];
        let metrics = gate.metrics()?;
        Ok(metrics.sum("gate_backend_connect_failures_total", &labels))
    };
    assert_eq!(failures("host")?, 6.0);
    assert_eq!(failures("timeout")?, 0.0);
    gate.open("guest", "prod")?.close()?;
    drop((dialing, inside, session));
    gate.wait_empty(SOON)
}

/// Copies of all sockets of a process, by pidfd_getfd(2). While one lives, its
/// connection does.
fn sockets_of(pid: u32) -> Result<Vec<OwnedFd>> {
    let owned = |fd: libc::c_long| -> io::Result<OwnedFd> {
        let fd = RawFd::try_from(fd).unwrap_or(-1);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just made it for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    };
    // SAFETY: two integers.
    let process = owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    let mut sockets = Vec::new();
    for file in fs::read_dir(format!("/proc/{pid}/fd"))?.flatten() {
        let link = fs::read_link(file.path()).unwrap_or_default();
        if !link.to_string_lossy().starts_with("socket:") {
            continue;
        }
        let number: RawFd = file.file_name().to_string_lossy().parse()?;
        // SAFETY: integers.
        let copy = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) };
        sockets.extend(owned(copy));
    }
    Ok(sockets)
}

fn socket_options(stage: &Stage) -> Result<()> {
    let gate = Gate::start(stage.plane, stage.postgres.address(), "")?;
    let session = gate.open("app", "prod")?;
    let client = session.wire.stream().local_addr()?;
    let backend = stage.postgres.address();
    let sockets = sockets_of(gate.pid()?)?;
    let with = |peer: SocketAddr| {
        let socket = sockets.iter().find(|socket| {
            let address = SockRef::from(*socket).peer_addr();
            address.is_ok_and(|address| address.as_socket() == Some(peer))
        });
        socket.with_context(|| format!("no socket to {peer}"))
    };
    for (name, peer) in [("client", client), ("backend", backend)] {
        let socket = SockRef::from(with(peer)?);
        ensure!(socket.keepalive()?, "{name}");
        let idle = socket.tcp_keepalive_time()?;
        let interval = socket.tcp_keepalive_interval()?;
        let probes = socket.tcp_keepalive_retries()?;
        let vanished = idle + interval * probes;
        ensure!(vanished <= Duration::from_secs(120), "{name}: {vanished:?}");
        assert_eq!((idle.as_secs(), interval.as_secs(), probes), (60, 10, 5));
        let user_timeout = socket.tcp_user_timeout()?;
        assert_eq!(user_timeout, Some(Duration::from_secs(110)), "{name}");
        ensure!(socket.tcp_nodelay()?, "{name}");
    }
    drop(sockets);
    session.close()?;
    gate.wait_empty(SOON)
}
