//! What is measured: each scenario is a list of points, each point one load that
//! every way to the server is put under.

mod admit;
mod bulk;
mod connect;
mod idle;
mod kernel;
mod mixed;
mod relay;
mod stage;
mod stall;
mod storm;

use anyhow::Result;
use clap::ValueEnum;
use hdrhistogram::Histogram;

use crate::load::pace::Pace;
use crate::measure::window::Window;
use crate::peer::Role;
use crate::report::goals;
use crate::report::model::{Better, Measure};

pub use stage::{Plan, Server, Stage};

/// What can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Scenario {
    /// Refusals: per second, and CPU for each; polite (53300) and hard (reset)
    Storm,
    /// From connect to ReadyForQuery, for clients that come by a schedule
    Admit,
    /// Ping-pong at several sizes and numbers of sessions
    Relay,
    /// Bulk: 1 and 8 streams, both ways
    Bulk,
    /// Memory of user and kernel for each idle session
    Idle,
    /// New sessions per second
    Connect,
    /// What the kernel programs cost: gate with them and without, whatever --peers says
    Kernel,
    /// Latency of live sessions beside clients that never read
    Stall,
    /// pgbench through each way to a real PostgreSQL
    Mixed,
    /// All of these
    All,
    /// Of these, only what the table of goals needs, which ends the report then
    Goals,
}

impl Scenario {
    /// Everything that a line of the table of goals needs, with the ways that it
    /// needs.
    #[must_use]
    pub fn of_goals(plan: &Plan) -> Vec<(Self, Vec<Point>)> {
        let all = Self::resolve(&[Self::All]).into_iter();
        let chosen = all.map(|scenario| {
            let mut points = scenario.points(plan);
            for point in &mut points {
                point.peers = Some(goals::ways(&scenario.name(), &point.name));
            }
            points.retain(|point| point.peers.as_ref().is_some_and(|ways| !ways.is_empty()));
            (scenario, points)
        });
        chosen.filter(|(_, points)| !points.is_empty()).collect()
    }

    /// `All` resolved, in order, without repetitions.
    #[must_use]
    pub fn resolve(asked: &[Self]) -> Vec<Self> {
        let every = Self::value_variants().iter().copied();
        every
            .filter(|one| ![Self::All, Self::Goals].contains(one))
            .filter(|one| asked.contains(one) || asked.contains(&Self::All))
            .collect()
    }

    /// As the command line knows it.
    #[must_use]
    pub fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// What it shows, in one line.
    #[must_use]
    pub fn about(self) -> String {
        let help = self.to_possible_value().and_then(|v| v.get_help().cloned());
        help.map_or_else(String::new, |help| help.to_string())
    }

    /// What is measured of it.
    #[must_use]
    pub fn points(self, plan: &Plan) -> Vec<Point> {
        match self {
            Self::Storm => storm::points(plan),
            Self::Admit => admit::points(plan),
            Self::Relay => relay::points(plan),
            Self::Bulk => bulk::points(),
            Self::Idle => idle::points(plan),
            Self::Connect => connect::points(plan),
            Self::Kernel => kernel::points(plan),
            Self::Stall => stall::points(plan),
            Self::Mixed => mixed::points(plan),
            Self::All | Self::Goals => Vec::new(),
        }
    }
}

/// One load, for every way to the server.
pub struct Point {
    /// Short, for a heading.
    pub name: String,
    /// What the load does, in one line.
    pub about: String,
    /// What the proxy does with the clients.
    pub role: Role,
    /// Sessions at once, at most.
    pub sessions: usize,
    /// Whether making sessions is what is measured, which a pool may save itself.
    pub new_sessions: bool,
    /// Which server stands behind the proxy.
    pub server: Server,
    /// Whether gate with its kernel plane stands beside gate without, instead of
    /// the peers.
    pub planes: bool,
    /// The only ways that take part, by name.
    pub peers: Option<Vec<&'static str>>,
    /// The columns of the report.
    pub measures: Vec<Measure>,
    /// What latencies are of, if there are any.
    pub timed: Option<&'static str>,
    /// When the load asks.
    pub pace: Pace,
    /// Puts a way to the server under the load.
    pub work: Work,
}

/// Puts a way to the server under a load.
pub type Work = Box<dyn Fn(&Stage<'_>) -> Result<Measured> + Send + Sync>;

/// What came of a load on one way to the server.
pub struct Measured {
    /// By the keys of the point's measures.
    pub values: Vec<(String, f64)>,
    /// Who took how much of the CPUs meanwhile.
    pub window: Window,
    /// Nanoseconds.
    pub latency: Option<Histogram<u64>>,
    /// What was not done as it should be.
    pub failed: u64,
    /// An example of it.
    pub failure: Option<String>,
    /// What was due by a schedule, but not done in the end.
    pub unfinished: u64,
}

impl Point {
    /// A point of a load on the bench's own backend, relayed, asking in a closed
    /// loop; the rest is filled in by whoever makes one.
    fn new(name: impl Into<String>, about: impl Into<String>, work: Work) -> Self {
        Self {
            name: name.into(),
            about: about.into(),
            role: Role::Relay,
            sessions: 64,
            new_sessions: false,
            server: Server::Backend,
            planes: false,
            peers: None,
            measures: Vec::new(),
            timed: None,
            pace: Pace::Closed,
            work,
        }
    }
}

fn measure(key: &str, label: &str, unit: impl Into<String>, better: Better) -> Measure {
    Measure {
        key: key.to_owned(),
        label: label.to_owned(),
        unit: unit.into(),
        better,
    }
}

/// What every load that is counted in units shows.
fn unit_measures(unit: &str) -> Vec<Measure> {
    let unit_cpu = format!("us/{unit}");
    vec![
        measure("proxy_cpu", "proxy CPU", unit_cpu.clone(), Better::Lower),
        measure("rate", "rate", format!("{unit}s/s"), Better::Higher),
        measure("all_cpu", "CPU of all sides", unit_cpu, Better::Lower),
    ]
}

/// For loads that make connections: on loopback the client's own CPU does the
/// kernel's work of accepting and refusing, so all sides come first.
fn all_sides_first(mut measures: Vec<Measure>) -> Vec<Measure> {
    measures.sort_by_key(|measure| measure.key != "all_cpu");
    measures
}

/// The same, for a load that asks by a schedule: latency is the result, and the
/// rate shows whether the schedule was kept.
fn paced_measures(unit: &str) -> Vec<Measure> {
    let mut measures = unit_measures(unit);
    measures.sort_by_key(|measure| measure.key == "rate");
    measures.insert(0, measure("p99", "p99", "us", Better::Lower));
    measures.insert(0, measure("p50", "p50", "us", Better::Lower));
    measures
}

/// `16 B`, `4 KiB`.
fn size(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        _ => format!("{} KiB", bytes / 1024),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_everything_once() {
        let all = Scenario::resolve(&[Scenario::Storm, Scenario::All]);
        assert_eq!(all.len(), Scenario::value_variants().len() - 2);
        assert_eq!(
            Scenario::resolve(&[Scenario::Relay, Scenario::Storm, Scenario::Relay]),
            [Scenario::Storm, Scenario::Relay]
        );
    }

    #[test]
    fn goals_are_a_choice_of_what_there_is() {
        let mut found = Vec::new();
        for (scenario, points) in Scenario::of_goals(&Plan::of_goals()) {
            for point in points {
                let ways = point.peers.unwrap().join(" ");
                found.push(format!("{} {}: {ways}", scenario.name(), point.name));
            }
        }
        let expected = [
            "storm polite, 64 clients: gate pgbouncer",
            "relay 64 B x 16: gate haproxy gate-unix haproxy-unix",
            "relay 64 B x 16 at 15000/s: gate haproxy",
            "relay 64 B x 256: gate haproxy",
            "relay 64 B x 256 at 15000/s: gate haproxy",
            "bulk 1 down: gate haproxy",
            "bulk 1 up: gate haproxy",
            "bulk 8 down: gate haproxy",
            "bulk 8 up: gate haproxy",
            "idle 9000 sessions: gate",
            "stall 16 live beside 1000 stalled: gate",
            "mixed pgbench -S: gate haproxy pgbouncer gate-unix haproxy-unix pgbouncer-unix",
            "mixed pgbench -S -C: gate direct",
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn every_point_says_what_it_is_and_shows_something() {
        let plan = Plan::default();
        for scenario in Scenario::resolve(&[Scenario::All]) {
            let points = scenario.points(&plan);
            assert!(!points.is_empty(), "{scenario:?}");
            for point in points {
                assert!(!point.name.is_empty() && !point.about.is_empty());
                assert!(!point.measures.is_empty(), "{}", point.name);
            }
        }
    }
}
