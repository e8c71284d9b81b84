//! `gatectl sessions` and `gatectl latency` tell what is.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gate_tests::backend::{FakeBackend, Script};
use gate_tests::gate::{Gate, Plan};
use gate_tests::session::Session;
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire::{self, Wire};
use gate_tests::{crowd, host};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(3);
/// How many sessions are listed at once.
const MANY: usize = 9_000;
/// Descriptors that a process needs beside those of sessions; gate keeps some back
/// for polite answers.
const OTHER_FILES: usize = 1_500;

pub fn register(suite: &mut Suite) {
    suite.both("sessions_are_listed_with_what_they_do", listed);
    suite.local("sessions_show_every_state_that_lasts", states);
    suite.local("e7_hostile_names_are_listed_escaped", hostile_names);
    suite.local("sessions_are_listed_once_under_load", under_load);
    suite.local(
        "k4_nine_thousand_sessions_work_and_are_listed_once_each",
        many,
    );
    suite.both("latencies_count_what_happened", latencies);
}

fn list(gate: &Gate, arguments: &[&str]) -> Result<Vec<Value>> {
    let said = gate.gatectl(&[&["sessions", "--json"], arguments].concat())?;
    let answer: Value = serde_json::from_str(&said)?;
    ensure!(answer["unanswered"].is_null(), "{answer}");
    let sessions = answer["sessions"].as_array().context("no sessions")?;
    Ok(sessions.clone())
}

/// The one session of a client.
fn of_client<'a>(sessions: &'a [Value], client: &Wire) -> Result<&'a Value> {
    let address = client.stream().local_addr()?.to_string();
    let mut its = sessions
        .iter()
        .filter(|session| session["source"] == address.as_str());
    let one = its.next().context("the client is not listed")?;
    ensure!(its.next().is_none(), "listed twice: {sessions:?}");
    Ok(one)
}

fn number(session: &Value, key: &str) -> f64 {
    session[key].as_f64().unwrap_or(f64::NAN)
}

fn listed(stage: &Stage) -> Result<()> {
    let postgres = stage.postgres.address();
    let gate = Gate::start(stage.plane, postgres, "[workers]\ncount = 2")?;
    assert!(gate.gatectl(&["sessions"])?.contains("no sessions"));
    let mut app = gate.open("app", "prod")?;
    let guest = gate.open("guest", "stage")?;
    let silent = Wire::connect(gate.address())?;
    let first = host::eventually(SOON, "three are listed", || {
        let sessions = list(&gate, &[])?;
        Ok((sessions.len() == 3).then_some(sessions))
    })?;
    for (client, user, database, state) in [
        (&app.wire, Some("app"), Some("prod"), "active"),
        (&guest.wire, Some("guest"), Some("stage"), "active"),
        (&silent, None, None, "startup"),
    ] {
        let session = of_client(&first, client)?;
        assert_eq!(session["user"].as_str(), user, "{session}");
        assert_eq!(session["database"].as_str(), database, "{session}");
        assert_eq!(session["state"], state, "{session}");
        let backend = user.map(|_| "default");
        assert_eq!(session["backend"].as_str(), backend, "{session}");
        let address = user.map(|_| postgres.to_string());
        assert_eq!(session["backend_address"].as_str(), address.as_deref());
        assert!(number(session, "age_seconds") < 60.0, "{session}");
    }
    let ages: Vec<_> = first.iter().map(|one| number(one, "age_seconds")).collect();
    assert!(ages.is_sorted_by(|a, b| a >= b), "oldest first: {ages:?}");

    thread::sleep(Duration::from_millis(300));
    app.value("select repeat('x', 1000)")?;
    let second = list(&gate, &[])?;
    let (before, after) = (
        of_client(&first, &app.wire)?,
        of_client(&second, &app.wire)?,
    );
    assert_eq!(before["id"], after["id"]);
    let grew = |key| number(after, key) - number(before, key);
    assert!(grew("bytes_to_backend") > 20.0, "{before} {after}");
    assert!(grew("bytes_to_client") > 1000.0, "{before} {after}");
    assert!(grew("age_seconds") >= 0.3, "{before} {after}");
    assert!(number(after, "idle_seconds") < 0.3, "{after}");
    let (before, after) = (
        of_client(&first, &guest.wire)?,
        of_client(&second, &guest.wire)?,
    );
    assert_eq!(before["bytes_to_client"], after["bytes_to_client"]);
    assert!(number(after, "idle_seconds") >= 0.3, "{after}");

    filters(&gate, &second, &app.wire)?;
    drop((app, guest, silent));
    gate.wait_empty(SOON)?;
    host::eventually_true(
        SOON,
        "nobody is listed",
        || Ok(list(&gate, &[])?.is_empty()),
    )
}

fn filters(gate: &Gate, all: &[Value], app: &Wire) -> Result<()> {
    for arguments in [
        &["--user", "app"][..],
        &["--database", "prod"],
        &["--user", "app", "--database", "prod", "--state", "active"],
        &["--limit", "1"],
    ] {
        let found = list(gate, arguments)?;
        assert_eq!(found.len(), 1, "{arguments:?}: {found:?}");
        assert_eq!(found[0]["id"], of_client(all, app)?["id"]);
    }
    for (arguments, count) in [
        (["--state", "active"], 2),
        (["--state", "startup"], 1),
        (["--source", "127.0.0.1"], 3),
        (["--source", "::ffff:127.0.0.1"], 3),
        (["--source", "127.0.0.2"], 0),
        (["--user", "nobody"], 0),
    ] {
        assert_eq!(list(gate, &arguments)?.len(), count, "{arguments:?}");
    }
    let text = gate.gatectl(&["sessions", "--limit", "2"])?;
    assert!(text.contains("TO CLIENT") && text.contains("the oldest 2 of 3"));
    let output = gate.gatectl_output(&["sessions", "--state", "asleep"])?;
    assert_eq!(output.status.code(), Some(2));
    Ok(())
}

fn states(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Stubborn)?;
    let settings = "[limits.user]\nretired = { max = \"none\", wait = \"100ms\" }\n\
                    busy = { max = \"none\", wait = \"20s\" }";
    let gate = Gate::start(stage.plane, backend.address(), settings)?;
    // Waits, and nobody has asked for its address before the listing.
    let mut waits = Wire::connect(gate.address())?;
    waits.send(&wire::login("busy", "prod"))?;
    host::eventually_true(SOON, "one waits", || {
        let found = list(&gate, &["--source", "127.0.0.1", "--state", "waiting"])?;
        Ok(found.len() == 1 && of_client(&found, &waits)?["user"] == "busy")
    })?;
    let half_closed = gate.open("half", "prod")?;
    half_closed.wire.half_close()?;
    let abandoned = gate.open("gone", "prod")?;
    abandoned.wire.reset()?;
    backend.switch(Script::Silent);
    let mut login = Wire::connect(gate.address())?;
    login.send(&wire::login("slow", "prod"))?;
    for (user, state) in [
        ("half", "half_closed"),
        ("gone", "abandoned"),
        ("slow", "login"),
    ] {
        host::eventually_true(SOON, state, || {
            let found = list(&gate, &["--user", user])?;
            Ok(found.len() == 1 && found[0]["state"] == state)
        })?;
    }
    // A client that has waited is told the end and has a second to go.
    let mut told = Wire::connect(gate.address())?;
    told.send(&wire::login("retired", "prod"))?;
    told.message()?;
    let found = list(&gate, &["--user", "retired", "--state", "ending"])?;
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0]["backend"].is_null(), "{found:?}");
    drop((half_closed, login, told, waits));
    backend.release();
    gate.wait_empty(SOON)
}

fn hostile_names(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let gate = Gate::start(stage.plane, backend.address(), "")?;
    let mut client = Wire::connect(gate.address())?;
    let pairs: [(&[u8], &[u8]); 2] = [(b"user", b"a\\b\xff\n\x1b[2J"), (b"database", b"\"%s\t")];
    client.send(&wire::startup(wire::PROTOCOL_3_0, &pairs))?;
    let session = Session::finish(client)?;
    let (user, database) = ("a\\\\b\\xff\\x0a\\x1b[2J", "\"%s\\x09");
    for filter in [&[][..], &["--user", user], &["--database", database]] {
        let found = list(&gate, filter)?;
        let one = of_client(&found, &session.wire)?;
        assert_eq!(
            (&one["user"], &one["database"]),
            (&user.into(), &database.into())
        );
    }
    let text = gate.gatectl(&["sessions"])?;
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(text.contains(user) && !text.contains('\x1b'), "{text}");
    Ok(())
}

/// Clients that come, ask and go, while others stay.
fn under_load(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let gate = Gate::start(stage.plane, backend.address(), "[workers]\ncount = 2")?;
    let staying = gate.open_all(100, "app", "prod")?;
    let over = AtomicBool::new(false);
    let address = gate.address();
    let client = || -> Result<usize> {
        let mut served = 0;
        while !over.load(Ordering::Relaxed) {
            let mut session = Session::open(address, "guest", "stage")?;
            for _ in 0..20 {
                ensure!(session.value("abc")? == "abc");
            }
            served += 1;
        }
        Ok(served)
    };
    thread::scope(|scope| {
        let clients: Vec<_> = (0..4).map(|_| scope.spawn(client)).collect();
        let looked = (0..20).try_for_each(|_| {
            let sessions = list(&gate, &[])?;
            for session in &staying {
                of_client(&sessions, &session.wire)?;
            }
            ensure!(distinct(&sessions) == sessions.len(), "an id twice");
            let found = list(&gate, &["--user", "app"])?;
            ensure!(found.len() == staying.len(), "{} of the user", found.len());
            Ok(())
        });
        over.store(true, Ordering::Relaxed);
        for client in clients {
            let served = client.join().ok().context("a client panicked")??;
            ensure!(served > 0, "a client was never served");
        }
        looked
    })
}

fn distinct(sessions: &[Value]) -> usize {
    let ids: BTreeSet<_> = sessions.iter().map(|one| one["id"].as_u64()).collect();
    ids.len()
}

/// Soft and hard limit of this process's descriptors.
fn file_limits() -> Result<(usize, usize)> {
    let limits = std::fs::read_to_string("/proc/self/limits")?;
    let line = limits
        .lines()
        .find(|line| line.starts_with("Max open files"));
    let mut numbers = line
        .context("no limit")?
        .split_whitespace()
        .filter_map(|word| word.parse().ok());
    let soft = numbers.next().context("no soft limit")?;
    Ok((soft, numbers.next().unwrap_or(soft)))
}

/// As many as this machine's descriptors allow.
fn many(stage: &Stage) -> Result<()> {
    let (soft, hard) = file_limits()?;
    // Of each session, two ends are gate's and two are this process's.
    let places = |files: usize| (files.saturating_sub(OTHER_FILES) / 2).max(files / 8);
    let count = MANY.min(places(soft)).min(places(hard));
    let backend = FakeBackend::start(Script::Parks)?;
    let settings = "[limits]\nmax_connections = 0\nceiling = 0\n[workers]\ncount = 2";
    let mut plan = Plan::new(stage.plane, backend.address(), settings);
    plan.nofile = Some(hard as u64);
    let gate = Gate::start_plan(plan)?;
    let before = gate.usage()?;
    let mut sessions = Vec::new();
    while sessions.len() < count {
        let storm = crowd::storm(
            gate.address(),
            500.min(count - sessions.len()),
            "app",
            "prod",
        );
        if let Some(failure) = storm.failures.first() {
            anyhow::bail!("after {} sessions: {failure}", sessions.len());
        }
        sessions.extend(storm.sessions);
    }
    let began = Instant::now();
    let said = gate.gatectl(&["sessions", "--json"])?;
    let took = began.elapsed();
    let answer: Value = serde_json::from_str(&said)?;
    let all = answer["sessions"].as_array().context("no sessions")?;
    println!("{} sessions listed in {took:?}", all.len());
    assert_eq!((all.len(), distinct(all)), (count, count));
    let sources: BTreeSet<_> = all.iter().map(|one| one["source"].as_str()).collect();
    assert_eq!(sources.len(), count);
    assert!(all.iter().all(|one| one["state"] == "active"));
    let found = list(&gate, &["--user", "app", "--limit", "10"])?;
    assert_eq!(found.len(), 10);
    let now = gate.usage()?;
    // K4: io_uring hands nothing to threads of its own.
    assert_eq!(now.threads, before.threads);
    let each = now.resident_bytes.saturating_sub(before.resident_bytes) / count as u64;
    println!("{each} bytes of gate for an idle session");
    ensure!(each < 4096, "{each} bytes for an idle session");
    for (number, session) in sessions.iter_mut().enumerate() {
        let text = format!("session {number}");
        session.wire.send(&wire::query(&text))?;
    }
    assert_eq!(backend.answer_parked()?, count);
    for (number, session) in sessions.iter_mut().enumerate() {
        let rows = session.answer()?;
        assert_eq!(rows, [[Some(format!("session {number}"))]]);
    }
    drop(sessions);
    backend.release();
    gate.wait_empty(Duration::from_secs(10))
}

fn latencies(stage: &Stage) -> Result<()> {
    let settings = "[workers]\ncount = 2\n[limits.user]\napp = 3";
    let gate = Gate::start(stage.plane, stage.postgres.address(), settings)?;
    let none: Value = serde_json::from_str(&gate.gatectl(&["latency", "--json"])?)?;
    assert_eq!(count_of(&none, "admission"), Some(0));
    let _sessions = gate.open_all(3, "app", "prod")?;
    for _ in 0..2 {
        gate.refused("app", "prod")?;
    }
    let all: Value = serde_json::from_str(&gate.gatectl(&["latency", "--json"])?)?;
    let metrics = gate.metrics()?;
    for (name, metric, count) in [
        ("admission", "gate_admission_duration_seconds_count", 5),
        (
            "backend_connect",
            "gate_backend_connect_duration_seconds_count",
            3,
        ),
        ("ready", "gate_ready_duration_seconds_count", 3),
    ] {
        assert_eq!(count_of(&all, name), Some(count), "{all}");
        assert_eq!(metrics.sum(metric, &[]), count as f64, "{metric}");
        let by_worker = ["0", "1"].map(|worker| -> Result<u64> {
            let said = gate.gatectl(&["latency", "--json", "--worker", worker])?;
            count_of(&serde_json::from_str(&said)?, name).context("no count")
        });
        let [first, second] = by_worker;
        assert_eq!(first? + second?, count, "{name}");
    }
    assert!(count_of(&all, "loop") > Some(5), "{all}");
    assert!(metrics.sum("gate_loop_duration_seconds_count", &[]) > 5.0);
    for entry in all["latencies"].as_array().context("no latencies")? {
        let nanos = ["p50_ns", "p90_ns", "p99_ns", "p999_ns", "max_ns"]
            .map(|key| entry[key].as_u64().unwrap_or(0));
        assert!(nanos[0] > 0 && nanos.is_sorted(), "{entry}");
        assert!(nanos[4] < 20_000_000_000, "{entry}");
    }
    let text = gate.gatectl(&["latency"])?;
    assert!(
        text.contains("P99.9") && text.contains("admission"),
        "{text}"
    );
    let text = gate.gatectl(&["latency", "--hgrm", "ready"])?;
    assert!(text.contains("Total count    =            3]"), "{text}");
    let output = gate.gatectl_output(&["latency", "--worker", "2"])?;
    assert_eq!(output.status.code(), Some(1));
    Ok(())
}

fn count_of(answer: &Value, name: &str) -> Option<u64> {
    let entries = answer["latencies"].as_array()?;
    let entry = entries.iter().find(|entry| entry["name"] == name)?;
    entry["count"].as_u64()
}
