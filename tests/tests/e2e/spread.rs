//! How connections spread over workers, and the queues in front of them.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use gate_tests::crowd;
use gate_tests::gate::Gate;
use gate_tests::host;
use gate_tests::suite::{Stage, Suite};
use serde_json::Value;

const SOON: Duration = Duration::from_secs(5);

pub fn register(suite: &mut Suite) {
    suite.both(
        "b4_the_accept_queue_of_a_full_gate_stays_near_0",
        accept_queue,
    );
    suite.kernel("connections_of_one_client_are_even_over_the_workers", even);
}

fn accept_queue(stage: &Stage) -> Result<()> {
    let settings = "[limits]\nmax_connections = 10\n[workers]\ncount = 2";
    let gate = Gate::start(stage.plane, stage.postgres.address(), settings)?;
    let listener = gate.address().to_string();
    let of_listener = [("listener", listener.as_str())];
    let metrics = gate.metrics()?;
    ensure!(metrics.has("gate_accept_queue_length"), "no metric");
    // net.core.somaxconn is at least 128 anywhere; two sockets listen.
    let limit = metrics.sum("gate_accept_queue_limit", &of_listener);
    ensure!(limit >= 256.0, "the queues take {limit}");
    let _sessions = gate.open_all(10, "app", "prod")?;
    let is_over = AtomicBool::new(false);
    let looks = AtomicUsize::new(0);
    let longest = thread::scope(|scope| -> Result<f64> {
        let watch = scope.spawn(|| -> Result<f64> {
            let mut lengths = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                lengths.push(
                    gate.metrics()?
                        .sum("gate_accept_queue_length", &of_listener),
                );
                looks.fetch_add(1, Ordering::Relaxed);
            }
            lengths.sort_by(f64::total_cmp);
            // All but a few looks: a machine that is busy elsewhere stalls gate too.
            ensure!(lengths.len() >= 5, "only {lengths:?}");
            Ok(lengths[lengths.len() * 9 / 10])
        });
        let refused = refuse(&gate, 100);
        // On a busy machine a look takes long: the load goes on until there are
        // some.
        while looks.load(Ordering::Relaxed) < 5 && !watch.is_finished() {
            refuse(&gate, 1)?;
        }
        is_over.store(true, Ordering::Relaxed);
        let longest = watch.join().expect("no panic");
        let took = refused?;
        ensure!(
            took[90] < Duration::from_millis(100),
            "refused after {took:?}"
        );
        longest
    })?;
    ensure!(longest <= 4.0, "{longest} clients waited to be accepted");
    let status: Value = serde_json::from_str(&gate.gatectl(&["status", "--json"])?)?;
    let queue = &status["process"]["accept_queues"][0];
    ensure!(queue["listener"] == listener.as_str(), "{queue}");
    ensure!(queue["length"] == 0, "{queue}");
    ensure!(queue["limit"].as_f64() == Some(limit), "{queue}");
    let text = gate.gatectl(&["status"])?;
    ensure!(text.contains("accept queue    0 of"), "{text}");
    Ok(())
}

/// How long each of so many refusals took, shortest first.
fn refuse(gate: &Gate, count: usize) -> Result<Vec<Duration>> {
    let mut took = Vec::new();
    for _ in 0..count {
        let start = Instant::now();
        ensure!(gate.refused("app", "prod")?.code() == "53300", "the code");
        took.push(start.elapsed());
    }
    took.sort();
    Ok(took)
}

/// A hash alone is as even as this once in some thousand tries.
fn even(stage: &Stage) -> Result<()> {
    const CLIENTS: u64 = 400;
    let settings = "[limits]\nmax_pending = 1000\n[timeouts]\nstartup = \"60s\"\n\
                    [workers]\ncount = 4\npin = \"none\"";
    let gate = Gate::start(stage.plane, stage.postgres.address(), settings)?;
    let _silent = crowd::silent(gate.address(), CLIENTS as usize)?;
    let held = host::eventually(SOON, "all are held", || {
        let held = held(&gate)?;
        Ok((held.iter().sum::<u64>() == CLIENTS).then_some(held))
    })?;
    ensure!(held.len() == 4, "{held:?}");
    let spread = held.iter().max().unwrap_or(&0) - held.iter().min().unwrap_or(&0);
    // A tenth of a worker's share, though hundreds may come between two looks
    // of a worker.
    ensure!(spread <= 10, "{held:?}");
    Ok(())
}

/// What each worker holds.
pub fn held(gate: &Gate) -> Result<Vec<u64>> {
    let status: Value = serde_json::from_str(&gate.gatectl(&["status", "--json"])?)?;
    let loads = status["process"]["worker_loads"].as_array();
    let held = |load: &Value| load["connections"].as_u64();
    Ok(loads.into_iter().flatten().filter_map(held).collect())
}
