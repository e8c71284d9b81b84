//! Limits that let clients wait for a slot instead of refusing them.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gate_tests::backend::{FakeBackend, Script};
use gate_tests::gate::Gate;
use gate_tests::host;
use gate_tests::session::{OpenError, Session};
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire::{self, Wire};

const SOON: Duration = Duration::from_secs(3);
/// How late a refusal or an admission may be; the best of a few tries counts.
const LATE: Duration = Duration::from_millis(100);

pub fn register(suite: &mut Suite) {
    suite.both(
        "wait_those_who_wait_get_in_in_the_order_they_came",
        in_order,
    );
    suite.both("wait_one_more_than_may_wait_is_refused_at_once", too_many);
    suite.both("wait_ends_with_53300_at_its_deadline", deadline);
    suite.both("wait_of_one_user_holds_up_no_other", other_users);
    suite.both("wait_ends_at_once_when_the_client_leaves", leaves);
    suite.both("wait_ends_with_57p03_when_gate_drains", drains);
    suite.both("wait_ends_when_the_limit_is_raised", raised);
}

/// One of the user at a time, two may wait.
fn start(stage: &Stage, wait: &str, more: &str) -> Result<Gate> {
    let limit = format!("{{ max = 1, wait = \"{wait}\", max_waiting = 2 }}");
    let settings = format!("[workers]\ncount = 2\n[limits.user]\napp = {limit}\n{more}");
    Gate::start(stage.plane, stage.postgres.address(), &settings)
}

/// Sends a startup packet and waits until it waits, as the `number`th.
fn join(gate: &Gate, number: usize) -> Result<Wire> {
    let mut wire = Wire::connect(gate.address())?;
    wire.send(&wire::login("app", "prod"))?;
    waiting(gate, number)?;
    Ok(wire)
}

fn waiting(gate: &Gate, number: usize) -> Result<()> {
    host::eventually_true(SOON, &format!("{number} wait"), || {
        Ok(gate.metrics()?.sum("gate_connections_waiting", &[]) == number as f64)
    })
}

fn waited(gate: &Gate, outcome: &str) -> Result<f64> {
    let labels = [("outcome", outcome)];
    Ok(gate.metrics()?.sum("gate_waited_total", &labels))
}

/// The refusal of one that waited.
fn refused(wire: Wire) -> Result<gate_tests::wire::ErrorResponse> {
    match Session::finish(wire) {
        Err(OpenError::Refused(error)) => Ok(error),
        Err(other) => Err(other.into()),
        Ok(_) => anyhow::bail!("it was let in"),
    }
}

/// Whether nothing was said to one that waits.
fn is_silent(wire: &Wire) -> Result<bool> {
    wire.stream().set_nonblocking(true)?;
    let seen = wire.stream().peek(&mut [0; 1]);
    wire.stream().set_nonblocking(false)?;
    Ok(seen.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock))
}

fn in_order(stage: &Stage) -> Result<()> {
    let gate = start(stage, "30s", "")?;
    let mut inside = gate.open("app", "prod")?;
    let mut second = join(&gate, 1)?;
    for round in 0..10 {
        let third = join(&gate, 2)?;
        ensure!(is_silent(&second)? && is_silent(&third)?, "round {round}");
        assert_eq!(gate.connections()?.user("app").active, 1);
        let start = Instant::now();
        inside.close()?;
        inside = Session::finish(second).with_context(|| format!("round {round}"))?;
        ensure!(start.elapsed() < SOON, "{:?}", start.elapsed());
        assert_eq!(inside.value("select 'in'")?, "in");
        ensure!(is_silent(&third)?, "round {round}: only the next gets in");
        waiting(&gate, 1)?;
        second = third;
    }
    assert_eq!(waited(&gate, "admitted")?, 10.0);
    drop(second);
    waiting(&gate, 0)?;
    inside.close()?;
    gate.wait_empty(SOON)
}

fn too_many(stage: &Stage) -> Result<()> {
    let gate = start(stage, "30s", "")?;
    let _inside = gate.open("app", "prod")?;
    let _waiting = [join(&gate, 1)?, join(&gate, 2)?];
    let mut all = Vec::new();
    for _ in 0..5 {
        let start = Instant::now();
        assert_eq!(gate.refused("app", "prod")?.code(), "53300");
        all.push(start.elapsed());
    }
    ensure!(all.iter().min() < Some(&LATE), "{all:?}");
    waiting(&gate, 2)
}

fn deadline(stage: &Stage) -> Result<()> {
    const WAIT: Duration = Duration::from_millis(500);
    let gate = start(stage, "500ms", "")?;
    let mut inside = gate.open("app", "prod")?;
    let mut all = Vec::new();
    for _ in 0..3 {
        let start = Instant::now();
        assert_eq!(gate.refused("app", "prod")?.code(), "53300");
        all.push(start.elapsed());
        ensure!(all.iter().all(|took| *took >= WAIT), "early: {all:?}");
    }
    ensure!(all.iter().min() <= Some(&(WAIT + LATE)), "late: {all:?}");
    assert_eq!(waited(&gate, "refused")?, 3.0);
    assert_eq!(inside.value("select 'untouched'")?, "untouched");
    inside.close()?;
    gate.open("app", "prod")?.close()?;
    gate.wait_empty(SOON)
}

fn other_users(stage: &Stage) -> Result<()> {
    let gate = start(stage, "30s", "guest = 1")?;
    let inside = gate.open("app", "prod")?;
    let waits = join(&gate, 1)?;
    let mut other = gate.open("guest", "prod")?;
    assert_eq!(other.value("select 'in'")?, "in");
    // A limit without a wait refuses as ever.
    let start = Instant::now();
    assert_eq!(gate.refused("guest", "prod")?.code(), "53300");
    ensure!(start.elapsed() < SOON, "{:?}", start.elapsed());
    ensure!(is_silent(&waits)?);
    inside.close()?;
    Session::finish(waits)?.close()?;
    Ok(())
}

fn leaves(stage: &Stage) -> Result<()> {
    let gate = start(stage, "30s", "")?;
    let inside = gate.open("app", "prod")?;
    let mut all = Vec::new();
    for resets in [false, true, false, true] {
        let first = join(&gate, 1)?;
        let second = join(&gate, 2)?;
        let start = Instant::now();
        if resets {
            first.reset()?;
        } else {
            drop(first);
        }
        waiting(&gate, 1)?;
        all.push(start.elapsed());
        // The one behind it is next, and its place is free for another.
        let third = join(&gate, 2)?;
        ensure!(is_silent(&second)? && is_silent(&third)?);
        drop((second, third));
        waiting(&gate, 0)?;
    }
    ensure!(all.iter().min() < Some(&LATE), "{all:?}");
    assert_eq!(waited(&gate, "left")?, 12.0);
    let status = gate.gatectl(&["status"])?;
    ensure!(status.contains("0 now; before: left 12"), "{status}");
    assert_eq!(gate.connections()?.active(), 1);
    inside.close()?;
    gate.wait_empty(SOON)
}

fn drains(stage: &Stage) -> Result<()> {
    for by_signal in [true, false] {
        let backend = FakeBackend::start(Script::Trusting)?;
        let limit = "{ max = 1, wait = \"30s\", max_waiting = 2 }";
        let settings = format!("[limits.user]\napp = {limit}\n[timeouts]\ndrain = \"20s\"");
        let mut gate = Gate::start(stage.plane, backend.address(), &settings)?;
        let inside = gate.open("app", "prod")?;
        let waits = [join(&gate, 1)?, join(&gate, 2)?];
        let start = Instant::now();
        if by_signal {
            gate.signal(libc::SIGTERM)?;
        } else {
            gate.gatectl(&["drain"])?;
        }
        for wire in waits {
            assert_eq!(refused(wire)?.code(), "57P03", "by signal: {by_signal}");
        }
        ensure!(start.elapsed() < SOON, "{:?}", start.elapsed());
        inside.close()?;
        assert_eq!(gate.wait_exit(SOON)?.code(), Some(0));
    }
    Ok(())
}

/// Nobody tells the workers of a limit that another process changed in the
/// pinned maps: they look.
fn raised(stage: &Stage) -> Result<()> {
    let gate = start(stage, "30s", "")?;
    let mut inside = vec![gate.open("app", "prod")?];
    let mut all = Vec::new();
    for limit in 2..5 {
        let waits = join(&gate, 1)?;
        thread::sleep(Duration::from_millis(50));
        ensure!(is_silent(&waits)?);
        gate.gatectl(&["limits", "set", "user", "app", &limit.to_string()])?;
        let start = Instant::now();
        inside.push(Session::finish(waits)?);
        all.push(start.elapsed());
    }
    ensure!(all.iter().min() < Some(&LATE), "{all:?}");
    assert_eq!(waited(&gate, "admitted")?, 3.0);
    Ok(())
}
