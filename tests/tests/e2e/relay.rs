//! Bytes, half-closes, resets and cancels between a client and its backend.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use gate_tests::backend::{FakeBackend, Script};
use gate_tests::clients::{both_streams, libpq};
use gate_tests::gate::Gate;
use gate_tests::host;
use gate_tests::session::Session;
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire::{self, Wire, message};

const SOON: Duration = Duration::from_secs(2);

pub fn register(suite: &mut Suite) {
    suite.both(
        "c1_a_full_gate_cancels_a_query_through_200_cancels",
        full_gate_cancels,
    );
    suite.both(
        "a_client_that_resets_keeps_its_slot_until_its_backend_ended",
        reset_holds_slot,
    );
    suite.both(
        "a_client_that_resets_in_pg_sleep_gets_it_cancelled",
        reset_ends_the_query,
    );
    suite.both(
        "a_client_that_resets_with_a_stalled_upload_gets_its_query_cancelled",
        reset_with_stalled_upload,
    );
    suite.both(
        "a_client_that_resets_after_its_fin_gets_its_query_cancelled",
        reset_after_fin,
    );
    suite.both(
        "c1_cancels_that_wait_for_a_backend_are_not_pending",
        waiting_cancels,
    );
    suite.both(
        "g1_half_closed_sessions_hold_their_slots_and_get_their_rows",
        half_close,
    );
    suite.both("copy_of_100_mb_both_ways_arrives_intact", copy_both_ways);
    suite.both(
        "a_slow_reader_costs_bounded_memory_and_nobody_else",
        slow_reader,
    );
    suite.both("pgbench_runs_clean", pgbench);
}

fn full_gate_cancels(stage: &Stage) -> Result<()> {
    let gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits]\nmax_connections = 2",
    )?;
    let mut sleeper = gate.open("app", "prod")?;
    let _other = gate.open("app", "prod")?;
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    sleeper.wire.send(&wire::query("select pg_sleep(30)"))?;
    thread::sleep(Duration::from_millis(100));

    let start = Instant::now();
    let mut cancels = Vec::new();
    for number in 0..200 {
        // 199 with a wrong key, which PostgreSQL ignores, then the right one.
        let packet = match number {
            199 => sleeper.cancel_packet(),
            _ => wire::cancel(sleeper.process, b"nope"),
        };
        let mut cancel = Wire::connect(gate.address())?;
        cancel.send(&packet)?;
        cancels.push(cancel);
    }
    assert_eq!(gate.connections()?.active(), 2, "a cancel takes no slot");
    let cancelled = sleeper.answer().expect_err("the query was cancelled");
    assert_eq!(cancelled.code(), "57014");
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "{:?}",
        start.elapsed()
    );
    for cancel in &mut cancels {
        assert_eq!(
            cancel.rest(Duration::from_secs(10))?,
            b"",
            "a cancel is never answered"
        );
    }
    assert_eq!(sleeper.value("select 'goes on'")?, "goes on");
    assert_eq!(gate.connections()?.active(), 2);
    // Some over the clients' connections, the rest in turn over gate's own.
    host::eventually_true(SOON, "200 cancels are counted", || {
        let metrics = gate.metrics()?;
        let count = |outcome| metrics.sum("gate_cancel_requests_total", &[("outcome", outcome)]);
        Ok(count("forwarded") + count("queued") == 200.0)
    })
}

fn reset_holds_slot(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Stubborn)?;
    let settings = "[limits.user]\napp = 1\n[timeouts]\ncancel = \"20s\"";
    let gate = Gate::start(stage.plane, backend.address(), settings)?;
    let mut client = gate.open("app", "prod")?;
    client.wire.send(&wire::query("never answered"))?;
    thread::sleep(Duration::from_millis(100));
    client.wire.reset()?;
    // The backend still works: connect, start a query, reset, again and again
    // must not outrun the limit.
    let deadline = Instant::now() + Duration::from_millis(1500);
    while Instant::now() < deadline {
        assert_eq!(gate.refused("app", "prod")?.code(), "53300");
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(backend.open(), 1);
    let cancel = wire::cancel(7, &[1, 2, 3, 4]);
    // For the client, and once more after a second.
    host::eventually_true(SOON, "gate cancels twice", || {
        Ok(backend.cancels() == [cancel.clone(), cancel.clone()])
    })?;
    assert_eq!(gate.connections()?.user("app").active, 1);
    backend.release();
    gate.wait_connections(SOON, "the slot is back", |now| now.user("app").active == 0)?;
    backend.switch(Script::Trusting);
    gate.open("app", "prod")?.close()?;
    gate.wait_empty(SOON)
}

fn reset_ends_the_query(stage: &Stage) -> Result<()> {
    let gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits.user]\napp = 1",
    )?;
    let name = host::unique_name("reset");
    for _ in 0..5 {
        let mut client = host::eventually(Duration::from_secs(5), "the slot is back", || {
            Ok(gate.open("app", "prod").ok())
        })?;
        client.query(&format!("set application_name = '{name}'"))?;
        client.wire.send(&wire::query("select pg_sleep(30)"))?;
        thread::sleep(Duration::from_millis(50));
        client.wire.reset()?;
        let alive = stage.postgres.backends_named(&name)?;
        ensure!(alive <= 1, "{alive} backends work for a limit of 1");
    }
    gate.wait_empty(Duration::from_secs(5))?;
    host::eventually_true(SOON, "no backend is left behind", || {
        Ok(stage.postgres.backends_named(&name)? == 0)
    })
}

/// A backend that waits for a lock reads nothing, so gate cannot either.
fn reset_with_stalled_upload(stage: &Stage) -> Result<()> {
    let gate = Gate::start(stage.plane, stage.postgres.address(), "")?;
    let table = host::unique_name("stalled").replace('-', "_");
    let mut admin = Session::open(stage.postgres.address(), "postgres", "prod")?;
    admin.query(&format!("create table {table} (line text)"))?;
    admin.query(&format!("grant all on {table} to app"))?;
    admin.query("begin")?;
    admin.query(&format!("lock table {table} in access exclusive mode"))?;
    let mut client = gate.open("app", "prod")?;
    client
        .wire
        .send(&wire::query(&format!("copy {table} from stdin")))?;
    let patience = Some(Duration::from_millis(500));
    client.wire.stream().set_write_timeout(patience)?;
    let line = wire::message(b'd', &[b'x'; 60_000]);
    let sent = (0..2_000).take_while(|_| client.wire.send(&line).is_ok());
    assert!(sent.count() < 2_000, "the upload did not stall");
    assert_eq!(gate.connections()?.active(), 1);
    client.wire.reset()?;
    // The lock is still held: only the cancel ends the backend.
    gate.wait_empty(Duration::from_secs(5))?;
    admin.query("rollback")?;
    admin.query(&format!("drop table {table}"))?;
    Ok(())
}

fn reset_after_fin(stage: &Stage) -> Result<()> {
    let gate = Gate::start(stage.plane, stage.postgres.address(), "")?;
    let mut client = gate.open("app", "prod")?;
    client.wire.send(&wire::query("select pg_sleep(60)"))?;
    client.wire.half_close()?;
    thread::sleep(Duration::from_millis(300));
    assert_eq!(gate.connections()?.active(), 1);
    client.wire.reset()?;
    gate.wait_empty(Duration::from_secs(5))
}

fn waiting_cancels(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Silent)?;
    let gate = Gate::start(stage.plane, backend.address(), "")?;
    let mut cancels = Vec::new();
    for _ in 0..10 {
        let mut cancel = Wire::connect(gate.address())?;
        cancel.send(&wire::cancel(1, b"nope"))?;
        cancels.push(cancel);
    }
    host::eventually_true(
        SOON,
        "all are on their way",
        || Ok(backend.accepted() == 10),
    )?;
    gate.wait_connections(SOON, "none is pending", |now| now.pending() == 0)?;
    drop(backend);
    gate.wait_empty(Duration::from_secs(15))
}

fn half_close(stage: &Stage) -> Result<()> {
    let gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits.user]\napp = 3",
    )?;
    let mut sessions = gate.open_all(3, "app", "prod")?;
    for session in &mut sessions {
        session
            .wire
            .send(&wire::query("select 'slept', pg_sleep(2)"))?;
        session.wire.half_close()?;
    }
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(1500) {
        assert_eq!(gate.refused("app", "prod")?.code(), "53300");
        assert_eq!(gate.connections()?.user("app").active, 3);
        thread::sleep(Duration::from_millis(100));
    }
    for mut session in sessions {
        assert_eq!(session.answer()?[0][0].as_deref(), Some("slept"));
        assert_eq!(session.wire.message()?, None, "and then the end");
    }
    assert!(start.elapsed() >= Duration::from_millis(1900));
    gate.wait_empty(SOON)
}

/// Rows of 8,000 bytes, each with its number: 100 MB in 12,500 rows.
const ROWS: usize = 12_500;

fn copy_row(number: usize) -> Vec<u8> {
    let mut row = format!("{number:07}").into_bytes();
    // Digits that repeat with no period that a buffer size could hide.
    let mut seed = number as u32 | 1;
    while row.len() < 7_999 {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        row.extend_from_slice(&[b'a' + (seed >> 28) as u8; 31]);
    }
    row.truncate(7_999);
    row.push(b'\n');
    row
}

fn copy_both_ways(stage: &Stage) -> Result<()> {
    let gate = Gate::start(stage.plane, stage.postgres.address(), "")?;
    let before = gate.usage()?;
    let mut session = gate.open("postgres", "stage")?;
    let table = host::unique_name("copy").replace('-', "_");
    session.query(&format!("create unlogged table {table} (line text)"))?;
    session.query(&format!(
        "alter table {table} alter column line set storage external"
    ))?;
    session
        .wire
        .send(&wire::query(&format!("copy {table} from stdin")))?;
    ensure!(
        session.wire.message()?.context("an answer")?.tag == b'G',
        "CopyInResponse"
    );
    for number in 0..ROWS {
        session.wire.send(&message(b'd', &copy_row(number)))?;
    }
    session.wire.send(&message(b'c', &[]))?;
    session.answer()?;
    assert_eq!(
        session.value(&format!("select count(*) from {table}"))?,
        ROWS.to_string()
    );

    session
        .wire
        .send(&wire::query(&format!("copy {table} to stdout")))?;
    let mut seen = 0;
    loop {
        let next = session.wire.message()?.context("the copy goes on")?;
        match next.tag {
            b'd' => {
                ensure!(next.body == copy_row(seen), "row {seen} differs");
                seen += 1;
            }
            b'Z' => break,
            b'E' => bail!("{:?}", wire::ErrorResponse::parse(&next.body)),
            _ => {}
        }
    }
    assert_eq!(seen, ROWS);
    session.query(&format!("drop table {table}"))?;
    let grown = gate
        .usage()?
        .resident_bytes
        .saturating_sub(before.resident_bytes);
    assert!(grown < 32 << 20, "gate grew by {grown} bytes");
    let relayed = gate.metrics()?.sum("gate_relayed_bytes_total", &[]);
    assert!(relayed >= 200e6, "{relayed}");
    session.close()?;
    gate.wait_empty(SOON)
}

fn slow_reader(stage: &Stage) -> Result<()> {
    let gate = Gate::start(stage.plane, stage.postgres.address(), "")?;
    let before = gate.usage()?;
    let flood = "select repeat('x', 1000000) from generate_series(1, 60)";
    let mut stalled = gate.open_all(4, "app", "prod")?;
    for session in &mut stalled {
        session.wire.send(&wire::query(flood))?;
    }
    thread::sleep(Duration::from_millis(500));
    let mut other = gate.open("guest", "prod")?;
    let start = Instant::now();
    for _ in 0..200 {
        assert_eq!(other.value("select 1")?, "1");
    }
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    let grown = gate
        .usage()?
        .resident_bytes
        .saturating_sub(before.resident_bytes);
    assert!(grown < 32 << 20, "gate grew by {grown} bytes");
    // What was held back arrives whole.
    for mut session in stalled {
        let rows = session.answer()?;
        assert_eq!(rows.len(), 60);
        assert!(
            rows.iter()
                .flatten()
                .flatten()
                .all(|value| value.len() == 1_000_000)
        );
    }
    Ok(())
}

fn pgbench(stage: &Stage) -> Result<()> {
    let gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits]\nmax_connections = 32",
    )?;
    let name = host::unique_name("bench").replace('-', "_");
    stage
        .postgres
        .admin()?
        .query(&format!("create database {name} owner app"))?;
    bench(gate.address(), &name, &["-i", "-q", "-s", "1"])?;
    for mode in [&["-S"][..], &["-S", "-C"]] {
        let mut arguments = vec!["-n", "-c", "16", "-j", "4", "-T", "2"];
        arguments.extend(mode);
        let said = bench(gate.address(), &name, &arguments)?;
        assert!(said.contains("number of failed transactions: 0"), "{said}");
    }
    gate.wait_empty(Duration::from_secs(5))?;
    stage
        .postgres
        .admin()?
        .query(&format!("drop database {name} with (force)"))?;
    Ok(())
}

fn bench(address: SocketAddr, database: &str, arguments: &[&str]) -> Result<String> {
    let mut command = libpq("pgbench", address, "app")?;
    let output = host::run(
        command.args(arguments).arg(database),
        Duration::from_secs(30),
    )?;
    let said = both_streams(&output);
    ensure!(output.status.success(), "pgbench {arguments:?}: {said}");
    ensure!(!said.contains("error:"), "pgbench {arguments:?}: {said}");
    Ok(said)
}
