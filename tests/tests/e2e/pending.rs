//! Connections that have not sent a valid startup packet yet.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use gate_tests::crowd;
use gate_tests::gate::Gate;
use gate_tests::host;
use gate_tests::suite::{Plane, Stage, Suite};
use gate_tests::wire::{self, Wire};

const SOON: Duration = Duration::from_secs(2);

pub fn register(suite: &mut Suite) {
    suite.both(
        "b1_a_thousand_silent_sockets_keep_nobody_out",
        thousand_silent,
    );
    suite.both("b1_pending_stays_under_its_limit", pending_is_bounded);
    suite.kernel(
        "b1_three_times_the_ceiling_of_silent_sockets",
        three_times_the_ceiling,
    );
    suite.kernel(
        "b4_over_the_ceiling_is_answered_53300_then_reset",
        over_the_ceiling,
    );
    suite.both("b2_probes_and_scans_cost_nothing_that_lasts", probes);
    suite.both("e1_one_deadline_covers_the_whole_startup", one_deadline);
}

fn thousand_silent(stage: &Stage) -> Result<()> {
    // No deadline thins them out, however slow this machine is.
    let settings = "[timeouts]\nstartup = \"120s\"";
    let gate = Gate::start(stage.plane, stage.postgres.address(), settings)?;
    let before = gate.usage()?;
    let silent = crowd::silent(gate.address(), 1000)?;
    let now = gate.wait_connections(SOON, "all are pending", |now| now.pending() == 1000)?;
    assert_eq!(now.active(), 0);
    let mut took = Vec::new();
    for _ in 0..20 {
        let start = Instant::now();
        let mut session = gate.open("app", "prod")?;
        assert_eq!(session.value("select 'in'")?, "in");
        took.push(start.elapsed());
    }
    took.sort();
    // All of them, but for one stall of the machine itself.
    assert!(took[18] < Duration::from_secs(1), "{took:?}");
    let grown = gate
        .usage()?
        .resident_bytes
        .saturating_sub(before.resident_bytes);
    assert!(grown < 24 << 20, "gate grew by {grown} bytes");
    // A good client is pending for a moment: the longest silent one made room.
    let pending = gate.metrics()?.sum("gate_connections_pending", &[]);
    assert!((980.0..=1000.0).contains(&pending), "{pending}");
    drop(silent);
    gate.wait_empty(SOON)
}

fn pending_is_bounded(stage: &Stage) -> Result<()> {
    let settings =
        "[limits]\nmax_connections = 50\nmax_pending = 40\n[timeouts]\nstartup = \"20s\"";
    let gate = Gate::start(stage.plane, stage.postgres.address(), settings)?;
    let mut silent = Vec::new();
    for _ in 0..12 {
        silent.extend(crowd::silent(gate.address(), 10)?);
        // The limit is held by eviction after the accept: a moment later.
        gate.wait_connections(SOON, "pending is at most 40", |now| now.pending() <= 40)?;
    }
    let mut session = gate.open("app", "prod")?;
    assert_eq!(session.value("select 'in'")?, "in");
    // The longest silent of a worker goes first, closed without a word.
    let mut closed = Vec::new();
    for (number, wire) in silent.iter_mut().enumerate() {
        if let Ok(bytes) = wire.rest(Duration::from_millis(20)) {
            assert_eq!(bytes, b"");
            closed.push(number);
        }
    }
    let old = closed.iter().filter(|number| **number < 60).count();
    assert!(old >= 45, "of the 60 oldest {old} were closed: {closed:?}");
    let evicted = [("reason", "max_pending")];
    let evicted = gate
        .metrics()?
        .sum("gate_connections_rejected_total", &evicted);
    assert!((80.0..=82.0).contains(&evicted), "{evicted}");
    drop(silent);
    gate.wait_connections(SOON, "none pending", |now| now.pending() == 0)?;
    Ok(())
}

fn three_times_the_ceiling(stage: &Stage) -> Result<()> {
    let settings = "[limits]\nmax_connections = 30\nmax_pending = 25\nceiling = 60\n\
                    over_headroom = 200\n[timeouts]\nstartup = \"2s\"";
    let gate = Gate::start(stage.plane, stage.postgres.address(), settings)?;
    let before = gate.usage()?;
    let silent = crowd::silent(gate.address(), 180)?;
    let start = Instant::now();
    let now = gate.connections()?;
    assert!(now.listeners("sockets") <= 60, "{}", now.0);
    let session = host::eventually(Duration::from_secs(5), "a good client gets in", || {
        let now = gate.connections()?;
        ensure!(
            now.pending() <= 60 && now.listeners("sockets") <= 60,
            "{}",
            now.0
        );
        Ok(gate.open("app", "prod").ok())
    })?;
    assert!(
        start.elapsed() < Duration::from_millis(3500),
        "{:?}",
        start.elapsed()
    );
    let grown = gate
        .usage()?
        .resident_bytes
        .saturating_sub(before.resident_bytes);
    assert!(grown < 16 << 20, "gate grew by {grown} bytes");
    drop(silent);
    drop(session);
    gate.wait_empty(SOON)
}

fn over_the_ceiling(stage: &Stage) -> Result<()> {
    let settings =
        "[limits]\nmax_connections = 40\nmax_pending = 40\nceiling = 10\nover_headroom = 5";
    let gate = Gate::start(stage.plane, stage.postgres.address(), settings)?;
    let mut all = gate.open_all(10, "app", "prod")?;
    // Over sockets speak first, and are then answered as a driver reads it.
    for _ in 0..8 {
        let start = Instant::now();
        let error = gate.refused("app", "prod")?;
        assert_eq!(
            (error.code(), error.text()),
            ("53300", "sorry, too many clients already")
        );
        assert!(
            start.elapsed() < Duration::from_millis(500),
            "{:?}",
            start.elapsed()
        );
        gate.wait_connections(SOON, "none over", |now| now.listeners("over") == 0)?;
    }
    let now = gate.connections()?;
    assert_eq!((now.listeners("sockets"), now.listeners("over")), (10, 0));
    // Five silent ones fill the headroom; the next SYN is reset at once.
    let silent = crowd::silent(gate.address(), 5)?;
    gate.wait_connections(SOON, "five over", |now| now.listeners("over") == 5)?;
    let start = Instant::now();
    let reset = Wire::connect(gate.address()).expect_err("reset at SYN");
    assert_eq!(reset.kind(), std::io::ErrorKind::ConnectionRefused);
    assert!(
        start.elapsed() < Duration::from_millis(100),
        "{:?}",
        start.elapsed()
    );
    // Silent over sockets have 2 s; then, and with a slot back, all is well.
    gate.wait_connections(Duration::from_secs(4), "none over", |now| {
        now.listeners("over") == 0
    })?;
    drop(silent);
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    all.pop();
    gate.wait_connections(SOON, "nine sockets", |now| now.listeners("sockets") == 9)?;
    let _in_again = gate.open("app", "prod")?;
    let metrics = gate.metrics()?;
    let over = metrics.sum("gate_kernel_refused_total", &[("verdict", "over")]);
    let reset = metrics.sum("gate_kernel_refused_total", &[("verdict", "reset")]);
    assert!(over >= 14.0 && reset >= 1.0, "over {over}, reset {reset}");
    Ok(())
}

fn probes(stage: &Stage) -> Result<()> {
    let settings = "[timeouts]\nstartup = \"1s\"";
    let gate = Gate::start(stage.plane, stage.postgres.address(), settings)?;
    let tls_hello = [0x16, 3, 1, 2, 0, 1, 0, 1, 0xFC, 3, 3];
    let mut held = Vec::new();
    for _ in 0..5 {
        for (bytes, stays) in [
            (&b""[..], false),
            (b"\0", false),
            (&wire::SSL_REQUEST[..4], true),
            (b"", true),
            (b"GET / HTTP/1.1\r\nHost: gate\r\n\r\n", true),
            (&tls_hello, true),
        ] {
            let mut probe = Wire::connect(gate.address())?;
            probe.send(bytes)?;
            if stays {
                held.push((probe, bytes.len()));
            }
        }
    }
    let start = Instant::now();
    for (probe, sent) in &mut held {
        assert_eq!(probe.rest(SOON)?, b"", "{sent} bytes are not answered");
    }
    assert!(
        start.elapsed() < Duration::from_millis(1800),
        "{:?}",
        start.elapsed()
    );
    gate.wait_empty(Duration::from_secs(1))?;
    let metrics = gate.metrics()?;
    let failures = |reason| metrics.sum("gate_startup_failures_total", &[("reason", reason)]);
    assert_eq!(failures("bad_startup"), 10.0, "HTTP and TLS");
    assert_eq!(
        failures("startup_timeout"),
        10.0,
        "silence and half a packet"
    );
    assert_eq!(failures("abandoned_startup"), 10.0, "closed early");
    assert_eq!(metrics.sum("gate_connections_rejected_total", &[]), 0.0);
    let before = gate.usage()?.cpu;
    thread::sleep(Duration::from_secs(1));
    let spent = gate.usage()?.cpu - before;
    assert!(
        spent <= Duration::from_millis(100),
        "an idle gate used {spent:?} in a second"
    );
    let spoken = gate
        .log()
        .iter()
        .filter(|line| line.contains("WARN") || line.contains("ERROR"))
        .count();
    assert_eq!(spoken, 0, "a scan fills no log: {:?}", gate.log());
    Ok(())
}

fn one_deadline(stage: &Stage) -> Result<()> {
    let settings = "[timeouts]\nstartup = \"1s\"";
    let gate = Gate::start(stage.plane, stage.postgres.address(), settings)?;
    let packet = wire::login("app", "prod");
    let mut drip = Wire::connect(gate.address())?;
    let mut asks = Wire::connect(gate.address())?;
    let start = Instant::now();
    asks.send(&wire::SSL_REQUEST)?;
    assert_eq!(asks.byte()?, b'N');
    for byte in packet.iter().take(9) {
        // After the deadline the other side is closed: an error is right.
        let _ = drip.send(&[*byte]);
        thread::sleep(Duration::from_millis(150));
    }
    assert_eq!(drip.rest(Duration::from_millis(300))?, b"");
    assert_eq!(asks.rest(Duration::from_millis(300))?, b"");
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    gate.wait_empty(SOON)?;
    let timeouts = [("reason", "startup_timeout")];
    assert_eq!(
        gate.metrics()?
            .sum("gate_startup_failures_total", &timeouts),
        2.0
    );
    if stage.plane == Plane::Kernel {
        assert_eq!(gate.connections()?.listeners("sockets"), 0);
    }
    Ok(())
}
