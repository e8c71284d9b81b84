//! What a run of the bench found: the one form that is written as JSON, printed
//! as text and drawn as SVG.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::host::facts::Facts;
use crate::stats::Spread;

/// Of the JSON form; a reader refuses another one.
pub const SCHEMA: u32 = 1;

/// A run of the bench, whole.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// When it began: RFC 3339, UTC.
    pub started: String,
    /// The bench's own command line.
    pub command: String,
    /// The commit that was measured, with `-dirty` if it was changed since.
    pub commit: String,
    /// The machine.
    pub host: Facts,
    /// What was changed on the machine for the time of the run.
    pub host_changes: Vec<HostChange>,
    /// Which CPUs whose work was bound to.
    pub placement: Placement,
    /// Interleaved rounds of each point.
    pub rounds: u32,
    /// Seconds that each run was measured for.
    pub seconds: f64,
    /// Every peer that was asked for, also the absent ones.
    pub peers: Vec<PeerInfo>,
    /// What was measured, in order.
    pub scenarios: Vec<ScenarioReport>,
    /// The real PostgreSQL and its settings, as far as they were told.
    #[serde(default)]
    pub postgres: Option<String>,
    /// The network device between load and gate, if it was not loopback.
    #[serde(default)]
    pub nic: Option<NicReport>,
    /// Which goals were met, if they were asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub goals: Vec<Goal>,
}

/// A line of the table of goals.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Goal {
    /// Scenario and point.
    pub work: String,
    /// Which figure of it: `proxy CPU, gate / haproxy`.
    pub figure: String,
    /// `at most 0.85`; none of a figure that is only reported.
    pub goal: Option<String>,
    /// What would be better still.
    pub stretch: Option<String>,
    /// Over the rounds.
    pub measured: Option<Spread>,
    /// How many rounds these are.
    pub rounds: usize,
    /// By the median.
    pub verdict: Verdict,
    /// What a reader must know of it.
    pub notes: Vec<String>,
}

/// Whether a goal was met.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Also what would be better still.
    MetWithStretch,
    /// It was.
    Met,
    /// It was not.
    Missed,
    /// There is no goal, only a figure.
    Reported,
    /// There is no figure.
    NotMeasured,
}

/// A setting of the machine that was another one during the run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostChange {
    /// Its name, as `sysctl` knows it.
    pub setting: String,
    /// What it was, and is again.
    pub before: String,
    /// What it was during the run.
    pub during: String,
}

/// Which CPUs whose work was bound to; empty where it was not bound.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Placement {
    /// Of gate and its peers.
    pub gate_cpus: Vec<usize>,
    /// Of load and backend.
    pub load_cpus: Vec<usize>,
    /// What to know of them, such as two that are threads of one core.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// A way from client to server that was asked for.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PeerInfo {
    /// `gate`, `haproxy`, ..., `direct`.
    pub name: String,
    /// What it says of its version.
    pub version: Option<String>,
    /// The exact command lines that it ran with, without repetitions.
    pub commands: Vec<String>,
    /// Why it was not measured at all.
    pub absent: Option<String>,
    /// What it does otherwise than the others.
    #[serde(default)]
    pub note: Option<String>,
}

/// One scenario.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScenarioReport {
    /// As the command line knows it.
    pub name: String,
    /// What it shows, in one line.
    pub about: String,
    /// What was measured of it.
    pub points: Vec<PointReport>,
}

/// One load, on every way to the server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PointReport {
    /// Short: `64 B x 16, open`.
    pub name: String,
    /// What the load does, in one line.
    pub about: String,
    /// The columns, the most telling one first.
    pub measures: Vec<Measure>,
    /// The rows.
    pub paths: Vec<PathReport>,
}

/// A column: one figure of each run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Measure {
    /// The key of [`Run::values`].
    pub key: String,
    /// For people: `proxy CPU`.
    pub label: String,
    /// For people: `us/request`.
    pub unit: String,
    /// Which way is good.
    pub better: Better,
}

/// Which way of a figure is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Better {
    /// Less of it.
    Lower,
    /// More of it.
    Higher,
}

/// One way to the server under one load.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct PathReport {
    /// The peer's name.
    pub peer: String,
    /// Why there are no runs of it, though the peer is there.
    pub left_out: Option<String>,
    /// One per round.
    pub runs: Vec<Run>,
    /// What a reader must know of its figures under this load.
    #[serde(default)]
    pub note: Option<String>,
    /// Runs that were repeated because something disturbed them, so that anybody can
    /// see that repeating selects nothing.
    #[serde(default)]
    pub thrown_away: Vec<Run>,
    /// Over the rounds, by [`Measure::key`].
    pub spread: BTreeMap<String, Spread>,
    /// Ratios to other peers, paired by round: by [`Measure::key`], then by peer.
    pub ratios: BTreeMap<String, BTreeMap<String, Spread>>,
    /// Latencies of all rounds together.
    pub latency: Option<Latency>,
}

/// Latencies of all rounds together.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Latency {
    /// What is timed, from what to what.
    pub of: String,
    /// Percentile and microseconds.
    pub percentiles_us: Vec<(f64, f64)>,
    /// How many were timed.
    pub count: u64,
    /// The histogram (HdrHistogram V2 log), relative to the report's folder.
    pub histogram: String,
}

/// One run of a load on one way to the server.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Run {
    /// From 0.
    pub round: u32,
    /// Measured time, seconds.
    pub seconds: f64,
    /// By [`Measure::key`].
    pub values: BTreeMap<String, f64>,
    /// Who took how much of the CPUs, and who had to wait for one.
    pub sides: Vec<Side>,
    /// What held the rate down, if it is known: `proxy`, `load`, `schedule`.
    pub bottleneck: String,
    /// What was not done as it should be.
    #[serde(default)]
    pub failed: u64,
    /// An example of it.
    #[serde(default)]
    pub failure: Option<String>,
    /// What was due by a schedule, but not done in the end.
    #[serde(default)]
    pub unfinished: u64,
    /// Runs of this round thrown away because something disturbed them.
    pub repeated: u32,
    /// What disturbed the run that was kept, if even the last one was.
    pub disturbed: Option<String>,
}

/// A side of a run: the proxy, the load, or the backend.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Side {
    /// `proxy`, `load` or `backend`.
    pub name: String,
    /// CPU time, as a share of the run's time: 1.0 is one CPU all the time.
    pub cpus: f64,
    /// Run-queue delay: time that its threads were ready to run and had no CPU, as
    /// a share of the run's time, summed over its threads. Unknown of processes that
    /// have ended.
    pub delay: Option<f64>,
}

/// The network device between load and gate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicReport {
    /// Gate's end.
    pub device: String,
    /// Its driver; empty if it has none.
    pub driver: String,
    /// How the two ends are apart, in one line.
    pub about: String,
    /// What to know before the figures are believed.
    pub notes: Vec<String>,
    /// What went through it, one for each run that was looked at.
    pub runs: Vec<NicRun>,
}

/// What went through a network device during a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicRun {
    /// The scenario and its point.
    pub name: String,
    /// Who ran on the near end.
    pub peer: String,
    /// What [`QueueRow::packets`] counts.
    pub packets_of: String,
    /// By queue.
    pub rows: Vec<QueueRow>,
    /// Connections accepted by workers on a CPU that no queue has.
    pub elsewhere: Option<u64>,
}

/// A receive queue, and who handles what comes in at it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueRow {
    /// Its number.
    pub queue: u32,
    /// Its interrupt; virtual devices have none.
    pub irq: Option<u32>,
    /// The one CPU that handles its packets; `None`: it has none of its own.
    pub cpu: Option<usize>,
    /// Gate's worker on that CPU.
    pub worker: Option<usize>,
    /// Packets received, see [`NicRun::packets_of`].
    pub packets: Option<u64>,
    /// Connections that this worker accepted, from whichever queue: the kernel
    /// gives them to workers by a hash of its own.
    pub connections: Option<u64>,
}
