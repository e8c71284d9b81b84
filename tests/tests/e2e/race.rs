//! Everything at once: limits hold at every instant, teardown is complete.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use gate_tests::backend::{FakeBackend, Script};
use gate_tests::crowd;
use gate_tests::gate::Gate;
use gate_tests::session::{OpenError, Session};
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire::{self, Wire};

pub fn register(suite: &mut Suite) {
    suite.both(
        "a9_two_thousand_at_once_are_never_over_a_hundred",
        two_thousand,
    );
    suite.both("a9_churn_never_passes_the_limit", churn);
    suite.both(
        "k1_connects_succeed_within_a_second_throughout_a_soak",
        soak,
    );
    suite.both("k3_teardown_is_seen_at_once", teardown);
    suite.both(
        "k3_reused_descriptors_reach_their_own_session",
        reused_descriptors,
    );
}

fn two_thousand(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let settings = "[limits]\nmax_connections = 100\nmax_pending = 2500\nceiling = 3000";
    let gate = Gate::start(stage.plane, backend.address(), settings)?;
    let storm = crowd::storm(gate.address(), 2000, "app", "prod");
    storm.expect_refusals("53300")?;
    assert_eq!(storm.sessions.len(), 100);
    assert_eq!(
        backend.accepted(),
        100,
        "no dial beyond the limit, at no instant"
    );
    assert_eq!(gate.connections()?.active(), 100);
    drop(storm);
    gate.wait_empty(Duration::from_secs(5))
}

/// Clients come and go over a limit of 8. A client counts itself only while
/// it is surely inside, so the count of all is at most what gate let in.
fn churn(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let gate = Gate::start(stage.plane, backend.address(), "[limits.user]\napp = 8")?;
    let (inside, highest, admitted) = (AtomicI64::new(0), AtomicI64::new(0), AtomicUsize::new(0));
    let deadline = Instant::now() + Duration::from_secs(3);
    let address = gate.address();
    let client = || -> Result<()> {
        while Instant::now() < deadline {
            match Session::open(address, "app", "prod") {
                Ok(mut session) => {
                    let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
                    highest.fetch_max(now, Ordering::SeqCst);
                    let number = admitted.fetch_add(1, Ordering::SeqCst);
                    let said = number.to_string();
                    ensure!(session.value(&said)? == said, "another session's answer");
                    inside.fetch_sub(1, Ordering::SeqCst);
                    match number % 3 {
                        0 => drop(session),
                        1 => session.wire.reset()?,
                        _ => session.close()?,
                    }
                }
                Err(refused) => ensure!(refused.code() == "53300", "{refused}"),
            }
        }
        Ok(())
    };
    thread::scope(|scope| -> Result<()> {
        let clients: Vec<_> = (0..24).map(|_| scope.spawn(client)).collect();
        while Instant::now() < deadline {
            let now = gate.connections()?;
            ensure!(now.user("app").active <= 8, "{}", now.0);
            thread::sleep(Duration::from_millis(20));
        }
        clients
            .into_iter()
            .try_for_each(|client| client.join().expect("no panic"))
    })?;
    let highest = highest.load(Ordering::SeqCst);
    assert!(highest <= 8, "{highest} were inside at once");
    assert!(admitted.load(Ordering::SeqCst) > 100, "the churn was real");
    gate.wait_empty(Duration::from_secs(3))?;
    let sessions = gate.open_all(8, "app", "prod")?;
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    drop(sessions);
    gate.wait_empty(Duration::from_secs(2))
}

fn soak(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let gate = Gate::start(stage.plane, backend.address(), "")?;
    let over = AtomicBool::new(false);
    let address = gate.address();
    let result = thread::scope(|scope| {
        // Connections that are gone before, during and after the accept.
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let _ = disturb(address);
            }
        });
        let end = Instant::now() + Duration::from_secs(4);
        let mut took = Vec::new();
        let result = (|| -> Result<()> {
            while Instant::now() < end {
                let start = Instant::now();
                Session::open(address, "app", "prod")?.close()?;
                took.push(start.elapsed());
            }
            Ok(())
        })();
        over.store(true, Ordering::Relaxed);
        result.map(|()| took)
    });
    let mut took = result?;
    took.sort_unstable();
    // A shared machine may stall one of them; a listener that rests or has
    // ended would stall them all.
    let (typical, slowest) = (took[took.len() * 9 / 10], took[took.len() - 1]);
    assert!(typical < Duration::from_secs(1), "{typical:?}");
    assert!(slowest < Duration::from_secs(3), "{slowest:?}");
    gate.wait_empty(Duration::from_secs(3))
}

fn disturb(address: SocketAddr) -> io::Result<()> {
    for _ in 0..10 {
        Wire::connect(address)?.reset()?;
    }
    let mut half = Wire::connect(address)?;
    half.send(&wire::login("app", "prod")[..7])?;
    half.reset()?;
    let mut early = Wire::connect(address)?;
    early.send(&wire::login("app", "prod"))?;
    early.reset()?;
    thread::sleep(Duration::from_millis(1));
    Ok(())
}

fn teardown(stage: &Stage) -> Result<()> {
    let gate = Gate::start(stage.plane, stage.postgres.address(), "")?;
    let mut admin = stage.postgres.admin()?;
    let before = gate.usage()?;
    let mut took = Vec::new();
    for _ in 0..20 {
        let mut session = gate.open("app", "prod")?;
        let process = session.value("select pg_backend_pid()")?;
        let start = Instant::now();
        admin.query(&format!("select pg_terminate_backend({process})"))?;
        let end = session.answer().expect_err("the backend was ended");
        assert_eq!(end.code(), "57P01", "PostgreSQL's last words pass");
        took.push(start.elapsed());
    }
    // The median: this machine is shared, and one in twenty is its noise.
    took.sort_unstable();
    assert!(took[10] < Duration::from_millis(100), "{took:?}");
    took.clear();
    for _ in 0..20 {
        let start = Instant::now();
        gate.open("app", "prod")?.close()?;
        took.push(start.elapsed());
    }
    took.sort_unstable();
    assert!(took[10] < Duration::from_millis(100), "{took:?}");
    gate.wait_empty(Duration::from_secs(2))?;
    let after = gate.usage()?;
    assert!(
        after.fds <= before.fds + 2,
        "{} to {} descriptors",
        before.fds,
        after.fds
    );
    assert_eq!(after.threads, before.threads, "no threads appear");
    Ok(())
}

/// Many short sessions whose descriptors are reused at once: each must read
/// its own answer and nobody else's.
fn reused_descriptors(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let gate = Gate::start(stage.plane, backend.address(), "")?;
    let address = gate.address();
    let client = |thread: usize| -> Result<(), OpenError> {
        for number in 0..150 {
            let mut session = Session::open(address, "app", "prod")?;
            for part in 0..3 {
                let mine = format!("thread {thread} session {number} part {part}");
                let said = session.value(&mine)?;
                if said != mine {
                    return Err(OpenError::Protocol(format!("{said} instead of {mine}")));
                }
            }
            // A query in flight at the end: its answer belongs to nobody.
            session.wire.send(&wire::query("late"))?;
            if number % 2 == 0 {
                session.wire.reset()?;
            }
        }
        Ok(())
    };
    thread::scope(|scope| {
        let clients: Vec<_> = (0..8)
            .map(|index| scope.spawn(move || client(index)))
            .collect();
        clients
            .into_iter()
            .try_for_each(|client| client.join().expect("no panic"))
    })?;
    gate.wait_empty(Duration::from_secs(3))
}
