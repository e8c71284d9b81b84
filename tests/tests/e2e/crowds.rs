//! Crowds: storms at the ceiling, thousands of resets, readers that never read,
//! descriptors that are used again at once.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use gate_tests::backend::{FakeBackend, Script};
use gate_tests::gate::{Gate, Plan};
use gate_tests::session::{OpenError, Session};
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire::{self, Wire};
use gate_tests::{crowd, host};
use socket2::SockRef;

const SOON: Duration = Duration::from_secs(5);

pub fn register(suite: &mut Suite) {
    suite.kernel("a9_a_storm_at_the_ceiling_never_exceeds_it", ceiling_storm);
    suite.both("a9_a_storm_at_a_limit_never_exceeds_it", limit_storm);
    suite.both(
        "k2_slow_clients_up_to_the_limit_keep_nobody_out",
        slow_clients,
    );
    suite.both("k3_descriptors_used_again_never_mix_two_clients", churn);
    suite.both("k7_thousands_of_resets_at_once_free_every_slot", resets);
}

fn joined<T>(handle: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    handle.join().ok().context("a thread panicked")?
}

/// CPU that gate uses in half a second without work.
fn is_idle(gate: &Gate) -> Result<()> {
    host::eventually_true(SOON, "gate is idle", || {
        let before = gate.usage()?.cpu;
        thread::sleep(Duration::from_millis(500));
        Ok(gate.usage()?.cpu - before <= Duration::from_millis(50))
    })
}

/// What clients of a storm saw.
#[derive(Default)]
struct Seen {
    admitted: AtomicUsize,
    polite: AtomicUsize,
    reset: AtomicUsize,
}

impl Seen {
    /// Notes how one login ended; what is none of the three fails the test.
    fn note(&self, answer: Result<Session, OpenError>) -> Result<()> {
        let place = match answer {
            Ok(_) => &self.admitted,
            Err(error) if error.code() == "53300" => &self.polite,
            Err(OpenError::Closed) => &self.reset,
            Err(OpenError::Io(error)) if is_reset(&error) => &self.reset,
            Err(other) => bail!("a client saw {other}"),
        };
        place.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn numbers(&self) -> [usize; 3] {
        [&self.admitted, &self.polite, &self.reset].map(|count| count.load(Ordering::Relaxed))
    }
}

/// Refused at SYN, or reset later.
fn is_reset(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ConnectionRefused
            | ErrorKind::ConnectionReset
            | ErrorKind::BrokenPipe
            | ErrorKind::UnexpectedEof
    )
}

/// How long a client of a storm holds what it got, and rests: enough of them come
/// at once without all ports of the machine being used up.
const PAUSE: Duration = Duration::from_millis(3);

/// Threads that log in and leave, one connection after the other, until told.
/// Most hold what they got for a moment, some leave without a word.
fn storm_until(over: &AtomicBool, address: SocketAddr, seen: &Seen) -> Result<()> {
    let packet = wire::login("app", "prod");
    for number in 0_u32.. {
        if over.load(Ordering::Relaxed) {
            break;
        }
        let answer = Wire::connect(address).and_then(|mut wire| {
            if number % 5 == 4 {
                return wire.reset().map(|()| None);
            }
            wire.send(&packet)?;
            Ok(Some(wire))
        });
        match answer {
            Ok(None) => {}
            Ok(Some(wire)) => seen.note(Session::finish(wire).inspect(|_| thread::sleep(PAUSE)))?,
            Err(error) => seen.note(Err(error.into()))?,
        }
        thread::sleep(PAUSE);
    }
    Ok(())
}

fn ceiling_storm(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let settings = "[limits]\nmax_connections = 0\nceiling = 20\nover_headroom = 10";
    let gate = Gate::start(stage.plane, backend.address(), settings)?;
    let seen = storm(&gate, Duration::from_secs(3), || {
        let now = gate.connections()?;
        ensure!(now.listeners("sockets") <= 20, "{}", now.0);
        ensure!(now.active() <= 20, "{}", now.0);
        Ok(())
    })?;
    let [admitted, polite, reset] = seen.numbers();
    println!("admitted {admitted}, 53300 {polite}, reset {reset}");
    ensure!(admitted > 20 && polite > 20, "{:?}", seen.numbers());
    quiet_again(&gate)
}

fn limit_storm(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let settings = "[limits]\nmax_connections = 500\n[limits.user]\napp = 7";
    let gate = Gate::start(stage.plane, backend.address(), settings)?;
    let seen = storm(&gate, Duration::from_secs(2), || {
        let now = gate.connections()?;
        ensure!(now.user("app").active <= 7, "{}", now.0);
        ensure!(backend.open() <= 7 + 1, "{} at the backend", backend.open());
        Ok(())
    })?;
    let [admitted, polite, reset] = seen.numbers();
    println!("admitted {admitted}, 53300 {polite}, reset {reset}");
    ensure!(admitted > 7 && polite > 7, "{:?}", seen.numbers());
    ensure!(reset == 0, "{reset} were not told why");
    quiet_again(&gate)
}

/// A storm from 48 threads; `look` looks at gate all the time.
fn storm(gate: &Gate, length: Duration, look: impl Fn() -> Result<()>) -> Result<Seen> {
    let over = AtomicBool::new(false);
    let seen = Seen::default();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..48)
            .map(|_| scope.spawn(|| storm_until(&over, gate.address(), &seen)))
            .collect();
        let end = Instant::now() + length;
        let mut looked = Ok(());
        while looked.is_ok() && Instant::now() < end {
            looked = look();
            thread::sleep(Duration::from_millis(2));
        }
        over.store(true, Ordering::Relaxed);
        threads.into_iter().try_for_each(joined)?;
        looked
    })?;
    Ok(seen)
}

/// After a storm: nothing is held, good clients get in, gate rests.
fn quiet_again(gate: &Gate) -> Result<()> {
    gate.wait_empty(SOON)?;
    gate.open("app", "prod")?.close()?;
    gate.wait_empty(SOON)?;
    assert_eq!(gate.metrics()?.sum("gate_accept_queue_length", &[]), 0.0);
    is_idle(gate)
}

fn slow_clients(stage: &Stage) -> Result<()> {
    const SLOW: usize = 300;
    let backend = FakeBackend::start(Script::Trusting)?;
    let settings = "[limits]\nmax_connections = 1000\nmax_pending = 400\n\
                    [timeouts]\nstartup = \"1500ms\"";
    let gate = Gate::start(stage.plane, backend.address(), settings)?;
    // Half a packet each, and a byte more every now and then.
    let mut starting = crowd::silent(gate.address(), SLOW)?;
    let start = Instant::now();
    for wire in &mut starting {
        let _ = wire.send(&wire::login("app", "prod")[..9]);
    }
    // Those that do not read their answers.
    let mut reading = gate.open_all(20, "app", "prod")?;
    let large = wire::query(&"x".repeat(60_000));
    for session in &mut reading {
        let patience = Some(Duration::from_millis(20));
        session.wire.stream().set_write_timeout(patience)?;
        while start.elapsed() < SOON && session.wire.send(&large).is_ok() {}
    }
    let mut took = Vec::new();
    while start.elapsed() < Duration::from_millis(1200) || took.len() < 20 {
        let begin = Instant::now();
        let mut good = gate.open("guest", "prod")?;
        assert_eq!(good.value("in")?, "in");
        took.push(begin.elapsed());
    }
    took.sort();
    ensure!(
        took[took.len() * 9 / 10] < Duration::from_millis(500),
        "{took:?}"
    );
    // The deadline of the slow starters fires as ever, however many they are.
    for wire in &mut starting {
        assert_eq!(wire.rest(SOON)?, b"");
    }
    let failed = [("reason", "startup_timeout")];
    assert_eq!(
        gate.metrics()?.sum("gate_startup_failures_total", &failed),
        SLOW as f64
    );
    assert_eq!(gate.connections()?.active(), 20);
    drop(reading);
    gate.wait_empty(SOON * 2)?;
    is_idle(&gate)
}

/// Connections are closed from both sides while new ones come, so that gate's
/// descriptors are used again at once.
fn churn(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let gate = Gate::start(stage.plane, backend.address(), "[workers]\ncount = 2")?;
    let over = AtomicBool::new(false);
    let served = thread::scope(|scope| -> Result<usize> {
        let (gate, over) = (&gate, &over);
        let threads: Vec<_> = (0..12)
            .map(|thread| scope.spawn(move || churn_until(gate, over, thread)))
            .collect();
        thread::sleep(Duration::from_secs(3));
        over.store(true, Ordering::Relaxed);
        threads.into_iter().map(joined).sum()
    })?;
    println!("{served} sessions");
    ensure!(served > 100, "{served} sessions");
    gate.wait_empty(SOON)?;
    ensure!(gate.usage()?.fds < 200, "{} descriptors", gate.usage()?.fds);
    is_idle(&gate)
}

fn churn_until(gate: &Gate, over: &AtomicBool, thread: usize) -> Result<usize> {
    let mut served = 0;
    let mut ends = Vec::new();
    while !over.load(Ordering::Relaxed) {
        let mut session = gate.open("app", "prod")?;
        for number in 0..3 {
            // Nobody else ever says this.
            let own = format!("thread {thread}, session {served}, query {number}");
            ensure!(session.value(&own)? == own, "another client's bytes");
        }
        served += 1;
        match served % 4 {
            0 => session.wire.reset()?,
            1 => drop(session),
            // Gate, the backend and the client all end it at once.
            2 => {
                session.wire.send(&wire::message(b'X', &[]))?;
                session.wire.half_close()?;
            }
            _ => {
                session.wire.send(&wire::message(b'X', &[]))?;
                let start = Instant::now();
                session.wire.rest(wire::READ_LIMIT)?;
                ends.push(start.elapsed());
            }
        }
    }
    ends.sort();
    let median = ends.get(ends.len() / 2).copied().unwrap_or_default();
    ensure!(median < Duration::from_millis(100), "FIN after {median:?}");
    Ok(served)
}

fn resets(stage: &Stage) -> Result<()> {
    const MANY: usize = 3000;
    let backend = FakeBackend::start(Script::Parks)?;
    let settings = "[limits]\nmax_connections = 0\nceiling = 0\n[workers]\ncount = 2\n\
                    [timeouts]\nabandoned = \"1s\"";
    let mut plan = Plan::new(stage.plane, backend.address(), settings);
    plan.nofile = Some(16_000);
    let mut gate = Gate::start_plan(plan)?;
    let threads = gate.usage()?.threads;
    let mut sessions = Vec::new();
    while sessions.len() < MANY {
        let storm = crowd::storm(gate.address(), 500, "app", "prod");
        if let Some(failure) = storm.failures.first() {
            bail!("after {} sessions: {failure}", sessions.len());
        }
        sessions.extend(storm.sessions);
    }
    assert_eq!(gate.usage()?.threads, threads);
    for session in &sessions {
        SockRef::from(session.wire.stream()).set_linger(Some(Duration::ZERO))?;
    }
    // As fast as a thread can close.
    drop(sessions);
    backend.release();
    gate.wait_empty(Duration::from_secs(20))?;
    ensure!(gate.is_running(), "gate ended");
    let closed = gate.metrics()?.sum("gate_sessions_closed_total", &[]);
    assert_eq!(closed, MANY as f64);
    backend.switch(Script::Trusting);
    gate.open("app", "prod")?.close()?;
    gate.wait_empty(SOON)?;
    is_idle(&gate)
}
