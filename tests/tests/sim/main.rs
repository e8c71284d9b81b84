//! The real workers in simulated worlds.
//!
//! `GATE_SIM_SEEDS=n` runs n worlds in place of the usual number, `GATE_SIM_SEED=n` world n alone,
//! with all that happens there.

use std::env;
use std::num::NonZero;
use std::panic;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use gate::session::outcome::{CancelOutcome, CloseReason, Reason, StartupFailure, WaitOutcome};
use gate::stats::Stats;
use gate_tests::sim::{self, Summary};

const SEEDS: u64 = 10_000;

fn number(variable: &str) -> Option<u64> {
    let text = env::var(variable).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{variable}={text} is no number")),
    )
}

/// Runs worlds on all CPUs. Returns what became of them, by outcome.
fn run_all(seeds: u64) -> (Vec<Summary>, Vec<String>) {
    // Each panic is caught and told with its seed.
    panic::set_hook(Box::new(|_| {}));
    let next = AtomicU64::new(0);
    let summaries = Mutex::new(Vec::new());
    let failures = Mutex::new(Vec::new());
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds || failures.lock().is_ok_and(|all| all.len() >= 5) {
                        break;
                    }
                    match sim::run(seed, false) {
                        Ok(summary) => summaries.lock().map(|mut all| all.push(summary)).ok(),
                        Err(why) => failures
                            .lock()
                            .map(|mut all| all.push(why.to_string()))
                            .ok(),
                    };
                }
            });
        }
    });
    drop(panic::take_hook());
    (
        summaries.into_inner().unwrap_or_default(),
        failures.into_inner().unwrap_or_default(),
    )
}

#[test]
fn every_seed_holds_and_together_they_reach_every_outcome() {
    if let Some(seed) = number("GATE_SIM_SEED") {
        let summary = sim::run(seed, true).unwrap_or_else(|failure| panic!("{failure}"));
        println!("seed {seed}: {} steps, {:?}", summary.steps, summary.time);
        return;
    }
    let seeds = number("GATE_SIM_SEEDS").unwrap_or(SEEDS);
    let (worlds, failures) = run_all(seeds);
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
    println!(
        "{seeds} worlds, {} rounds, {} bytes spliced, {} at rest",
        worlds.iter().map(|world| world.steps).sum::<u64>(),
        worlds.iter().map(|world| world.spliced).sum::<usize>(),
        worlds.iter().filter(|world| world.rested).count(),
    );
    let reached = reached(&worlds);
    for (outcome, count) in &reached {
        println!("{count:>8} {outcome}");
    }
    if seeds >= SEEDS {
        let missing = reached.iter().filter(|(_, count)| *count == 0);
        let missing: Vec<&String> = missing.map(|(outcome, _)| outcome).collect();
        assert!(missing.is_empty(), "no world reaches {missing:?}");
        assert!(
            worlds.iter().any(|world| world.spliced > 0),
            "nothing is spliced"
        );
    }
}

fn reached(worlds: &[Summary]) -> Vec<(String, u64)> {
    let all_stats = || worlds.iter().flat_map(|world| &world.stats);
    let sum = |count: &dyn Fn(&Stats) -> u64| all_stats().map(|stats| count(stats)).sum::<u64>();
    let mut all = Vec::new();
    // No world has a kernel plane or a limit by source.
    let elsewhere = [Reason::OverCeiling, Reason::Source];
    for reason in Reason::ALL
        .iter()
        .filter(|reason| !elsewhere.contains(reason))
    {
        let count = sum(&|stats| stats.rejected_count(0, *reason));
        all.push((format!("rejected: {}", reason.label()), count));
    }
    for failure in StartupFailure::ALL {
        let count = sum(&|stats| stats.startup_failed_count(*failure));
        all.push((format!("startup: {}", failure.label()), count));
    }
    for outcome in CancelOutcome::ALL {
        let count = sum(&|stats| stats.cancelled_count(*outcome));
        all.push((format!("cancel: {}", outcome.label()), count));
    }
    for outcome in WaitOutcome::ALL {
        let count = sum(&|stats| stats.waited_count(*outcome));
        all.push((format!("waited: {}", outcome.label()), count));
    }
    for seen in sim::SEEN {
        let counts = worlds.iter().filter_map(|world| world.seen.get(seen));
        all.push((format!("seen: {seen}"), counts.sum()));
    }
    for reason in CloseReason::ALL {
        let count = sum(&|stats| stats.closed_count(*reason));
        all.push((format!("closed: {}", reason.label()), count));
    }
    all
}

#[test]
fn a_world_is_its_seed() {
    for seed in 0..20 {
        let world = || sim::run(seed, false).map(|world| (world.steps, world.time));
        let (first, second) = (world(), world());
        match (first, second) {
            (Ok(first), Ok(second)) => assert_eq!(first, second, "seed {seed}"),
            (Err(failure), _) | (_, Err(failure)) => panic!("{failure}"),
        }
    }
}
