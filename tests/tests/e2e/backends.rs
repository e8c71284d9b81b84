//! Where sessions go: unix sockets, several addresses, and how the sockets on
//! both sides are set up.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use gate_tests::backend::{FakeBackend, Script};
use gate_tests::clients::{both_streams, psql};
use gate_tests::gate::{Gate, Plan};
use gate_tests::host;
use gate_tests::pair::free_listener;
use gate_tests::postgres::Postgres;
use gate_tests::session::Session;
use gate_tests::suite::{Plane, Stage, Suite};
use gate_tests::wire::{self, Wire};

const SOON: Duration = Duration::from_secs(5);
/// Clock ticks of /proc/net/tcp in a second (USER_HZ).
const TICKS: u64 = 100;
/// The kind of a keepalive timer there.
const KEEPALIVE: u64 = 2;

pub fn register(suite: &mut Suite) {
    suite.both("a_backend_on_a_unix_socket_serves_like_one_on_tcp", unix);
    suite.local("a_unix_socket_that_is_not_there_is_57p03", unix_missing);
    suite.local("keepalive_runs_on_both_sides", keepalive);
    suite.local(
        "a_client_that_takes_nothing_is_cut_by_user_timeout",
        user_timeout,
    );
    suite.local(
        "an_unknown_congestion_control_is_exit_3",
        congestion_control,
    );
    suite.local("checks_find_an_address_down_and_up_again", checks);
    suite.both("a_refused_dial_goes_to_the_next_address", failover);
    suite.local(
        "checks_leave_no_line_in_the_log_of_postgresql",
        silent_checks,
    );
    suite.local(
        "c1_a_cancel_is_over_though_the_first_address_hangs",
        cancel_past_hung_address,
    );
    suite.local("a_cancel_takes_no_address_for_up", cancel_is_no_check);
    suite.both(
        "strangers_cancels_for_a_hung_server_leave_room_for_others",
        cancels_leave_room,
    );
}

fn socket_of(postgres: &Postgres) -> PathBuf {
    let port = postgres.address().port();
    postgres.socket_directory().join(format!(".s.PGSQL.{port}"))
}

fn unix(stage: &Stage) -> Result<()> {
    let mut plan = Plan::new(
        stage.plane,
        stage.postgres.address(),
        "[limits.user]\napp = 2",
    );
    plan.backend = socket_of(stage.postgres).display().to_string();
    let gate = Gate::start_plan(plan)?;
    let output = psql(
        gate.address(),
        "app",
        "prod",
        "select inet_client_addr() is null, length(repeat('x', 20000000))",
    )?;
    let said = both_streams(&output);
    assert_eq!(said.trim(), "t|20000000", "over the unix socket");
    // More than any buffer between the two holds.
    let output = psql(
        gate.address(),
        "app",
        "prod",
        "select repeat('y', 20000000)",
    )?;
    assert_eq!(both_streams(&output).trim().len(), 20_000_000);
    gate.wait_empty(SOON)?;

    let mut session = gate.open("app", "prod")?;
    let cancel = session.cancel_packet();
    let canceller = thread::spawn({
        let address = gate.address();
        move || -> Result<()> {
            thread::sleep(Duration::from_millis(300));
            Wire::connect(address)?.send(&cancel)?;
            Ok(())
        }
    });
    let cancelled = session.value("select pg_sleep(20)").expect_err("cancelled");
    assert_eq!(cancelled.code(), "57014");
    canceller.join().expect("no panic")?;
    let _second = gate.open("app", "prod")?;
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    let status = gate.gatectl(&["status"])?;
    ensure!(status.contains(".s.PGSQL."), "{status}");
    Ok(())
}

fn unix_missing(stage: &Stage) -> Result<()> {
    let mut plan = Plan::new(stage.plane, stage.postgres.address(), "");
    plan.backend = "/nonexistent/.s.PGSQL.5432".to_owned();
    let gate = Gate::start_plan(plan)?;
    let refused = gate.open("app", "prod").expect_err("no backend");
    assert_eq!(refused.code(), "57P03");
    let failures = gate.metrics()?.sum(
        "gate_backend_connect_failures_total",
        &[("reason", "refused")],
    );
    assert_eq!(failures, 1.0);
    gate.wait_empty(SOON)
}

/// A gate whose second listener and second backend have settings of their own.
fn with_options(stage: &Stage, listener: &str, backend: &str) -> Result<(Gate, SocketAddr)> {
    let address: SocketAddr = ([127, 0, 0, 1], host::free_port()).into();
    let settings = format!(
        "[[listener]]\naddress = \"{address}\"\n{listener}\n\
         [backend.own]\naddress = \"{}\"\n{backend}\n\
         [database.prod]\nbackend = \"own\"",
        stage.postgres.address()
    );
    let gate = Gate::start(stage.plane, stage.postgres.address(), &settings)?;
    Ok((gate, address))
}

fn keepalive(stage: &Stage) -> Result<()> {
    let (gate, address) = with_options(stage, "keepalive = \"33s\"", "keepalive = \"44s\"")?;
    let mut session = Session::open(address, "app", "prod")?;
    let port = session.value("select inet_client_port()")?;
    // PostgreSQL's end has a timer of its own: only those of gate are looked at.
    let gate_to_backend = (port.parse()?, stage.postgres.address().port());
    let of_client = |local, _| local == address.port();
    let of_backend = |local, remote| (local, remote) == gate_to_backend;
    keepalive_of(33, of_client)?;
    keepalive_of(44, of_backend)?;
    drop(session);
    gate.wait_empty(SOON)
}

/// Waits for a keepalive timer of this many seconds: another one may run just
/// after bytes went by.
fn keepalive_of(seconds: u64, wanted: impl Fn(u16, u16) -> bool) -> Result<()> {
    host::eventually_true(SOON, &format!("a keepalive timer of {seconds} s"), || {
        let timers = timers(&fs::read_to_string("/proc/net/tcp")?, &wanted);
        let [(kind, left)] = timers.as_slice() else {
            bail!("one socket, not {timers:?}");
        };
        let expected = (seconds - 6) * TICKS..=(seconds + 1) * TICKS;
        Ok(*kind == KEEPALIVE && expected.contains(left))
    })
}

/// Kind and ticks left of the timers of established sockets, by local and
/// remote port. The columns are those of `get_tcp4_sock` (`net/ipv4/tcp_ipv4.c`).
fn timers(table: &str, wanted: impl Fn(u16, u16) -> bool) -> Vec<(u64, u64)> {
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let port = |address: &str| u16::from_str_radix(address.rsplit(':').next()?, 16).ok();
    let timer = |line: &str| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let (local, remote) = (port(columns.get(1)?)?, port(columns.get(2)?)?);
        let established = *columns.get(3)? == "01";
        let (kind, left) = columns.get(5)?.split_once(':')?;
        (established && wanted(local, remote)).then_some((hex(kind)?, hex(left)?))
    };
    table.lines().filter_map(timer).collect()
}

fn user_timeout(stage: &Stage) -> Result<()> {
    let (gate, address) = with_options(stage, "user_timeout = \"1s\"", "")?;
    let mut stalled = Wire::connect(address)?;
    stalled.send(&wire::login("app", "prod"))?;
    let mut stalled = Session::finish(stalled)?;
    let patient = gate.open("app", "stage")?;
    stalled
        .wire
        .send(&wire::query("select repeat('z', 50000000)"))?;
    gate.wait_connections(SOON * 2, "the stalled one is gone", |now| now.active() == 1)?;
    drop((stalled, patient));
    gate.wait_empty(SOON)
}

fn congestion_control(stage: &Stage) -> Result<()> {
    let settings = format!(
        "[backend.own]\naddress = \"{}\"\ncongestion_control = \"surprise\"",
        stage.postgres.address()
    );
    let plan = Plan::new(Plane::Local, stage.postgres.address(), &settings);
    let mut gate = Gate::prepare(plan)?;
    let status = gate.launch_expecting_exit(&[])?;
    assert_eq!(status.code(), Some(3), "{:?}", gate.log());
    ensure!(
        gate.logged("backend.own.congestion_control") == 1 && gate.logged("modprobe") == 1,
        "{:?}",
        gate.log()
    );
    Ok(())
}

fn two_addresses(first: SocketAddr, second: SocketAddr, check: &str) -> String {
    format!(
        "[backend.pair]\naddresses = [\"{first}\", \"{second}\"]\ncheck = \"{check}\"\n\
         [database.prod]\nbackend = \"pair\""
    )
}

/// Whether gate takes an address for up.
fn wait_up(gate: &Gate, address: SocketAddr, up: f64) -> Result<()> {
    let address = address.to_string();
    host::eventually_true(SOON, "the check has seen it", || {
        let labels = [("backend", "pair"), ("address", address.as_str())];
        Ok(gate.metrics()?.sum("gate_backend_up", &labels) == up)
    })
}

fn checks(stage: &Stage) -> Result<()> {
    let first = FakeBackend::start(Script::Trusting)?;
    let second = FakeBackend::start(Script::Trusting)?;
    let (at_first, at_second) = (first.address(), second.address());
    let settings = two_addresses(at_first, at_second, "100ms");
    let gate = Gate::start(stage.plane, stage.postgres.address(), &settings)?;
    let session = gate.open("app", "prod")?;
    assert_eq!((first.startups().len(), second.startups().len()), (1, 0));
    drop(session);
    drop(first);
    wait_up(&gate, at_first, 0.0)?;
    drop(gate.open("app", "prod")?);
    assert_eq!(second.startups().len(), 1, "the first is down");
    let status = gate.gatectl(&["status"])?;
    ensure!(status.contains("down"), "{status}");

    let first = FakeBackend::start_on(at_first.port(), Script::Trusting)?;
    wait_up(&gate, at_first, 1.0)?;
    drop(gate.open("app", "prod")?);
    assert_eq!((first.startups().len(), second.startups().len()), (1, 1));
    for words in ["backend address down", "backend address up"] {
        assert_eq!(gate.logged(words), 1, "{words}: {:?}", gate.log());
    }
    gate.wait_empty(SOON)
}

fn failover(stage: &Stage) -> Result<()> {
    let nobody: SocketAddr = ([127, 0, 0, 1], host::free_port()).into();
    let second = FakeBackend::start(Script::Trusting)?;
    let settings = two_addresses(nobody, second.address(), "0s") + "\n[limits.user]\napp = 3";
    let gate = Gate::start(stage.plane, stage.postgres.address(), &settings)?;
    let sessions = gate.open_all(3, "app", "prod")?;
    assert_eq!(second.startups().len(), 3);
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    drop(sessions);
    gate.wait_empty(SOON)?;
    drop(second);
    let none = gate.open("app", "prod").expect_err("none answers");
    assert_eq!(none.code(), "57P03");
    gate.wait_empty(SOON)
}

fn silent_checks(stage: &Stage) -> Result<()> {
    let postgres = Postgres::start()?;
    let log = postgres.socket_directory().join("log");
    let settings = format!(
        "[backend.pair]\naddresses = [\"{}\", \"{}\"]\ncheck = \"20ms\"",
        postgres.address(),
        socket_of(&postgres).display()
    );
    let gate = Gate::start(stage.plane, stage.postgres.address(), &settings)?;
    let before = fs::read_to_string(&log).context("the log of PostgreSQL")?;
    thread::sleep(Duration::from_secs(1));
    assert_eq!(fs::read_to_string(&log)?, before);
    assert_eq!(
        gate.metrics()?
            .sum("gate_backend_up", &[("backend", "pair")]),
        2.0
    );
    Ok(())
}

/// A gate whose first address is down: its kernel accepts, and nobody answers.
fn with_hung_address(stage: &Stage) -> Result<(Gate, TcpListener)> {
    let hung = free_listener()?;
    let mut plan = Plan::new(stage.plane, stage.postgres.address(), "check = \"500ms\"");
    plan.backend = format!("{}, {}", hung.local_addr()?, stage.postgres.address());
    let gate = Gate::start_plan(plan)?;
    host::eventually_true(SOON, "the first address is down", || {
        Ok(!is_up(&gate, &hung)?)
    })?;
    Ok((gate, hung))
}

fn is_up(gate: &Gate, at: &TcpListener) -> Result<bool> {
    let address = at.local_addr()?.to_string();
    let labels = [("address", address.as_str())];
    Ok(gate.metrics()?.sum("gate_backend_up", &labels) == 1.0)
}

/// psql waits for the end of its cancel: it goes to the address that is up.
fn cancel_past_hung_address(stage: &Stage) -> Result<()> {
    let (gate, _hung) = with_hung_address(stage)?;
    let mut session = gate.open("app", "prod")?;
    session.wire.send(&wire::query("select pg_sleep(30)"))?;
    thread::sleep(Duration::from_millis(200));
    let mut cancel = Wire::connect(gate.address())?;
    cancel.send(&session.cancel_packet())?;
    let start = Instant::now();
    assert_eq!(cancel.rest(SOON * 3)?, b"");
    let took = start.elapsed();
    assert_eq!(session.answer().expect_err("cancelled").code(), "57014");
    assert!(took < SOON, "the cancel was open for {took:?}");
    Ok(())
}

/// Or any stranger could send all sessions to a server that hangs.
fn cancel_is_no_check(stage: &Stage) -> Result<()> {
    let (gate, hung) = with_hung_address(stage)?;
    for _ in 0..5 {
        Wire::connect(gate.address())?.send(&wire::cancel(1, b"none"))?;
        thread::sleep(Duration::from_millis(100));
        assert!(!is_up(&gate, &hung)?, "a cancel made it up");
    }
    gate.open("app", "prod")?.close()?;
    Ok(())
}

/// Each holds two descriptors until the server answers, and this one never does.
fn cancels_leave_room(stage: &Stage) -> Result<()> {
    const CANCELS: usize = 300;
    for workers in [1, 8] {
        let hung = free_listener()?;
        let settings = format!(
            "[backend.alive]\naddress = \"{}\"\n[database.prod]\nbackend = \"alive\"\n\
             [limits]\nmax_connections = 20\nmax_pending = 20\n[workers]\ncount = {workers}",
            stage.postgres.address()
        );
        let gate = Gate::start_plan(Plan {
            nofile: Some(400),
            ..Plan::new(stage.plane, hung.local_addr()?, &settings)
        })?;
        let mut strangers = Vec::new();
        for number in 0..CANCELS {
            if number % 20 == 0 {
                // Not all in one round of the loop, which would find no descriptor.
                thread::sleep(Duration::from_millis(20));
            }
            let mut stranger = Wire::connect(gate.address())?;
            stranger.send(&wire::cancel(number as u32, b"none"))?;
            strangers.push(stranger);
        }
        for _ in 0..20 {
            gate.open("app", "prod")?.close()?;
        }
        let queued = [("outcome", "queued")];
        let count = gate.metrics()?.sum("gate_cancel_requests_total", &queued);
        assert!(count > 0.0, "none was queued");
        let usage = gate.usage()?;
        assert!(usage.fds < 300, "{} descriptors", usage.fds);
    }
    Ok(())
}
