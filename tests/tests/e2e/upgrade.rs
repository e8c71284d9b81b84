//! A new gate takes over from the running one.

use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gate::kernel::{Choice, Group, Plane, PlaneOptions};
use gate::ledger::Ledger;
use gate::takeover::{self, Item};
use gate_tests::arrivals::{Arrivals, Seen};
use gate_tests::backend::{FakeBackend, Script};
use gate_tests::gate::{Gate, Old, Plan};
use gate_tests::host;
use gate_tests::session::Session;
use gate_tests::suite::{self, Stage, Suite};
use socket2::SockRef;

use crate::spread::held;

const SOON: Duration = Duration::from_secs(5);
/// Upgrades in a row.
const UPGRADES: usize = 20;
/// New clients a second meanwhile.
const PER_SECOND: u32 = 1000;

pub fn register(suite: &mut Suite) {
    suite.both("i1_twenty_upgrades_lose_no_connection", twenty);
    suite.kernel("i2_an_upgrade_keeps_counts_limits_and_descriptors", counts);
    suite.both("an_upgrade_changes_the_number_of_workers", workers);
    suite.both("an_upgrade_that_fails_changes_nothing", fails);
    suite.kernel(
        "an_upgrade_that_fails_leaves_every_worker_its_share",
        steered,
    );
    suite.kernel(
        "an_upgrade_that_dies_with_the_sockets_gives_them_back",
        gives_back,
    );
    suite.both(
        "an_upgrade_that_is_killed_at_any_moment_loses_nobody",
        killed,
    );
    suite.both("a_gate_that_left_ends_at_sigterm", left_ends);
    suite.local("an_upgrade_tells_systemd_the_main_process", systemd);
    suite.both("a_takeover_of_nobody_is_a_start", nobody);
    suite.kernel("a_takeover_from_kernel_to_memory_is_refused", to_memory);
    suite.local("a_takeover_from_memory_to_kernel_is_refused", to_kernel);
}

fn gate(stage: &Stage, backend: &FakeBackend) -> Result<Gate> {
    Gate::start(stage.plane, backend.address(), "[workers]\ncount = 2")
}

fn nobody_lost(seen: &Seen, at_least: usize) {
    assert!(
        seen.failures.is_empty(),
        "{} of {} clients were lost: {:?}",
        seen.failures.len(),
        seen.served + seen.failures.len(),
        seen.failures.first()
    );
    assert!(seen.served >= at_least, "only {} clients", seen.served);
}

fn twenty(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let mut gate = gate(stage, &backend)?;
    let mut sessions = vec![gate.open("keeper", "prod")?];
    let mut old: Vec<Old> = Vec::new();
    let arrivals = Arrivals::begin(gate.address(), PER_SECOND);
    for upgrade in 0..UPGRADES {
        old.push(gate.take_over(&[])?);
        let said = format!("after upgrade {upgrade}");
        sessions.push(gate.open("keeper", "prod").context(said)?);
        assert_eq!(gate.http("/readyz")?.0, 200);
        gate.gatectl(&["status"])?;
        for session in &mut sessions {
            assert_eq!(session.value("still here")?, "still here");
        }
    }
    let seen = arrivals.end();
    nobody_lost(&seen, UPGRADES * 20);
    // Each process ends with its own last session, not before.
    let last = sessions.pop().context("sessions")?;
    for (session, old) in sessions.into_iter().zip(&mut old) {
        assert!(old.is_running());
        session.close()?;
        assert_eq!(old.wait_exit(SOON)?.code(), Some(0));
    }
    last.close()?;
    gate.wait_empty(SOON)?;
    // A gate that does not ask is still one too many.
    let mut plan = Plan::new(stage.plane, backend.address(), "");
    plan.twin_of = Some((gate.instance().into(), gate.control().into()));
    let mut twin = Gate::prepare(plan)?;
    assert_eq!(twin.launch_expecting_exit(&[])?.code(), Some(1));
    assert!(twin.logged("another gate") > 0, "{:?}", twin.log());
    let pid = gate.pid()?.to_string();
    assert!(twin.logged(&pid) > 0, "it names {pid}: {:?}", twin.log());
    Ok(())
}

fn counts(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let mut plan = Plan::new(stage.plane, backend.address(), "[limits.user]\napp = 9");
    plan.nofile = Some(777);
    let mut gate = Gate::start_plan(plan)?;
    gate.gatectl(&["limits", "set", "user", "app", "5"])?;
    let mut sessions = gate.open_all(3, "app", "prod")?;
    let mut old = Vec::new();
    let limit = gate.metrics()?.sum("gate_connection_limit", &[]);
    ensure!(limit < 777.0 / 2.0, "by the descriptors: {limit}");
    for _ in 0..3 {
        old.push(gate.take_over(&[])?);
        assert_eq!(gate.metrics()?.sum("gate_connection_limit", &[]), limit);
        let now = gate.connections()?;
        assert_eq!(now.active(), 3, "{now:?}");
        assert_eq!(
            (now.user("app").active, now.user("app").limit),
            (3, Some(5))
        );
        assert_eq!(now.listeners("sockets"), 3);
        assert_eq!(gate.metrics()?.sum("gate_max_fds", &[]), 777.0);
    }
    // Sessions of two processes, one limit.
    sessions.extend(gate.open_all(2, "app", "prod")?);
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    for session in sessions {
        session.close()?;
    }
    for mut old in old {
        assert_eq!(old.wait_exit(SOON)?.code(), Some(0));
    }
    gate.wait_empty(SOON)
}

fn workers(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let mut gate = Gate::start(stage.plane, backend.address(), "")?;
    let arrivals = Arrivals::begin(gate.address(), PER_SECOND / 2);
    for count in ["3", "1", "4", "2"] {
        let mut old = gate.take_over(&["--workers", count])?;
        assert_eq!(old.wait_exit(SOON)?.code(), Some(0));
        // The hash sends some of so many to each socket of the group.
        for session in gate.open_all(50, "keeper", "prod")? {
            session.close()?;
        }
    }
    nobody_lost(&arrivals.end(), 50);
    gate.wait_empty(SOON)
}

fn fails(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let mut gate = gate(stage, &backend)?;
    let mut session = gate.open("app", "prod")?;
    let pid = gate.pid()?;
    // It has every descriptor by then, and has written its own limits.
    let settings = "[limits]\nmax_connections = 3";
    let mut plan = Plan::new(stage.plane, backend.address(), settings);
    plan.twin_of = Some((gate.instance().into(), gate.control().into()));
    let mut heir = Gate::prepare(plan)?;
    let _held = TcpListener::bind(heir.admin_address())?;
    let failed = heir.launch_expecting_exit(&["--takeover"])?;
    assert_eq!(failed.code(), Some(1), "{:?}", heir.log());
    assert!(heir.logged("taking over") > 0, "{:?}", heir.log());
    assert_eq!(gate.pid()?, pid);
    assert_eq!(session.value("still here")?, "still here");
    host::eventually_true(SOON, "the limits are the old ones", || {
        Ok(gate.connections()?.0["total"]["limit"] == 5000)
    })?;
    gate.gatectl(&["status"])?;
    gate.open("app", "prod")?.close()?;
    // And the next one succeeds.
    let mut old = gate.take_over(&[])?;
    session.close()?;
    assert_eq!(old.wait_exit(SOON)?.code(), Some(0));
    Ok(())
}

/// The heir has fewer workers: had it steered, some of the old ones would get
/// nobody any more.
fn steered(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let settings = "[workers]\ncount = 4\npin = \"none\"";
    let gate = Gate::start(stage.plane, backend.address(), settings)?;
    let mut plan = Plan::new(stage.plane, backend.address(), settings);
    plan.twin_of = Some((gate.instance().into(), gate.control().into()));
    let mut heir = Gate::prepare(plan)?;
    let _held = TcpListener::bind(heir.admin_address())?;
    let address = gate.address().to_string();
    let arguments = ["--takeover", "--listen", &address, "--workers", "2"];
    let failed = heir.launch_expecting_exit(&arguments)?;
    assert_eq!(failed.code(), Some(1), "{:?}", heir.log());
    assert!(heir.logged("taking over") > 0, "{:?}", heir.log());
    let _sessions = gate.open_all(80, "app", "prod")?;
    let held = held(&gate)?;
    ensure!(held.iter().all(|count| *count >= 10), "{held:?}");
    Ok(())
}

/// This test is the heir, up to its word: it has two workers, steers, and is gone.
fn gives_back(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let settings = "[workers]\ncount = 4\npin = \"none\"";
    let mut plan = Plan::new(stage.plane, backend.address(), settings);
    // Programs of this process are attached to its own cgroup.
    plan.in_our_cgroup = true;
    let gate = Gate::start_plan(plan)?;
    let path = takeover::path(gate.control(), gate.instance());
    let mut predecessor = takeover::ask(&path)?.context("nobody answers")?;
    let address = gate.address();
    let sockets = predecessor.take_all(&Item::Listener { address });
    ensure!(sockets.len() == 4, "{} sockets", sockets.len());
    for socket in &sockets {
        SockRef::from(socket).set_keepalive(false)?;
    }
    let plane = Plane::start(&PlaneOptions {
        instance: gate.instance().into(),
        cgroup: None,
    })?;
    let listener = Ledger::kernel(plane.maps()).listener_index(&address.to_string())?;
    let group = Group {
        listener,
        sockets: sockets[..2].iter().map(AsFd::as_fd).collect(),
    };
    plane.steer(&[group], Choice::LessLoaded)?;
    let mut sessions = gate.open_all(20, "app", "prod")?;
    let meanwhile = held(&gate)?;
    ensure!(meanwhile[2..] == [0, 0], "not steered: {meanwhile:?}");
    assert_eq!(gate.logged("as before"), 0);
    drop((predecessor, plane));
    host::eventually_true(SOON, "the old one steers again", || {
        Ok(gate.logged("spread over the workers as before") == 1)
    })?;
    for socket in &sockets {
        ensure!(SockRef::from(socket).keepalive()?, "set up otherwise");
    }
    drop(sockets);
    sessions.extend(gate.open_all(80, "app", "prod")?);
    let held = held(&gate)?;
    // The two that were left out are brought up to the others.
    ensure!(held.iter().all(|count| *count >= 20), "{held:?}");
    // And a real one takes over afterwards.
    let mut gate = gate;
    let mut old = gate.take_over(&[])?;
    gate.open("app", "prod")?.close()?;
    drop(sessions);
    assert_eq!(old.wait_exit(SOON)?.code(), Some(0));
    Ok(())
}

fn killed(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let mut gate = gate(stage, &backend)?;
    let mut sessions: Vec<Session> = gate.open_all(2, "app", "prod")?;
    for delay in [0, 3, 6, 10, 15, 25, 40, 60, 90, 130] {
        let delay = Duration::from_millis(delay);
        let (_, old) = gate.take_over_and_fail(&[], Some(delay))?;
        for session in &mut sessions {
            assert_eq!(session.value("still here")?, "still here");
        }
        if old.is_some() {
            // Killed after it had taken over: what it had is free again.
            break;
        }
        gate.open("app", "prod")?.close()?;
        gate.gatectl(&["status"])?;
    }
    Ok(())
}

fn left_ends(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let settings = "[timeouts]\ndrain = \"1s\"";
    let mut gate = Gate::start(stage.plane, backend.address(), settings)?;
    let mut ended = gate.open("app", "prod")?;
    let mut old = gate.take_over(&[])?;
    let mut stays = gate.open("app", "prod")?;
    old.signal(libc::SIGTERM)?;
    std::thread::sleep(Duration::from_millis(300));
    assert!(old.is_running(), "it waits for its session");
    assert_eq!(old.wait_exit(SOON)?.code(), Some(0));
    assert!(ended.value("still here").is_err());
    assert_eq!(stays.value("still here")?, "still here");
    assert_eq!(gate.http("/readyz")?.0, 200);
    gate.gatectl(&["status"])?;
    Ok(())
}

fn systemd(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("notify");
    let manager = UnixDatagram::bind(&path)?;
    manager.set_read_timeout(Some(SOON))?;
    let heard = || -> Result<String> {
        let mut text = [0; 256];
        let length = manager.recv(&mut text).context("nothing was told")?;
        Ok(String::from_utf8_lossy(&text[..length]).trim().to_owned())
    };
    let mut plan = Plan::new(stage.plane, backend.address(), "");
    plan.notify = Some(path);
    let mut gate = Gate::start_plan(plan)?;
    assert_eq!(heard()?, "READY=1");
    let mut session = gate.open("app", "prod")?;
    let mut old = gate.take_over(&[])?;
    assert_eq!(heard()?, format!("MAINPID={}", gate.pid()?));
    assert_eq!(heard()?, "READY=1");
    // What becomes of the old one is not the unit's business any more.
    old.signal(libc::SIGTERM)?;
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(session.value("still here")?, "still here");
    session.close()?;
    assert_eq!(old.wait_exit(SOON)?.code(), Some(0));
    gate.signal(libc::SIGTERM)?;
    assert_eq!(heard()?, "STOPPING=1");
    assert_eq!(gate.wait_exit(SOON)?.code(), Some(0));
    Ok(())
}

fn nobody(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let mut gate = gate(stage, &backend)?;
    gate.kill()?;
    gate.launch_with(&["--takeover"])?;
    assert!(gate.logged("nothing to take over") > 0);
    gate.open("app", "prod")?.close()?;
    Ok(())
}

fn to_memory(stage: &Stage) -> Result<()> {
    refused(stage, suite::Plane::Local, "counts in the kernel")
}

fn to_kernel(stage: &Stage) -> Result<()> {
    refused(stage, suite::Plane::Kernel, "no kernel plane")
}

fn refused(stage: &Stage, plane: suite::Plane, why: &str) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let gate = gate(stage, &backend)?;
    let mut plan = Plan::new(plane, backend.address(), "");
    plan.twin_of = Some((gate.instance().into(), gate.control().into()));
    let mut other = Gate::prepare(plan)?;
    assert_eq!(
        other.launch_expecting_exit(&["--takeover"])?.code(),
        Some(1)
    );
    assert!(other.logged(why) > 0, "{:?}", other.log());
    gate.open("app", "prod")?.close()?;
    gate.gatectl(&["status"])?;
    Ok(())
}
