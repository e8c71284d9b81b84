//! One truth: `/connections`, `/metrics` and gatectl say the same.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use gate_tests::gate::Gate;
use gate_tests::observe::{Connections, Count};
use gate_tests::openmetrics::Metrics;
use gate_tests::suite::{Plane, Stage, Suite};
use gate_tests::{binaries, crowd, host};

const SOON: Duration = Duration::from_secs(2);

pub fn register(suite: &mut Suite) {
    suite.both("statistics_agree_everywhere", agree);
    suite.both("workers_show_what_each_of_them_has", workers);
    suite.both("a6_gauges_follow_the_counts_under_load", under_load);
}

fn agree(stage: &Stage) -> Result<()> {
    let settings = "[limits]\nmax_connections = 50\nmax_pending = 40\n\
                    [limits.user]\napp = 3\nadmin = 0\n[limits.database]\nprod = 9";
    let gate = Gate::start(stage.plane, stage.postgres.address(), settings)?;
    let _apps = gate.open_all(3, "app", "prod")?;
    let _guest = gate.open_all(2, "guest", "stage")?;
    let _silent = crowd::silent(gate.address(), 4)?;
    for _ in 0..5 {
        gate.refused("app", "stage")?;
    }
    // Refused clients may linger for a moment: their sockets still count.
    let now = gate.wait_connections(SOON, "4 pending, 9 sockets", |now| {
        now.pending() == 4 && now.listeners("sockets") == 9
    })?;
    assert_eq!(now.active(), 5);
    assert_eq!(
        now.user("app"),
        Count {
            active: 3,
            limit: Some(3)
        }
    );
    assert_eq!(
        now.user("guest"),
        Count {
            active: 2,
            limit: Some(0)
        }
    );
    assert_eq!(
        now.database("prod"),
        Count {
            active: 3,
            limit: Some(9)
        }
    );
    assert_eq!(
        now.database("stage"),
        Count {
            active: 2,
            limit: Some(0)
        }
    );
    assert_eq!(
        now.backend("default"),
        Count {
            active: 5,
            limit: Some(0)
        }
    );
    assert_eq!(now.0["total"]["limit"], 50);
    assert_eq!(now.0["by_user"]["app"]["source"], "config");
    let kernel = &now.0["kernel"]["state"];
    if stage.plane == Plane::Kernel {
        assert_eq!(kernel, "active");
        assert_eq!(now.listeners("sockets"), 9);
        assert_eq!(now.listeners("over"), 0);
    } else {
        assert_ne!(kernel, "active");
    }
    same_in_gatectl(&now, &gate.gatectl_connections()?);
    same_in_metrics(&now, &gate.metrics()?, stage.plane);

    let status = gate.gatectl(&["status"])?;
    assert!(status.contains(gate.instance()), "{status}");
    serde_json::from_str::<serde_json::Value>(&gate.gatectl(&["status", "--json"])?)?;
    let list = gate.gatectl(&["limits", "list", "--json"])?;
    serde_json::from_str::<serde_json::Value>(&list)?;
    assert!(
        list.contains("\"app\"") && list.contains("\"prod\""),
        "{list}"
    );
    let mut nobody = Command::new(binaries::gatectl()?);
    nobody.args([
        "--instance",
        "no-such-instance",
        "--control",
        "/nonexistent/control.sock",
    ]);
    let output = host::run(nobody.arg("status"), SOON)?;
    assert_eq!(output.status.code(), Some(4), "there is no such instance");
    let output = gate.gatectl_output(&["no-such-command"])?;
    assert_eq!(output.status.code(), Some(2), "a usage error");
    Ok(())
}

fn same_in_gatectl(now: &Connections, printed: &Connections) {
    for key in [
        "total",
        "by_user",
        "by_database",
        "by_backend",
        "defaults",
        "kernel",
    ] {
        assert_eq!(now.0[key], printed.0[key], "{key}");
    }
}

fn same_in_metrics(now: &Connections, metrics: &Metrics, plane: Plane) {
    let app = [("user", "app")];
    let other = [("user", "other")];
    let prod = [("database", "prod")];
    let default = [("backend", "default")];
    let refused = [("reason", "user")];
    for (name, labels, value) in [
        ("gate_connections_active", &[][..], now.active()),
        ("gate_connections_pending", &[], now.pending()),
        ("gate_connection_limit", &[], 50),
        ("gate_pending_limit", &[], 40),
        ("gate_user_connections_active", &app, now.user("app").active),
        ("gate_user_connection_limit", &app, 3),
        (
            "gate_user_connections_active",
            &other,
            now.user("guest").active,
        ),
        (
            "gate_database_connections_active",
            &prod,
            now.database("prod").active,
        ),
        ("gate_database_connection_limit", &prod, 9),
        (
            "gate_backend_connections_active",
            &default,
            now.backend("default").active,
        ),
        ("gate_connections_rejected_total", &refused, 5),
        ("gate_connections_rejected_total", &[], 5),
        ("gate_kernel_active", &[], i64::from(plane == Plane::Kernel)),
        ("gate_ledger_errors_total", &[], 0),
    ] {
        assert!(metrics.has(name) || value == 0, "{name} is missing");
        assert_eq!(metrics.sum(name, labels), value as f64, "{name} {labels:?}");
    }
    assert!(metrics.sum("gate_max_fds", &[]) > metrics.sum("gate_open_fds", &[]));
}

/// Every connection is counted by the worker that accepted it, and by no other.
fn workers(stage: &Stage) -> Result<()> {
    let settings = "[workers]\ncount = 2\npin = \"cpus\"\n[limits.user]\nretired = \"none\"";
    let gate = Gate::start(stage.plane, stage.postgres.address(), settings)?;
    assert_eq!(sums(&gate)?, (0, 0));
    let sessions = gate.open_all(30, "app", "prod")?;
    let silent = crowd::silent(gate.address(), 6)?;
    for _ in 0..4 {
        gate.refused("retired", "prod")?;
    }
    // Refused clients may linger for a moment.
    host::eventually_true(
        SOON,
        "40 accepted, 36 held",
        || Ok(sums(&gate)? == (40, 36)),
    )?;
    let metrics = gate.metrics()?;
    let loads = worker_loads(&gate)?;
    assert_eq!(loads.len(), 2);
    for (number, load) in loads.iter().enumerate() {
        let worker = number.to_string();
        let of_worker = |name: &str| metrics.sum(name, &[("worker", &worker)]);
        let accepted = of_worker("gate_worker_connections_accepted_total");
        assert_eq!(load["accepted"].as_u64(), Some(accepted as u64));
        let held = of_worker("gate_worker_connections");
        assert_eq!(load["connections"].as_u64(), Some(held as u64));
        // The kernel's hash leaves none of 2 without any of 40 but once in 10^11.
        assert!(accepted > 0.0, "{loads:?}");
        let cpu = load["cpu"].as_u64().map(|cpu| cpu.to_string());
        assert_eq!(allowed_cpus(&gate, number)?, cpu);
    }
    let text = gate.gatectl(&["status"])?;
    assert!(text.contains("ACCEPTED"), "{text}");
    drop((sessions, silent));
    gate.wait_empty(SOON)?;
    host::eventually_true(SOON, "40 accepted, none held", || {
        Ok(sums(&gate)? == (40, 0))
    })
}

fn worker_loads(gate: &Gate) -> Result<Vec<serde_json::Value>> {
    let status: serde_json::Value = serde_json::from_str(&gate.gatectl(&["status", "--json"])?)?;
    let loads = status["process"]["worker_loads"].as_array();
    Ok(loads.cloned().unwrap_or_default())
}

/// The CPUs that the kernel lets a worker's thread run on.
fn allowed_cpus(gate: &Gate, worker: usize) -> Result<Option<String>> {
    let name = format!("worker-{worker}\n");
    for thread in fs::read_dir(format!("/proc/{}/task", gate.pid()?))? {
        let thread = thread?.path();
        if fs::read_to_string(thread.join("comm"))? == name {
            let status = fs::read_to_string(thread.join("status"))?;
            let allowed = |line: &str| Some(line.strip_prefix("Cpus_allowed_list:")?.trim().into());
            return Ok(status.lines().find_map(allowed));
        }
    }
    Ok(None)
}

/// Accepted and held, over all workers.
fn sums(gate: &Gate) -> Result<(u64, u64)> {
    let loads = worker_loads(gate)?;
    let sum = |key: &str| loads.iter().filter_map(|load| load[key].as_u64()).sum();
    Ok((sum("accepted"), sum("connections")))
}

/// The gauge is the word that the decision reads: it moves with the very
/// admission, and load that is gone refuses nobody.
fn under_load(stage: &Stage) -> Result<()> {
    let gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits]\nmax_connections = 30",
    )?;
    let mut open = Vec::new();
    for number in 1..=30 {
        open.push(gate.open("app", "prod")?);
        let metrics = gate.metrics()?;
        assert_eq!(
            metrics.sum("gate_connections_active", &[]),
            f64::from(number)
        );
    }
    for _ in 0..3 {
        let storm = crowd::storm(gate.address(), 64, "app", "prod");
        assert_eq!(storm.sessions.len(), 0);
        storm.expect_refusals("53300")?;
    }
    assert_eq!(gate.metrics()?.sum("gate_connections_active", &[]), 30.0);
    drop(open);
    gate.wait_empty(Duration::from_secs(1))?;
    let again = gate.open_all(30, "app", "prod")?;
    assert_eq!(gate.metrics()?.sum("gate_connections_active", &[]), 30.0);
    drop(again);
    gate.wait_empty(SOON)
}
