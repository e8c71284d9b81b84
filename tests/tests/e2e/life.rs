//! gate's own life: killed, restarted, drained, stopped, started twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use gate_tests::crowd;
use gate_tests::gate::{Gate, Plan};
use gate_tests::host;
use gate_tests::observe::Count;
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire::Wire;
use socket2::{Domain, Socket, Type};

const SOON: Duration = Duration::from_secs(2);

pub fn register(suite: &mut Suite) {
    suite.kernel(
        "sigkill_with_200_open_gives_every_slot_back_within_a_second",
        sigkill_frees,
    );
    suite.local(
        "sigkill_with_200_open_lets_a_restarted_gate_admit_all",
        sigkill_restarts,
    );
    suite.kernel("runtime_limits_survive_a_restart", limits_survive);
    suite.kernel(
        "gatectl_sets_limits_while_gate_is_stopped",
        set_while_stopped,
    );
    suite.both(
        "sigterm_drains_and_ends_with_the_last_session",
        drain_to_the_end,
    );
    suite.both("f1_sigterm_drain_ends_at_its_deadline", drain_deadline);
    suite.both("sigint_ends_now", sigint);
    suite.both(
        "sigint_ends_gate_while_clients_keep_coming",
        sigint_in_a_storm,
    );
    suite.both("a_second_sigterm_ends_now", second_sigterm);
    suite.both("a_second_gate_of_one_name_is_refused", second_instance);
    suite.kernel(
        "a_second_gate_on_the_same_pins_is_refused_wherever_its_socket_is",
        same_pins,
    );
    suite.both("a_port_that_another_program_holds_is_refused", port_held);
    suite.local(
        "a_wrong_configuration_is_refused_by_name",
        wrong_configuration,
    );
}

/// 200 sessions of a user whose limit is 200; one more is refused.
fn fill(gate: &Gate) -> Result<crowd::Storm> {
    let storm = crowd::storm(gate.address(), 200, "app", "prod");
    assert_eq!(storm.sessions.len(), 200, "{:?}", storm.failures.first());
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    Ok(storm)
}

const TWO_HUNDRED: &str = "[limits]\nmax_connections = 200\n[limits.user]\napp = 200";

fn sigkill_frees(stage: &Stage) -> Result<()> {
    let mut gate = Gate::start(stage.plane, stage.postgres.address(), TWO_HUNDRED)?;
    let storm = fill(&gate)?;
    assert_eq!(gate.gatectl_connections()?.active(), 200);
    gate.kill()?;
    host::eventually_true(Duration::from_secs(1), "every pinned count is 0", || {
        let now = gate.gatectl_connections()?;
        let groups = ["by_user", "by_database", "by_backend"];
        let unused = groups.iter().all(|group| now.in_use(group).is_empty());
        Ok(now.active() == 0 && now.pending() == 0 && unused && now.listeners("sockets") == 0)
    })?;
    drop(storm);
    gate.launch()?;
    let storm = fill(&gate)?;
    drop(storm);
    gate.wait_empty(Duration::from_secs(5))
}

fn sigkill_restarts(stage: &Stage) -> Result<()> {
    let mut gate = Gate::start(stage.plane, stage.postgres.address(), TWO_HUNDRED)?;
    let storm = fill(&gate)?;
    gate.kill()?;
    drop(storm);
    gate.launch()?;
    let storm = fill(&gate)?;
    drop(storm);
    gate.wait_empty(Duration::from_secs(5))
}

fn limits_survive(stage: &Stage) -> Result<()> {
    let mut gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits.user]\napp = 5",
    )?;
    gate.gatectl(&["limits", "set", "user", "app", "1"])?;
    gate.gatectl(&["limits", "set", "default-database", "2"])?;
    gate.kill()?;
    // Also while gate is down: limits are words in pinned maps.
    gate.gatectl(&["limits", "set", "user", "guest", "none"])?;
    gate.launch()?;
    let now = gate.connections()?;
    assert_eq!(
        now.user("app"),
        Count {
            active: 0,
            limit: Some(1)
        }
    );
    assert_eq!(now.user("guest").limit, None);
    assert_eq!(now.0["defaults"]["per_database"], 2);
    let _one = gate.open("app", "prod")?;
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    assert_eq!(gate.refused("guest", "prod")?.code(), "53300");
    gate.gatectl(&["limits", "unset", "user", "app"])?;
    assert_eq!(gate.connections()?.user("app").limit, Some(5));
    Ok(())
}

fn set_while_stopped(stage: &Stage) -> Result<()> {
    let gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits.user]\napp = 9",
    )?;
    let _open = gate.open_all(2, "app", "prod")?;
    gate.signal(libc::SIGSTOP)?;
    let set = gate.gatectl(&["limits", "set", "user", "app", "2"]);
    let seen = gate.gatectl_connections();
    gate.signal(libc::SIGCONT)?;
    set?;
    assert_eq!(
        seen?.user("app"),
        Count {
            active: 2,
            limit: Some(2)
        }
    );
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    Ok(())
}

fn drain_to_the_end(stage: &Stage) -> Result<()> {
    let mut gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[timeouts]\ndrain = \"20s\"",
    )?;
    assert_eq!(gate.http("/readyz")?.0, 200);
    let mut open = gate.open("app", "prod")?;
    gate.signal(libc::SIGTERM)?;
    host::eventually_true(SOON, "readyz is false", || {
        Ok(gate.http("/readyz")?.0 == 503)
    })?;
    assert_eq!(gate.http("/healthz")?.0, 200);
    let refused = gate.refused("app", "prod")?;
    assert_eq!(refused.code(), "57P03");
    assert_eq!(refused.text(), "the database system is shutting down");
    assert_eq!(open.value("select 'still here'")?, "still here");
    assert!(gate.is_running());
    let drained = gate
        .metrics()?
        .sum("gate_connections_rejected_total", &[("reason", "draining")]);
    assert!(drained >= 1.0, "{drained}");
    open.close()?;
    assert_eq!(gate.wait_exit(SOON)?.code(), Some(0));
    Ok(())
}

fn drain_deadline(stage: &Stage) -> Result<()> {
    let mut gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[timeouts]\ndrain = \"1s\"",
    )?;
    let mut open = gate.open("app", "prod")?;
    let start = Instant::now();
    gate.signal(libc::SIGTERM)?;
    let status = gate.wait_exit(Duration::from_secs(5))?;
    assert_eq!(status.code(), Some(0));
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(900), "{took:?}");
    // What the session reads at last, if anything, is never a limit's code.
    let end = open.answer().expect_err("the session was ended");
    assert!(["", "57P01", "57P03"].contains(&end.code()), "{end}");
    Ok(())
}

/// A gate that would wait a minute for its sessions to end.
fn patient(stage: &Stage) -> Result<Gate> {
    let settings = "[timeouts]\ndrain = \"60s\"";
    Gate::start(stage.plane, stage.postgres.address(), settings)
}

fn sigint(stage: &Stage) -> Result<()> {
    let mut gate = patient(stage)?;
    let _open = gate.open("app", "prod")?;
    gate.signal(libc::SIGINT)?;
    assert_eq!(gate.wait_exit(SOON)?.code(), Some(0));
    Ok(())
}

fn sigint_in_a_storm(stage: &Stage) -> Result<()> {
    let mut gate = Gate::start(stage.plane, stage.postgres.address(), "")?;
    let address = gate.address();
    let over = Arc::new(AtomicBool::new(false));
    let until = Arc::clone(&over);
    let storm = std::thread::spawn(move || {
        let mut silent = Vec::new();
        while !until.load(Ordering::Relaxed) && silent.len() < 5_000 {
            silent.extend(Wire::connect(address));
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    std::thread::sleep(Duration::from_millis(200));
    gate.signal(libc::SIGINT)?;
    let status = gate.wait_exit(SOON);
    over.store(true, Ordering::Relaxed);
    let _ = storm.join();
    assert_eq!(status?.code(), Some(0));
    Ok(())
}

fn second_sigterm(stage: &Stage) -> Result<()> {
    let mut gate = patient(stage)?;
    let _open = gate.open("app", "prod")?;
    gate.signal(libc::SIGTERM)?;
    std::thread::sleep(Duration::from_millis(300));
    assert!(gate.is_running());
    gate.signal(libc::SIGTERM)?;
    assert_eq!(gate.wait_exit(SOON)?.code(), Some(0));
    Ok(())
}

fn second_instance(stage: &Stage) -> Result<()> {
    let gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits.user]\napp = 1",
    )?;
    let mut plan = Plan::new(stage.plane, stage.postgres.address(), "");
    plan.twin_of = Some((gate.instance().into(), gate.control().into()));
    let mut twin = Gate::prepare(plan)?;
    let status = twin.launch_expecting_exit(&[])?;
    assert!(matches!(status.code(), Some(1..=3)), "{status}");
    assert!(twin.logged("another gate") > 0, "{:?}", twin.log());
    // The first one lost nothing.
    let _open = gate.open("app", "prod")?;
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    gate.gatectl(&["limits", "set", "user", "app", "2"])?;
    let _second = gate.open("app", "prod")?;
    Ok(())
}

fn same_pins(stage: &Stage) -> Result<()> {
    let settings = "[limits]\nmax_connections = 7";
    let mut gate = Gate::start(stage.plane, stage.postgres.address(), settings)?;
    let elsewhere = tempfile::tempdir()?;
    let control = elsewhere.path().join("control.sock");
    let mut plan = Plan::new(stage.plane, stage.postgres.address(), "");
    plan.twin_of = Some((gate.instance().into(), control));
    let mut twin = Gate::prepare(plan)?;
    let status = twin.launch_expecting_exit(&[])?;
    assert_eq!(status.code(), Some(1));
    assert!(twin.logged("another gate") > 0, "{:?}", twin.log());
    assert_eq!(gate.connections()?.0["total"]["limit"], 7);
    // One control socket is silent, and the gate at the other one serves.
    let status = twin.gatectl(&["status"])?;
    assert!(status.contains("unreachable"), "{status}");
    let refused = twin.gatectl_output(&["sessions"])?;
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(error.contains("--control"), "{error}");
    gate.open("app", "prod")?.close()?;
    gate.wait_empty(SOON)?;
    gate.kill()?;
    let status = twin.gatectl(&["status"])?;
    assert!(status.contains("down;"), "{status}");
    Ok(())
}

fn port_held(stage: &Stage) -> Result<()> {
    for shares_port in [false, true] {
        let plan = Plan::new(stage.plane, stage.postgres.address(), "");
        let mut gate = Gate::prepare(plan)?;
        // With SO_REUSEPORT on both sides the second bind would succeed, and
        // each program would get half of the clients.
        let holder = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        // Connections of others that ended here lately do not matter.
        holder.set_reuse_address(true)?;
        holder.set_reuse_port(shares_port)?;
        holder.bind(&gate.address().into())?;
        holder.listen(8)?;
        let status = gate.launch_expecting_exit(&[])?;
        assert!(matches!(status.code(), Some(1..=3)), "{status}");
        let port = gate.address().port().to_string();
        assert!(gate.logged(&port) > 0, "{:?}", gate.log());
        drop(holder);
        gate.launch()?;
        gate.open("app", "prod")?.close()?;
    }
    Ok(())
}

fn wrong_configuration(stage: &Stage) -> Result<()> {
    for (settings, named) in [
        ("[limits]\nmax_conections = 5", "max_conections"),
        ("[limits.user]\napp = -1", "app"),
        ("[timeouts]\nstartup = \"soon\"", "startup"),
    ] {
        let mut gate = Gate::prepare(Plan::new(stage.plane, stage.postgres.address(), settings))?;
        for arguments in [&[][..], &["--check"]] {
            let status = gate.launch_expecting_exit(arguments)?;
            assert_eq!(status.code(), Some(2), "{settings}");
        }
        host::eventually_true(SOON, "the key is named", || Ok(gate.logged(named) > 0))?;
    }
    let mut gate = Gate::prepare(Plan::new(stage.plane, stage.postgres.address(), ""))?;
    assert_eq!(gate.launch_expecting_exit(&["--check"])?.code(), Some(0));
    Ok(())
}
