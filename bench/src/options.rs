//! What a run of the bench can be told.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};

use crate::host::cpus::CpuList;
use crate::load::pace::Pace;
use crate::scenario::{Plan, Scenario};

/// Measures gate beside its peers, interleaved, and writes a report.
#[derive(Args, Debug)]
pub struct Options {
    /// What to measure
    #[arg(value_enum, default_value = "all")]
    pub scenarios: Vec<Scenario>,
    /// Only loads whose name contains this text, such as `64 B x 16`
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// gate's program; given twice as NAME=PATH, two builds are compared
    #[arg(long, value_name = "[NAME=]PATH", required = true)]
    pub gate_bin: Vec<String>,
    /// What the report calls the measured commit
    #[arg(long, default_value = "unknown")]
    pub commit: String,
    /// Folder of the report, made if it is not there
    #[arg(long, default_value = "target/bench/run")]
    pub out: PathBuf,
    /// Interleaved rounds of each point; medians of fewer than five say little
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Measured seconds of each run; default: 3, and 2 of `goals`
    #[arg(long)]
    pub seconds: Option<f64>,
    /// Seconds of load before them
    #[arg(long, default_value_t = 0.5)]
    pub warm_up: f64,
    /// Ways to the server, separated by commas; default: every one that is installed. Besides
    /// them `gate-unix`, `haproxy-unix` and `pgbouncer-unix` have the server on a unix socket
    #[arg(long, value_delimiter = ',')]
    pub peers: Vec<String>,
    /// CPUs of gate and its peers: `0,2-3`, or `all` to bind nobody; default: the first half, and
    /// one of them for `goals`
    #[arg(long)]
    pub gate_cpus: Option<CpuList>,
    /// CPUs of load and backend; default: the rest
    #[arg(long)]
    pub load_cpus: Option<CpuList>,
    /// A network device between load and gate instead of loopback; `veth` makes a pair with a
    /// queue for each of gate's CPUs. gate must be among the peers
    #[arg(long, value_name = "DEV")]
    pub nic: Option<String>,
    /// The network namespace with the other end of that device
    #[arg(long, value_name = "NAME", requires = "nic")]
    pub peer_namespace: Option<String>,
    /// gate's kernel plane
    #[arg(long, default_value = "auto", value_parser = ["auto", "required", "off"])]
    pub kernel: String,
    /// A real PostgreSQL that lets `postgres`, `bench` and `refused` in without a password: host:port
    #[arg(long, requires = "postgres_pid")]
    pub postgres: Option<SocketAddr>,
    /// Its first process, whose CPU time is read
    #[arg(long, requires = "postgres")]
    pub postgres_pid: Option<u32>,
    /// Its unix socket, for the ways that have the server on one
    #[arg(long, value_name = "PATH", requires = "postgres")]
    pub postgres_socket: Option<PathBuf>,
    /// What the report says of it: version, settings
    #[arg(long, value_name = "TEXT")]
    pub postgres_about: Option<String>,
    /// pgbench's program
    #[arg(long, default_value = "pgbench")]
    pub pgbench: String,
    /// Only loads that ask by a schedule, or only those that ask when they are answered
    #[arg(long, value_enum, default_value = "both")]
    pub pace: Paces,
    /// Per second, of all loads that ask by a schedule; default: each load its own
    #[arg(long)]
    pub rate: Option<f64>,
    /// Numbers of sessions of `idle`, separated by commas
    /// [default: 100,1000,9000; 9000 of `goals`]
    #[arg(long, value_delimiter = ',')]
    pub idle: Vec<usize>,
    /// Clients of `stall` that never read; default: 200, and 1000 of `goals`
    #[arg(long)]
    pub stalled: Option<usize>,
    /// Workers of each proxy in `mixed`, where nobody is bound to CPUs. PgBouncer has one thread in
    /// any case: with more, the others are compared with less than themselves
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub mixed_workers: u16,
    /// Congestion control of every socket, for the time of the run
    #[arg(long)]
    pub congestion_control: Option<String>,
    /// A run is repeated if other programs take more than this part of one CPU, in percent
    #[arg(long, default_value_t = 10.0)]
    pub disturbed_above: f64,
    /// So often at most; then it is kept, and marked
    #[arg(long, default_value_t = 2)]
    pub repeats: u32,
    /// After the rounds of each point, one more run of gate under perf(1), for a flame graph
    #[arg(long)]
    pub flame: bool,
}

/// Which loads are run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Paces {
    /// All of them
    Both,
    /// Those that ask by a schedule
    Open,
    /// Those that ask again when they are answered
    Closed,
}

impl Paces {
    /// Whether a load is one of them.
    #[must_use]
    pub fn include(self, pace: Pace) -> bool {
        match self {
            Self::Both => true,
            Self::Open => pace != Pace::Closed,
            Self::Closed => pace == Pace::Closed,
        }
    }
}

impl Options {
    /// Whether the lines of the table of goals are measured, and nothing else.
    #[must_use]
    pub fn goals(&self) -> bool {
        self.scenarios == [Scenario::Goals]
    }

    /// How every load is run.
    ///
    /// # Errors
    /// A number makes no sense.
    pub fn plan(&self) -> Result<Plan> {
        let time = |name: &str, seconds: f64, min: f64| {
            ensure!(
                (min..=3600.0).contains(&seconds),
                "--{name} {seconds}: from {min} to 3600 seconds"
            );
            Ok(Duration::from_secs_f64(seconds))
        };
        let rate_max = 1e7;
        if let Some(rate) = self.rate {
            ensure!(
                (1.0..=rate_max).contains(&rate),
                "--rate {rate}: from 1 to {rate_max:.0} per second"
            );
        }
        ensure!(
            self.disturbed_above >= 0.0,
            "--disturbed-above {}: a part of a CPU, in percent",
            self.disturbed_above
        );
        ensure!(
            self.goals() || !self.scenarios.contains(&Scenario::Goals),
            "`goals` is a choice of its own: name it alone"
        );
        let default = if self.goals() {
            Plan::of_goals()
        } else {
            Plan::default()
        };
        let seconds = match self.seconds {
            Some(seconds) => Some(time("seconds", seconds, 0.1)?),
            None => None,
        };
        Ok(Plan {
            seconds: seconds.unwrap_or(default.seconds),
            stall_seconds: seconds.unwrap_or(default.stall_seconds),
            warm_up: time("warm-up", self.warm_up, 0.0)?,
            rate: self.rate,
            stalled: self.stalled.unwrap_or(default.stalled),
            idle: match &self.idle[..] {
                [] => default.idle,
                idle => idle.to_vec(),
            },
            workers: self.mixed_workers.into(),
            pgbench: self.pgbench.clone(),
        })
    }
}
