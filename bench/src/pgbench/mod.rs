//! pgbench through gate, through HAProxy and directly.
//!
//! The paths take turns within each round, and begin with another one in each
//! round, so that a machine that grows slower in time favours nobody. Ratios
//! are made within a round and then their median is taken.

mod one;
mod report;

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::cpu;
use crate::host::{Host, version};
use crate::peer::Proxy;
use one::{Mode, Pgbench};
use report::{Path, Report, Run};

/// pgbench through gate, through HAProxy and directly, interleaved.
///
/// Runs `pgbench -S -n -c 16 -j 4 -T 10`, and the same with -C, in each round on
/// each path. Needs pgbench's tables (or --initialize) in a PostgreSQL that lets
/// the user in without a password, or with PGPASSWORD.
#[derive(Args)]
pub struct Options {
    /// The PostgreSQL itself: host:port
    #[arg(long)]
    direct: String,
    /// A gate that runs in front of it: host:port
    #[arg(long, requires = "gate_pid", conflicts_with = "gate_bin")]
    gate: Option<String>,
    /// Process of that gate, whose CPU time is read
    #[arg(long, requires = "gate")]
    gate_pid: Option<u32>,
    /// A gate to be started for the comparison
    #[arg(long)]
    gate_bin: Option<PathBuf>,
    /// Its kernel plane: auto, required or off
    #[arg(long, default_value = "auto", requires = "gate_bin")]
    gate_kernel: String,
    /// HAProxy's program
    #[arg(long, default_value = "haproxy")]
    haproxy: String,
    /// pgbench's program
    #[arg(long, default_value = "pgbench")]
    pgbench: String,
    /// User
    #[arg(long, default_value = "postgres")]
    user: String,
    /// Database
    #[arg(long, default_value = "postgres")]
    database: String,
    /// Make pgbench's tables first, at this scale
    #[arg(long, value_name = "SCALE")]
    initialize: Option<u32>,
    /// Rounds
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Seconds of each run
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// Clients of each run
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1000))]
    clients: u32,
    /// Threads of pgbench
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    jobs: u32,
}

/// One path to the server.
struct Route {
    path: Path,
    address: SocketAddr,
    /// The proxy's process.
    pid: Option<u32>,
}

/// Runs the comparison and prints it.
///
/// # Errors
/// A proxy or a run failed: a comparison is whole, or none.
pub fn run(options: &Options, json: bool) -> Result<()> {
    let direct = resolve(&options.direct)?;
    let haproxy = Proxy::haproxy(&options.haproxy, direct)?;
    let gate = start_gate(options, direct)?;
    let pgbench = Pgbench {
        program: options.pgbench.clone(),
        user: options.user.clone(),
        database: options.database.clone(),
        seconds: options.seconds,
        clients: options.clients,
        jobs: options.jobs,
    };
    if let Some(scale) = options.initialize {
        pgbench.initialize(direct, scale)?;
    }
    let mut routes = vec![Route {
        path: Path::Direct,
        address: direct,
        pid: None,
    }];
    for (path, proxy) in [(Path::Haproxy, Some(&haproxy)), (Path::Gate, gate.as_ref())] {
        routes.extend(proxy.map(|proxy| Route {
            path,
            address: proxy.address,
            pid: Some(proxy.pid),
        }));
    }
    let report = Report {
        host: Host::of_this_machine(),
        versions: versions(options, &pgbench, direct),
        commands: commands(&pgbench, &routes, [Some(&haproxy), gate.as_ref()]),
        rounds: options.rounds,
        runs: all_rounds(options.rounds, &pgbench, &routes)?,
    };
    report.print(json)
}

fn start_gate(options: &Options, direct: SocketAddr) -> Result<Option<Proxy>> {
    Ok(match (&options.gate, options.gate_pid, &options.gate_bin) {
        (Some(address), Some(pid), _) => Some(Proxy::running(resolve(address)?, pid)),
        (_, _, Some(program)) => Some(Proxy::gate(program, direct, &options.gate_kernel)?),
        _ => {
            eprintln!("gate-bench: no --gate and no --gate-bin: HAProxy and direct only");
            None
        }
    })
}

fn all_rounds(rounds: u32, pgbench: &Pgbench, routes: &[Route]) -> Result<Vec<Run>> {
    let mut runs = Vec::new();
    for round in 0..rounds {
        for mode in [Mode::Keep, Mode::Reconnect] {
            for turn in 0..routes.len() {
                let route = &routes[(turn + round as usize) % routes.len()];
                let run = one_run(round, pgbench, mode, route)?;
                eprintln!("{}", run.line());
                runs.push(run);
            }
        }
    }
    Ok(runs)
}

fn one_run(round: u32, pgbench: &Pgbench, mode: Mode, route: &Route) -> Result<Run> {
    let spent = || route.pid.map(cpu::spent).transpose();
    let before = spent()?;
    let outcome = pgbench
        .run(mode, route.address)
        .with_context(|| format!("{} {}", route.path.name(), mode.name()))?;
    ensure!(
        outcome.failed == 0,
        "{} transactions failed",
        outcome.failed
    );
    let spent = spent()?.zip(before).map(|(after, before)| after - before);
    Ok(Run {
        round,
        mode,
        path: route.path,
        tps: outcome.tps,
        latency_ms: outcome.latency_ms,
        transactions: outcome.transactions,
        proxy_cpu_us_per_transaction: spent
            .map(|spent| spent.as_secs_f64() * 1e6 / outcome.transactions as f64),
    })
}

fn versions(options: &Options, pgbench: &Pgbench, direct: SocketAddr) -> Vec<String> {
    let mut versions = vec![
        version(&options.pgbench, "--version"),
        pgbench.server_version(direct),
        version(&options.haproxy, "-v"),
    ];
    if let Some(program) = &options.gate_bin {
        versions.push(version(&program.to_string_lossy(), "--version"));
    }
    versions
}

fn commands(pgbench: &Pgbench, routes: &[Route], proxies: [Option<&Proxy>; 2]) -> Vec<String> {
    let proxies = proxies.into_iter().flatten();
    let started = proxies.filter_map(|proxy| proxy.command.clone());
    let runs = routes.iter().flat_map(|route| {
        [Mode::Keep, Mode::Reconnect].map(|mode| pgbench.shown(mode, route.address))
    });
    started.chain(runs).collect()
}

fn resolve(address: &str) -> Result<SocketAddr> {
    let mut found = address
        .to_socket_addrs()
        .with_context(|| format!("{address} is not host:port"))?;
    match found.next() {
        Some(found) => Ok(found),
        None => bail!("{address} has no address"),
    }
}
