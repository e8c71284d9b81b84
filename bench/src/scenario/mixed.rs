//! pgbench through each way to a real PostgreSQL.

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::stage::unit_values;
use super::{Measured, Plan, Point, Server, Stage, measure};
use crate::host::interrupt;
use crate::load::session::DATABASE;
use crate::report::model::Better;

const CLIENTS: usize = 16;
const THREADS: usize = 4;
/// pgbench ends so long after its time at most: it waits for its last answers.
const LATE: Duration = Duration::from_secs(15);
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// Owns pgbench's tables.
const USER: &str = "postgres";

/// What pgbench is told besides, and what it does then.
const MODES: [(&str, &[&str], &str); 3] = [
    ("-S", &["-S"], "one select per transaction"),
    (
        "-S -C",
        &["-S", "-C"],
        "the same, each on a session of its own",
    ),
    (
        "tpcb-like",
        &[],
        "pgbench's own mix of select, update and insert",
    ),
];

pub fn points(plan: &Plan) -> Vec<Point> {
    MODES
        .iter()
        .map(|(name, words, about)| {
            let program = plan.pgbench.clone();
            let workers = plan.workers;
            Point {
                server: Server::Postgres,
                sessions: 256,
                new_sessions: words.contains(&"-C"),
                measures: vec![
                    measure("proxy_cpu", "proxy CPU", "us/transaction", Better::Lower),
                    measure("rate", "rate", "transactions/s", Better::Higher),
                    measure("mean", "mean latency", "ms", Better::Lower),
                    measure(
                        "all_cpu",
                        "CPU of all sides",
                        "us/transaction",
                        Better::Lower,
                    ),
                ],
                ..Point::new(
                    format!("pgbench {name}"),
                    format!(
                        "pgbench -n -c {CLIENTS} -j {THREADS} {}: {about}; nobody is bound to \
                         CPUs, each proxy has as many workers ({workers}), and there is no \
                         warm-up",
                        words.join(" ")
                    ),
                    Box::new(move |stage| run(stage, &program, words)),
                )
            }
        })
        .collect()
}

fn run(stage: &Stage<'_>, program: &str, words: &[&str]) -> Result<Measured> {
    let mut command = Command::new(program);
    command
        .args(["-n", "-c", &CLIENTS.to_string(), "-j", &THREADS.to_string()])
        .args(["-T", &stage.plan.seconds.as_secs().max(1).to_string()])
        .args(words)
        .args(["-h", &stage.target.ip().to_string()])
        .args(["-p", &stage.target.port().to_string()])
        .args(["-U", USER, DATABASE])
        .env_remove("PGOPTIONS")
        // Or every relay would pass TLS on that PgBouncer is told not to speak.
        .env("PGSSLMODE", "disable")
        .env("PGGSSENCMODE", "disable")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    let line = words.join(" ");
    let before = stage.watch.snapshot()?;
    let output = output_within(&mut command, stage.plan.seconds + LATE)
        .with_context(|| format!("`{line}`"))?;
    let after = stage.watch.snapshot()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "`{line}` failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let Some(result) = Outcome::read(&said) else {
        bail!("`{line}` printed something else than expected:\n{said}");
    };
    let window = stage.watch.window(&before, &after);
    let mut values = unit_values(result.transactions, &window);
    // pgbench's own rate leaves out its beginning and its end.
    values.retain(|(key, _)| key != "rate");
    values.push(("rate".to_owned(), result.tps));
    values.push(("mean".to_owned(), result.latency_ms));
    Ok(Measured {
        values,
        window,
        latency: None,
        failed: result.failed,
        failure: (result.failed > 0).then(|| "transactions failed".to_owned()),
        unfinished: 0,
    })
}

/// Runs a command to its end; one that hangs, or a signal, ends it.
fn output_within(command: &mut Command, time: Duration) -> Result<Output> {
    let mut child = command
        .spawn()
        .context("cannot be started: is PostgreSQL's pgbench installed?")?;
    let begin = Instant::now();
    while child.try_wait()?.is_none() {
        let late = begin.elapsed() > time;
        let interrupted = interrupt::check();
        if late || interrupted.is_err() {
            child.kill()?;
            child.wait()?;
            interrupted?;
            bail!("has not ended in time");
        }
        std::thread::sleep(LOOK_EVERY);
    }
    // It prints less than a pipe holds.
    Ok(child.wait_with_output()?)
}

/// What pgbench prints of a run.
#[derive(Debug, PartialEq)]
struct Outcome {
    transactions: u64,
    failed: u64,
    latency_ms: f64,
    tps: f64,
}

impl Outcome {
    fn read(text: &str) -> Option<Self> {
        let after = |label: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(label))?;
            line.split_ascii_whitespace().next()
        };
        Some(Self {
            transactions: after("number of transactions actually processed: ")?
                .split('/')
                .next()?
                .parse()
                .ok()?,
            failed: match after("number of failed transactions: ") {
                Some(count) => count.parse().ok()?,
                None => 0,
            },
            latency_ms: after("latency average = ")?.parse().ok()?,
            tps: after("tps = ")?.parse().ok()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_of_pgbench_is_read() {
        let said = "transaction type: <builtin: select only>\n\
            number of transactions actually processed: 12345\n\
            number of failed transactions: 2 (0.016%)\n\
            latency average = 0.531 ms\n\
            initial connection time = 12.3 ms\n\
            tps = 30086.4 (without initial connection time)\n";
        let expected = Outcome {
            transactions: 12345,
            failed: 2,
            latency_ms: 0.531,
            tps: 30086.4,
        };
        assert_eq!(Outcome::read(said), Some(expected));
        assert_eq!(Outcome::read("tps = 5"), None);
    }
}
