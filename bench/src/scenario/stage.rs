//! What a load finds when it begins, and what all loads have in common.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, bail};

use super::Measured;
use crate::backend::Backend;
use crate::host::interrupt::pause;
use crate::load::crew::{Crew, Place};
use crate::load::tally::Tally;
use crate::measure::window::{Watch, Window};

/// Which server stands behind the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// The bench's own.
    Backend,
    /// A real PostgreSQL; nobody is bound to CPUs then.
    Postgres,
    /// The bench's own behind a proxy, but PostgreSQL itself where there is none:
    /// only it can refuse by itself.
    PostgresIfDirect,
}

/// How every load is run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Measured time of each run.
    pub seconds: Duration,
    /// The same of `stall`.
    pub stall_seconds: Duration,
    /// Time before it.
    pub warm_up: Duration,
    /// Per second, of loads that ask by a schedule; `None`: each its own.
    pub rate: Option<f64>,
    /// Clients that never read.
    pub stalled: usize,
    /// Numbers of idle sessions.
    pub idle: Vec<usize>,
    /// Of each proxy, where nobody is bound to CPUs.
    pub workers: usize,
    /// pgbench's program.
    pub pgbench: String,
}

impl Plan {
    /// Of the lines of the table of goals.
    #[must_use]
    pub fn of_goals() -> Self {
        Self {
            seconds: Duration::from_secs(2),
            stalled: 1000,
            idle: vec![9000],
            ..Self::default()
        }
    }
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            seconds: Duration::from_secs(3),
            stall_seconds: Duration::from_secs(3),
            warm_up: Duration::from_millis(500),
            rate: None,
            stalled: 200,
            idle: vec![100, 1000, 9000],
            workers: 1,
            pgbench: "pgbench".to_owned(),
        }
    }
}

/// A way to the server, ready to be put under a load.
#[derive(Clone)]
pub struct Stage<'a> {
    /// Where clients connect.
    pub target: SocketAddr,
    /// The proxy's first process.
    pub proxy: Option<u32>,
    /// The bench's own server.
    pub backend: &'a Backend,
    /// Where the load's threads live.
    pub place: Place,
    /// Reads what the sides use.
    pub watch: Watch,
    /// How every load is run.
    pub plan: &'a Plan,
    /// Called at the beginning and at the end of the measured time.
    pub probe: Option<&'a dyn Fn() -> Result<()>>,
}

impl Stage<'_> {
    /// Lets a load run: warm-up, then the measured time.
    ///
    /// # Errors
    /// The load failed, or a side of it is gone, or a signal came.
    pub fn run(&self, crew: Crew) -> Result<(Tally, Window)> {
        let (tally, window, _) = self.run_counting(crew, || 0)?;
        Ok((tally, window))
    }

    /// The same; also returns how far a counter went in the measured time.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_counting(
        &self,
        crew: Crew,
        counter: impl Fn() -> u64,
    ) -> Result<(Tally, Window, u64)> {
        pause(self.plan.warm_up)?;
        let probe = || self.probe.map_or(Ok(()), |probe| probe());
        let before = self.watch.snapshot()?;
        probe()?;
        let counted = counter();
        crew.phase().measure();
        pause(self.plan.seconds)?;
        let lost_one = crew.has_lost_one();
        let after = self.watch.snapshot();
        probe()?;
        let counted = counter() - counted;
        let tally = crew.end()?;
        if lost_one {
            bail!("a thread of the load ended early");
        }
        Ok((tally, self.watch.window(&before, &after?), counted))
    }

    /// Lets a load run that is counted in units, and reckons what each cost.
    ///
    /// # Errors
    /// As [`run`](Self::run); or nothing was done.
    pub fn run_units(&self, crew: Crew) -> Result<Measured> {
        let (tally, window) = self.run(crew)?;
        let count = tally.count();
        if count == 0 {
            bail!(
                "nothing was done in time; {}",
                tally.failure.as_deref().unwrap_or("no answer came")
            );
        }
        let values = unit_values(count, &window);
        let percentile =
            |at| Duration::from_nanos(tally.latency.value_at_percentile(at)).as_secs_f64() * 1e6;
        let latencies = [("p50", 50.0), ("p99", 99.0)];
        let latencies = latencies.map(|(key, at)| (key.to_owned(), percentile(at)));
        Ok(Measured {
            values: values.into_iter().chain(latencies).collect(),
            window,
            failed: tally.failed,
            failure: tally.failure,
            unfinished: tally.unfinished,
            latency: Some(tally.latency),
        })
    }
}

/// Rate, and microseconds of CPU for each unit.
pub fn unit_values(count: u64, window: &Window) -> Vec<(String, f64)> {
    let mut values = vec![(
        "rate".to_owned(),
        count as f64 / window.elapsed.as_secs_f64(),
    )];
    values.extend(cpu_values(window, count as f64 / 1e6));
    values
}

/// CPU seconds divided by so many; of the proxy only where there is one.
pub fn cpu_values(window: &Window, by: f64) -> Vec<(String, f64)> {
    let all: Duration = window.sides.iter().map(|(_, used)| used.cpu).sum();
    let proxy = window.cpu("proxy").map(|cpu| ("proxy_cpu", cpu));
    let each = [Some(("all_cpu", all)), proxy];
    let each = each.into_iter().flatten();
    each.map(|(key, cpu)| (key.to_owned(), cpu.as_secs_f64() / by))
        .collect()
}
