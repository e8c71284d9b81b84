//! A host whose descriptors run out under a running gate, and what is set on
//! gate's sockets.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use gate_tests::backend::{FakeBackend, Script};
use gate_tests::gate::Gate;
use gate_tests::host;
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire::Wire;
use socket2::SockRef;

const SOON: Duration = Duration::from_secs(3);

pub fn register(suite: &mut Suite) {
    suite.both("h1_emfile_is_said_once_and_the_spare_answers", out_of_files);
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

/// The highest descriptor that a process has open.
fn highest_file(pid: u32) -> Result<u64> {
    let files = fs::read_dir(format!("/proc/{pid}/fd"))?.flatten();
    let numbers = files.filter_map(|file| file.file_name().to_str()?.parse().ok());
    numbers.max().context("no descriptors")
}

/// Gate counted on its descriptors at start; now somebody takes them away.
fn out_of_files(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let settings = "[workers]\ncount = 1\n[timeouts]\nstartup = \"60s\"";
    let mut gate = Gate::start(stage.plane, backend.address(), settings)?;
    let mut session = gate.open("app", "prod")?;
    gate.metrics()?;
    for round in 1..=2 {
        // Below it every place is taken: silent clients see to that.
        let silent: Vec<_> = (0..20)
            .map(|_| Wire::connect(gate.address()))
            .collect::<Result<_, _>>()?;
        gate.wait_connections(SOON, "all are pending", |now| now.pending() == 20)?;
        let full = highest_file(gate.pid()?)? + 1;
        let before = limit_files(gate.pid()?, full)?;
        let mut holes = Vec::new();
        let told = told_by_spare(&gate, &mut holes)?;
        ensure!(told >= 3, "{told} clients were told");
        let spent = gate.usage()?.cpu;
        thread::sleep(Duration::from_secs(1));
        let spent = gate.usage()?.cpu - spent;
        assert!(spent < Duration::from_millis(200), "{spent:?} for nothing");
        ensure!(gate.is_running(), "gate ended");
        assert_eq!(session.value("served")?, "served");
        assert_eq!(gate.logged("ran out"), round, "{:?}", gate.log());
        limit_files(gate.pid()?, before)?;
        drop((silent, holes));
        let start = Instant::now();
        host::eventually(SOON, "new clients get in again", || {
            Ok(gate.open("guest", "prod").ok())
        })?
        .close()?;
        ensure!(start.elapsed() < SOON, "{:?}", start.elapsed());
        gate.wait_connections(SOON, "only the session is left", |now| now.pending() == 0)?;
        host::eventually_true(SOON, "it says that all is well", || {
            Ok(gate.logged("served again") == round)
        })?;
    }
    let errors = [("errno", "EMFILE")];
    ensure!(gate.metrics()?.sum("gate_accept_errors_total", &errors) > 0.0);
    session.close()?;
    gate.wait_empty(SOON)
}

/// Fills the last places, then counts clients that are refused in words.
fn told_by_spare(gate: &Gate, holes: &mut Vec<gate_tests::session::Session>) -> Result<usize> {
    let mut told = 0;
    for _ in 0..40 {
        match gate.open("app", "prod") {
            Ok(session) => holes.push(session),
            Err(error) if error.code() == "53300" => told += 1,
            // The connect to the backend found none.
            Err(error) if error.code() == "57P03" => {}
            Err(gate_tests::session::OpenError::Closed) => {}
            Err(gate_tests::session::OpenError::Io(error))
                if error.kind() != io::ErrorKind::WouldBlock => {}
            Err(other) => bail!("a client saw {other}"),
        }
    }
    Ok(told)
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
