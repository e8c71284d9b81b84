//! Logins that fail: whatever the backend does, every slot comes back once.

use std::net::{Ipv4Addr, SocketAddr};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gate_tests::backend::{FakeBackend, Script};
use gate_tests::clients::{block_on, sqlstate, tokio_client};
use gate_tests::gate::{Gate, Plan};
use gate_tests::host;
use gate_tests::observe::Connections;
use gate_tests::postgres::{LOCKED_PASSWORD, LOCKED_USER, LONG_USER};
use gate_tests::session::{OpenError, Session};
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire::{self, Wire};

const SOON: Duration = Duration::from_secs(3);
const LIMIT: usize = 5;
const SETTINGS: &str = "[limits]\nmax_connections = 60\n[limits.user]\napp = 5\n\
                        [timeouts]\nauth = \"1s\"\nconnect = \"1s\"";

pub fn register(suite: &mut Suite) {
    suite.both("a1_backend_refuses_tcp_gives_every_slot_back", refuses_tcp);
    suite.both("a1_backend_resets_gives_every_slot_back", resets);
    suite.both("a1_backend_closes_gives_every_slot_back", closes);
    suite.both("a1_backend_answers_53300_gives_every_slot_back", full);
    suite.both(
        "a1_backend_never_answers_gives_every_slot_back",
        never_answers,
    );
    suite.both("a1_wrong_password_gives_every_slot_back", wrong_password);
    suite.both("a2_every_kind_of_name_is_released_as_it_was_charged", names);
    suite.both("a4_counts_equal_live_sessions_at_every_step", random_walk);
    suite.both("a7_a_slot_is_taken_before_the_dial", slot_before_dial);
    suite.both("a7_both_sides_close_at_once_release_once", both_close);
    suite.both(
        "a_client_that_leaves_during_the_dial_frees_its_slot",
        leaves_during_dial,
    );
}

/// 50 logins that must fail as `expect` says, five at a time.
fn fifty(gate: &Gate, expect: fn(&OpenError) -> bool) -> Result<()> {
    for _ in 0..10 {
        let threads: Vec<_> = (0..LIMIT)
            .map(|_| {
                let address = gate.address();
                thread::spawn(move || Session::open(address, "app", "prod").map(drop))
            })
            .collect();
        for thread in threads {
            let failure = thread
                .join()
                .expect("no panic")
                .expect_err("no login works");
            ensure!(expect(&failure), "a client saw {failure}");
        }
        // The limit of the user is met exactly, so that a slot still held by
        // an ending session would refuse the next round.
        gate.wait_connections(SOON, "app has none", |now| now.user("app").active == 0)?;
    }
    gate.wait_empty(SOON)
}

/// The limit admits exactly its number again.
fn exactly_the_limit(gate: &Gate) -> Result<()> {
    let sessions = gate.open_all(LIMIT, "app", "prod")?;
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    drop(sessions);
    gate.wait_empty(SOON)
}

fn scripted(stage: &Stage, script: Script, expect: fn(&OpenError) -> bool) -> Result<()> {
    let backend = FakeBackend::start(script)?;
    let gate = Gate::start(stage.plane, backend.address(), SETTINGS)?;
    fifty(&gate, expect)?;
    assert_eq!(backend.accepted(), 50);
    backend.switch(Script::Trusting);
    exactly_the_limit(&gate)
}

fn refuses_tcp(stage: &Stage) -> Result<()> {
    let port = host::free_port();
    let address: SocketAddr = (Ipv4Addr::LOCALHOST, port).into();
    let gate = Gate::start(stage.plane, address, SETTINGS)?;
    fifty(&gate, |failure| failure.code() == "57P03")?;
    let failures = gate
        .metrics()?
        .sum("gate_backend_connect_failures_total", &[]);
    assert_eq!(failures, 50.0);
    let _backend = FakeBackend::start_on(port, Script::Trusting)?;
    exactly_the_limit(&gate)
}

fn resets(stage: &Stage) -> Result<()> {
    // Never a silent end: a pool would reconnect thousands of times a second.
    scripted(stage, Script::Resets, |failure| failure.code() == "57P03")
}

fn closes(stage: &Stage) -> Result<()> {
    scripted(stage, Script::Closes, |failure| failure.code() == "57P03")
}

fn full(stage: &Stage) -> Result<()> {
    scripted(stage, Script::Full, |failure| failure.code() == "53300")
}

fn never_answers(stage: &Stage) -> Result<()> {
    scripted(stage, Script::Silent, |failure| failure.code() == "57P03")
}

fn wrong_password(stage: &Stage) -> Result<()> {
    let settings = SETTINGS
        .replace("app =", "locked =")
        .replace("\"1s\"", "\"10s\"");
    let gate = Gate::start(stage.plane, stage.postgres.address(), &settings)?;
    let login = |password| {
        block_on(
            Duration::from_secs(10),
            tokio_client(gate.address(), LOCKED_USER, "prod", Some(password)),
        )
    };
    for _ in 0..50 {
        let error = login("wrong")?.expect_err("the password is wrong");
        ensure!(sqlstate(&error) == "28P01", "{error}");
        gate.wait_connections(SOON, "none left", |now| now.active() == 0)?;
    }
    gate.wait_empty(SOON)?;
    block_on(Duration::from_secs(10), async {
        let mut clients = Vec::new();
        for _ in 0..LIMIT {
            let password = Some(LOCKED_PASSWORD);
            clients.push(tokio_client(gate.address(), LOCKED_USER, "prod", password).await?);
        }
        let password = Some(LOCKED_PASSWORD);
        let one_more = tokio_client(gate.address(), LOCKED_USER, "prod", password).await;
        assert_eq!(sqlstate(&one_more.expect_err("the limit is 5")), "53300");
        for client in &clients {
            client.simple_query("select 1").await?;
        }
        Ok::<_, anyhow::Error>(())
    })??;
    gate.wait_empty(SOON)
}

fn names(stage: &Stage) -> Result<()> {
    let settings = format!("[limits]\ndefault_user = 2\n[limits.user]\napp = 2\n{LONG_USER} = 2");
    let gate = Gate::start(stage.plane, stage.postgres.address(), &settings)?;
    // PostgreSQL cuts to 63 bytes, and so does the limit's key.
    let longer = format!("{LONG_USER}-and-more");
    for (user, known) in [
        ("app", true),
        ("guest", true),
        ("nobody-has-this-name", false),
        (LONG_USER, true),
        (&longer, true),
    ] {
        for _ in 0..6 {
            match gate.open(user, "prod") {
                Ok(session) => session.close()?,
                Err(failure) => ensure!(!known && failure.code() == "28000", "{user}: {failure}"),
            }
            gate.wait_connections(SOON, "released", |now| now.active() == 0)?;
        }
        gate.wait_empty(SOON)?;
        if known {
            let _two = gate.open_all(2, user, "prod")?;
            assert_eq!(gate.refused(user, "prod")?.code(), "53300", "{user}");
        }
        gate.wait_empty(SOON)?;
    }
    let _long = gate.open_all(2, LONG_USER, "prod")?;
    assert_eq!(
        gate.refused(&longer, "prod")?.code(),
        "53300",
        "one key for both"
    );
    Ok(())
}

/// A seeded walk: admit, refuse at each stage, fail at the backend, close.
fn random_walk(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let settings = "[limits]\nmax_connections = 12\n[limits.user]\napp = 5\nretired = \"none\"\n\
                    [limits.database]\nstage = 4";
    let gate = Gate::start(stage.plane, backend.address(), settings)?;
    let mut live: Vec<(usize, usize, Session)> = Vec::new();
    let users = ["app", "guest", "admin", "retired"];
    let databases = ["prod", "stage"];
    let mut seed: u64 = 0x5EED_0004;
    for step in 0..300 {
        seed = seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let draw = (seed >> 33) as usize;
        let (user, database) = (draw % 4, draw / 4 % 2);
        let used = |user| live.iter().filter(|one| one.0 == user).count();
        let full = live.len() == 12
            || user == 3
            || user == 0 && used(0) == 5
            || database == 1 && live.iter().filter(|one| one.1 == 1).count() == 4;
        match draw / 8 % 4 {
            0 | 1 => match gate.open(users[user], databases[database]) {
                Ok(session) if !full => live.push((user, database, session)),
                Err(failure) if full && failure.code() == "53300" => {}
                other => anyhow::bail!("step {step}: full {full}, {other:?}"),
            },
            2 => {
                backend.switch(Script::Full);
                assert!(gate.open(users[user], databases[database]).is_err());
                backend.switch(Script::Trusting);
            }
            _ if live.is_empty() => {}
            _ => drop(live.swap_remove(draw / 32 % live.len())),
        }
        // The words of one session are given back one after the other.
        let matches = |now: &Connections| {
            let user_matches = |(index, user): (usize, &&str)| {
                let used = live.iter().filter(|one| one.0 == index).count();
                now.user(user).active == used as i64
            };
            let database_matches = |(index, database): (usize, &&str)| {
                let used = live.iter().filter(|one| one.1 == index).count();
                now.database(database).active == used as i64
            };
            now.active() == live.len() as i64
                && users.iter().enumerate().all(user_matches)
                && databases.iter().enumerate().all(database_matches)
        };
        gate.wait_connections(SOON, "the counts are the live sessions", matches)
            .with_context(|| format!("step {step}"))?;
    }
    drop(live);
    gate.wait_empty(SOON)
}

fn slot_before_dial(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Silent)?;
    let settings = "[limits.user]\napp = 5\n[timeouts]\nauth = \"20s\"";
    let gate = Gate::start(stage.plane, backend.address(), settings)?;
    let mut clients = Vec::new();
    for _ in 0..40 {
        let mut client = Wire::connect(gate.address())?;
        client.send(&wire::login("app", "prod"))?;
        clients.push(client);
    }
    // Two workers: any five of them may have been the first.
    let (mut refused, mut dialled) = (0, Vec::new());
    for mut client in clients {
        client
            .stream()
            .set_read_timeout(Some(Duration::from_millis(300)))?;
        match client.message() {
            Ok(Some(answer)) if answer.tag == b'E' => refused += 1,
            Ok(answer) => anyhow::bail!("the backend says nothing, but {answer:?} came"),
            Err(_) => dialled.push(client),
        }
    }
    assert_eq!((refused, dialled.len()), (35, 5));
    assert_eq!(backend.accepted(), 5, "at most as many dials as slots");
    assert_eq!(gate.connections()?.user("app").active, 5);
    drop(dialled);
    gate.wait_empty(SOON)
}

/// Client and backend close in the same moment, in every order.
fn both_close(stage: &Stage) -> Result<()> {
    let gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits.user]\napp = 4",
    )?;
    let mut admin = stage.postgres.admin()?;
    for round in 0..60 {
        let mut session = gate.open("app", "prod")?;
        let process = session.value("select pg_backend_pid()")?;
        let terminate = format!("select pg_terminate_backend({process})");
        match round % 4 {
            0 => {
                admin.wire.send(&wire::query(&terminate))?;
                session.wire.reset()?;
                admin.answer()?;
            }
            1 => {
                session.wire.half_close()?;
                admin.query(&terminate)?;
            }
            2 => {
                admin.query(&terminate)?;
                session.close()?;
            }
            _ => {
                session.wire.send(&wire::message(b'X', &[]))?;
                session.wire.reset()?;
            }
        }
    }
    gate.wait_empty(SOON)?;
    let sessions = gate.open_all(4, "app", "prod")?;
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    drop(sessions);
    gate.wait_empty(SOON)
}

fn leaves_during_dial(stage: &Stage) -> Result<()> {
    // TEST-NET-1 (RFC 5737): nobody answers. Where the host has no route the
    // dial fails at once, which frees the slot too.
    let mut plan = Plan::new(stage.plane, (Ipv4Addr::new(192, 0, 2, 1), 5432).into(), "");
    plan.settings = "[limits.user]\napp = 1\n[timeouts]\nconnect = \"20s\"".into();
    let gate = Gate::start_plan(plan)?;
    for _ in 0..5 {
        let mut client = Wire::connect(gate.address())?;
        client.send(&wire::login("app", "prod"))?;
        thread::sleep(Duration::from_millis(30));
        drop(client);
        gate.wait_empty(SOON)?;
    }
    Ok(())
}
