//! A storm of refusals: connect, send a startup packet, read the refusal to
//! its end, again. Closed loop: a client has one connection at a time, so the
//! load is bounded by the number of clients.

mod exchange;

use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hdrhistogram::Histogram;
use serde::Serialize;

use crate::cpu;
use crate::host::Host;
use exchange::{Answer, refused_once, startup_packet};

/// Loads run before what is measured, so that caches are warm.
const WARM_UP: Duration = Duration::from_secs(1);
const LATENCY_US_MAX: u64 = 60_000_000;
const PERCENTILES: [f64; 4] = [50.0, 90.0, 99.0, 99.9];

/// Refusals, as fast as a bounded number of clients can have them.
///
/// The target must refuse the user with SQLSTATE 53300; any other answer is
/// counted and fails the run.
#[derive(Args)]
pub struct Options {
    /// Where to connect: host:port
    #[arg(long)]
    target: String,
    /// Clients, each with one connection at a time
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=1024))]
    clients: u16,
    /// How long to measure, after a second of warming up
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    seconds: u64,
    /// User of the startup packet
    #[arg(long)]
    user: String,
    /// Database of the startup packet
    #[arg(long, default_value = "postgres")]
    database: String,
    /// Process whose CPU time is divided by the refusals
    #[arg(long)]
    server_pid: Option<u32>,
}

/// What came of a storm.
#[derive(Debug, Serialize)]
struct Report {
    host: Host,
    target: String,
    clients: u16,
    measured_seconds: f64,
    refusals: u64,
    refusals_per_second: f64,
    latency_us: Vec<Percentile>,
    latency_us_max: u64,
    server_cpu_us_per_refusal: Option<f64>,
    /// Answers other than 53300, each with an example of what came.
    other_answers: u64,
    other_answer: Option<String>,
}

#[derive(Debug, Serialize)]
struct Percentile {
    percentile: f64,
    value: u64,
}

/// What one client, or all of them, saw while it was measured.
struct Seen {
    latency_us: Histogram<u64>,
    other_answers: u64,
    other_answer: Option<String>,
}

/// Runs the storm and prints what came of it.
///
/// # Errors
/// The target cannot be reached, or answered otherwise than with 53300.
pub fn run(options: &Options, json: bool) -> Result<()> {
    let target = resolve(&options.target)?;
    let packet = startup_packet(&options.user, &options.database);
    if let Answer::Other(what) =
        refused_once(target, &packet).with_context(|| format!("{target} gave no answer"))?
    {
        bail!("{target} does not refuse this user: {what}");
    }
    let report = measure(options, target, &packet)?;
    if json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print(&report);
    }
    ensure!(
        report.other_answers == 0,
        "{} answers were not 53300, such as: {}",
        report.other_answers,
        report.other_answer.unwrap_or_default()
    );
    Ok(())
}

fn resolve(target: &str) -> Result<SocketAddr> {
    let mut found = target
        .to_socket_addrs()
        .with_context(|| format!("{target} is not host:port"))?;
    found
        .next()
        .with_context(|| format!("{target} has no address"))
}

fn measure(options: &Options, target: SocketAddr, packet: &[u8]) -> Result<Report> {
    let (measuring, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let (seen, lasted, spent) = thread::scope(|scope| -> Result<_> {
        let clients: Vec<_> = (0..options.clients)
            .map(|_| scope.spawn(|| client(target, packet, &measuring, &over)))
            .collect();
        // The clients must end whatever happens here, or the scope never does.
        let timed = timed(options, &measuring);
        over.store(true, Relaxed);
        let mut seen = Seen::new()?;
        for client in clients {
            match client.join() {
                Ok(one) => seen.add(one?)?,
                Err(_) => bail!("a client panicked"),
            }
        }
        let (lasted, spent) = timed?;
        Ok((seen, lasted, spent))
    })?;
    let refusals = seen.latency_us.len();
    ensure!(refusals > 0 || seen.other_answers > 0, "no answer in time");
    let value = |percentile| Percentile {
        percentile,
        value: seen.latency_us.value_at_percentile(percentile),
    };
    Ok(Report {
        host: Host::of_this_machine(),
        target: target.to_string(),
        clients: options.clients,
        measured_seconds: lasted.as_secs_f64(),
        refusals,
        refusals_per_second: refusals as f64 / lasted.as_secs_f64(),
        latency_us: PERCENTILES.map(value).into(),
        latency_us_max: seen.latency_us.max(),
        server_cpu_us_per_refusal: spent
            .filter(|_| refusals > 0)
            .map(|spent| spent.as_secs_f64() * 1e6 / refusals as f64),
        other_answers: seen.other_answers,
        other_answer: seen.other_answer,
    })
}

/// Lets the clients warm up, then measures. Returns how long, and what the
/// server spent meanwhile.
fn timed(options: &Options, measuring: &AtomicBool) -> Result<(Duration, Option<Duration>)> {
    let spent = || options.server_pid.map(cpu::spent).transpose();
    thread::sleep(WARM_UP);
    let before = spent()?;
    let begin = Instant::now();
    measuring.store(true, Relaxed);
    thread::sleep(Duration::from_secs(options.seconds));
    measuring.store(false, Relaxed);
    let lasted = begin.elapsed();
    let spent = spent()?.zip(before).map(|(after, before)| after - before);
    Ok((lasted, spent))
}

fn client(
    target: SocketAddr,
    packet: &[u8],
    measuring: &AtomicBool,
    over: &AtomicBool,
) -> Result<Seen> {
    let mut seen = Seen::new()?;
    while !over.load(Relaxed) {
        let begin = Instant::now();
        let answer = refused_once(target, packet);
        if !measuring.load(Relaxed) {
            continue;
        }
        match answer {
            Ok(Answer::Refused) => {
                let us = u64::try_from(begin.elapsed().as_micros())?;
                seen.latency_us.saturating_record(us);
            }
            Ok(Answer::Other(what)) => seen.other(what),
            Err(error) => {
                seen.other(format!("{error:#}"));
                // A target that is gone must not make this loop spin.
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
    Ok(seen)
}

impl Seen {
    fn new() -> Result<Self> {
        Ok(Self {
            latency_us: Histogram::new_with_bounds(1, LATENCY_US_MAX, 3)?,
            other_answers: 0,
            other_answer: None,
        })
    }

    fn other(&mut self, what: String) {
        self.other_answers += 1;
        self.other_answer.get_or_insert(what);
    }

    fn add(&mut self, one: Self) -> Result<()> {
        self.latency_us.add(one.latency_us)?;
        self.other_answers += one.other_answers;
        self.other_answer = self.other_answer.take().or(one.other_answer);
        Ok(())
    }
}

fn print(report: &Report) {
    println!("{}", report.host.line());
    println!(
        "storm on {} with {} clients for {:.1} s",
        report.target, report.clients, report.measured_seconds
    );
    println!(
        "refusals      {} ({:.0} per second)",
        report.refusals, report.refusals_per_second
    );
    for Percentile { percentile, value } in &report.latency_us {
        println!("latency p{percentile:<5}{value:>8} us");
    }
    println!("latency max   {:>7} us", report.latency_us_max);
    match report.server_cpu_us_per_refusal {
        Some(cpu) => println!("server CPU    {cpu:>7.2} us per refusal"),
        None => println!("server CPU    not measured: no --server-pid"),
    }
    println!("other answers {:>7}", report.other_answers);
}
