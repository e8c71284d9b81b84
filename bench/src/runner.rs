//! Every point of every scenario, on every way to the server, round by round.
//!
//! The ways take turns within each round, in an order that differs from round to
//! round, so that a machine that grows slower in time favours nobody, and no way
//! always runs after the same other one. A proxy is started for each run and ended
//! after it: none profits from what another run left, and no idle one takes part.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use hdrhistogram::Histogram;

use crate::backend::Backend;
use crate::host::descriptors;
use crate::host::interrupt;
use crate::host::namespace::inside;
use crate::host::network::Network;
use crate::host::queues::{Counts, GateControl};
use crate::load::crew::Place;
use crate::load::session;
use crate::measure::window::{Watch, Who};
use crate::peer::{Job, Kind, Peer, Proxy, Role};
use crate::report::histogram::Interval;
use crate::report::model::{NicRun, PathReport, Placement, PointReport, Run};
use crate::scenario::{Plan, Point, Server, Stage};
use crate::verdict::{bottleneck, ensure_few_failed};

/// Of this process, besides those of sessions.
const OWN_DESCRIPTORS: u64 = 256;

/// What all runs have in common.
pub struct Runner {
    /// How every load is run.
    pub plan: Plan,
    /// Who is bound to which CPUs.
    pub placement: Placement,
    /// The ways that are there.
    pub peers: Vec<Peer>,
    /// gate with its kernel plane, and without.
    pub planes: Vec<Peer>,
    /// The bench's own server.
    pub backend: Backend,
    /// The network between load and gate, if it is not loopback.
    pub nic: Option<Nic>,
    /// A real one.
    pub postgres: Option<Postgres>,
    /// Rounds of each point.
    pub rounds: u32,
    /// Runs thrown away at most for each that is kept.
    pub repeats: u32,
    /// Of one CPU, that others may take.
    pub disturbed_above: f64,
    /// Command lines of each peer.
    pub commands: BTreeMap<String, BTreeSet<String>>,
    /// Where configurations of peers are kept.
    pub configs: PathBuf,
}

/// A PostgreSQL that runs already.
#[derive(Clone, Debug)]
pub struct Postgres {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its first process, whose CPU time is read.
    pub pid: u32,
    /// Its unix socket.
    pub socket: Option<PathBuf>,
}

/// A network device between load and gate.
pub struct Nic {
    /// The two ends.
    pub network: Network,
    /// The network namespace that gate and its peers run in.
    pub gate_namespace: Arc<OwnedFd>,
    /// The program `gatectl`.
    pub gatectl: PathBuf,
    /// What went through it.
    pub runs: Vec<NicRun>,
}

/// A point's figures, and the latencies of each of its paths.
pub struct Done {
    /// The figures.
    pub report: PointReport,
    /// Of each path, one for each round, in the report's order.
    pub latencies: Vec<Vec<Interval>>,
}

impl Runner {
    /// Runs every round of a point, or those until a signal comes. A way that fails
    /// is left out, and the report says why.
    pub fn run(&mut self, scenario: &str, point: &Point) -> Done {
        let peers = if point.planes {
            &self.planes
        } else {
            &self.peers
        };
        let takes_part = |peer: &&Peer| {
            let named = point.peers.as_ref();
            named.is_none_or(|names| names.contains(&peer.name.as_str()))
        };
        let peers: Vec<Peer> = peers.iter().filter(takes_part).cloned().collect();
        let mut paths: Vec<(PathReport, Vec<Interval>)> = peers
            .iter()
            .map(|peer| {
                let path = PathReport {
                    peer: peer.name.clone(),
                    left_out: self.reason_against(peer, point),
                    note: peer
                        .note()
                        .filter(|_| point.new_sessions)
                        .map(str::to_owned),
                    ..PathReport::default()
                };
                (path, Vec::new())
            })
            .collect();
        'rounds: for round in 0..self.rounds {
            for index in order(&point.name, round, peers.len()) {
                let (peer, (path, intervals)) = (&peers[index], &mut paths[index]);
                if path.left_out.is_some() {
                    continue;
                }
                // What there is by then is reported.
                if interrupt::check().is_err() {
                    break 'rounds;
                }
                match self.run_undisturbed(round, peer, point) {
                    Ok((run, latency, thrown_away)) => {
                        path.thrown_away.extend(thrown_away);
                        eprintln!("{}", progress(scenario, point, &peer.name, &run));
                        let duration = Duration::from_secs_f64(run.seconds);
                        intervals.extend(latency.map(|histogram| Interval {
                            tag: format!("{}/{}", peer.name, round + 1),
                            start: SystemTime::now() - duration,
                            duration,
                            histogram,
                        }));
                        path.runs.push(run);
                    }
                    Err(_) if interrupt::check().is_err() => break 'rounds,
                    Err(error) => {
                        eprintln!("{scenario} | {} | {}: {error:#}", point.name, peer.name);
                        path.left_out = Some(format!("failed in round {}: {error:#}", round + 1));
                    }
                }
            }
        }
        let (paths, latencies) = paths.into_iter().unzip();
        let report = PointReport {
            name: point.name.clone(),
            about: point.about.clone(),
            measures: point.measures.clone(),
            paths,
        };
        Done { report, latencies }
    }

    /// Why a way cannot be measured under a load.
    #[must_use]
    pub fn reason_against(&self, peer: &Peer, point: &Point) -> Option<String> {
        let direct = peer.kind == Kind::Direct;
        let needs = match point.server {
            Server::Backend => false,
            Server::Postgres => true,
            Server::PostgresIfDirect => direct,
        };
        if needs && self.postgres.is_none() {
            return Some("needs a PostgreSQL: --postgres and --postgres-pid".to_owned());
        }
        if needs && self.nic.is_some() {
            return Some("PostgreSQL is not at the other end of --nic".to_owned());
        }
        if peer.by_unix && self.nic.is_some() {
            return Some("a unix socket does not lead over --nic".to_owned());
        }
        let postgres = self.postgres.as_ref();
        if peer.by_unix && needs && postgres.is_none_or(|one| one.socket.is_none()) {
            return Some("needs PostgreSQL's unix socket: --postgres-socket".to_owned());
        }
        let is_gate = matches!(peer.kind, Kind::Gate { .. });
        let in_kernel = point.planes || (is_gate && point.role == Role::RefuseHard);
        if in_kernel && !rustix::process::geteuid().is_root() {
            return Some("the kernel plane needs root".to_owned());
        }
        if direct && point.role == Role::RefusePolitely {
            // PostgreSQL refuses by itself.
            return None;
        }
        peer.cannot(point.role).map(str::to_owned)
    }

    fn run_undisturbed(
        &mut self,
        round: u32,
        peer: &Peer,
        point: &Point,
    ) -> Result<(Run, Option<Histogram<u64>>, Vec<Run>)> {
        let mut thrown_away: Vec<Run> = Vec::new();
        loop {
            let (mut run, latency) = self.run_once(round, peer, point)?;
            run.repeated = u32::try_from(thrown_away.len())?;
            match &run.disturbed {
                Some(what) if run.repeated < self.repeats => {
                    eprintln!("again, because {what}");
                    thrown_away.push(run);
                }
                _ => return Ok((run, latency, thrown_away)),
            }
        }
    }

    fn run_once(
        &mut self,
        round: u32,
        peer: &Peer,
        point: &Point,
    ) -> Result<(Run, Option<Histogram<u64>>)> {
        let measured = self.with_proxy(peer, point, |runner, proxy| {
            let before = runner.counts(proxy)?;
            let measured = (point.work)(&runner.stage(peer, point, proxy))
                .with_context(|| format!("under load of {}", point.name))?;
            proxy.ensure_runs()?;
            runner.backend.ensure_runs()?;
            ensure_few_failed(&measured)?;
            let after = runner.counts(proxy)?;
            if let (Some(nic), Some(before), Some(after)) = (&mut runner.nic, before, after)
                && round == 0
            {
                let queues = &nic.network.device.queues;
                let run = before.until(&after, queues, &point.name, &peer.name);
                nic.runs.push(run);
            }
            Ok(measured)
        })?;
        let window = &measured.window;
        let bound = point.server != Server::Postgres;
        let placement = bound.then_some(&self.placement);
        let run = Run {
            round,
            seconds: window.elapsed.as_secs_f64(),
            values: measured.values.into_iter().collect(),
            sides: window.report(),
            bottleneck: bottleneck(peer, point.pace, window, placement, self.workers(point))
                .to_owned(),
            failed: measured.failed,
            failure: measured.failure,
            unfinished: measured.unfinished,
            repeated: 0,
            disturbed: window.disturbed.clone(),
        };
        Ok((run, measured.latency))
    }

    /// Starts a way to the server, does something on it where the load is, and ends
    /// it.
    ///
    /// # Errors
    /// It does not start, or serves nobody; or the work failed.
    pub fn with_proxy<T: Send>(
        &mut self,
        peer: &Peer,
        point: &Point,
        work: impl FnOnce(&mut Self, &mut Proxy) -> Result<T> + Send,
    ) -> Result<T> {
        let load = self.nic.as_ref().map(|nic| nic.network.load_namespace());
        // A proxy ends with the thread that started it: all of it is done in one.
        let load = load.map(|load| load.try_clone_to_owned()).transpose()?;
        inside(load.as_ref().map(AsFd::as_fd), || {
            let mut proxy = self.start(peer, point)?;
            if point.role == Role::Relay && point.server == Server::Backend {
                // A socket that listens is not yet a worker that serves.
                session::open(proxy.address).context("the first session")?;
            }
            work(self, &mut proxy)
        })?
    }

    /// Of the network device, and of the workers of a gate that was just started.
    fn counts(&self, proxy: &Proxy) -> Result<Option<Counts>> {
        let (Some(nic), Some(socket)) = (&self.nic, &proxy.control) else {
            return Ok(None);
        };
        let control = GateControl {
            gatectl: nic.gatectl.clone(),
            socket: socket.clone(),
        };
        let here = Some(nic.gate_namespace.as_fd());
        inside(here, || Counts::read(&nic.network, Some(&control)))?.map(Some)
    }

    /// Starts a way to the server in the role that a point asks for.
    ///
    /// # Errors
    /// It does not start.
    fn start(&mut self, peer: &Peer, point: &Point) -> Result<Proxy> {
        // Both ends of every session are ours.
        let needed = 2 * point.sessions as u64 + OWN_DESCRIPTORS;
        descriptors::ensure_enough(needed, point.sessions, "load and backend")?;
        let postgres = self.postgres.as_ref();
        let backend = match (point.server, postgres) {
            (Server::Postgres, Some(postgres)) => postgres.address,
            (Server::PostgresIfDirect, Some(postgres)) if peer.kind == Kind::Direct => {
                postgres.address
            }
            _ => self.backend.address,
        };
        let socket = match point.server {
            Server::Postgres => postgres.and_then(|postgres| postgres.socket.clone()),
            _ => Some(self.backend.socket.clone()),
        };
        let cpus = match point.server {
            Server::Postgres => Vec::new(),
            _ => self.placement.gate_cpus.clone(),
        };
        let proxy = peer.start(&Job {
            backend,
            backend_socket: socket.filter(|_| peer.by_unix),
            listen: match &self.nic {
                Some(nic) => nic.network.gate_address,
                None => IpAddr::V4(Ipv4Addr::LOCALHOST),
            },
            namespace: self.nic.as_ref().map(|nic| Arc::clone(&nic.gate_namespace)),
            role: point.role,
            cpus,
            unbound_workers: self.workers(point),
            sessions: point.sessions,
        })?;
        if let Some(command) = &proxy.command {
            let commands = self.commands.entry(peer.name.clone()).or_default();
            commands.insert(command.clone());
        }
        let folder = format!("{}-{:?}-{}", peer.name, point.role, point.sessions);
        proxy.keep_config(&self.configs.join(folder))?;
        Ok(proxy)
    }

    /// Of a proxy that is not bound to CPUs. Before PostgreSQL all of them have as
    /// many, or one thread would be compared with several.
    fn workers(&self, point: &Point) -> usize {
        match point.server {
            Server::Postgres => self.plan.workers,
            // Counts the CPUs that this process is allowed, as children inherit them.
            _ => std::thread::available_parallelism().map_or(1, usize::from),
        }
    }

    /// What a load finds on a way to the server.
    #[must_use]
    pub fn stage<'a>(&'a self, peer: &Peer, point: &Point, proxy: &Proxy) -> Stage<'a> {
        let real = point.server == Server::Postgres;
        // Refused by PostgreSQL itself, which is in the proxy's place then.
        let refusing = peer.kind == Kind::Direct && point.server == Server::PostgresIfDirect;
        let postgres = self.postgres.as_ref().map(|postgres| postgres.pid);
        let mut sides = Vec::new();
        if let Some(pid) = proxy.pid {
            sides.push(("proxy", Who::Tree(pid)));
        } else if let Some(pid) = postgres.filter(|_| refusing) {
            sides.push(("proxy", Who::TreeApart(pid)));
        }
        if real {
            sides.push(("load", Who::EndedChildren));
            sides.extend(postgres.map(|pid| ("backend", Who::TreeApart(pid))));
        } else {
            sides.push(("load", Who::Threads("load-")));
            sides.push(("backend", Who::Threads("backend-")));
        }
        sides.push(("ksoftirqd", Who::Ksoftirqd));
        Stage {
            target: proxy.address,
            proxy: proxy.pid,
            backend: &self.backend,
            place: if real {
                Place::default()
            } else {
                Place {
                    cpus: self.placement.load_cpus.clone(),
                }
            },
            watch: Watch::new(sides, self.disturbed_above, self.nic.is_some()),
            plan: &self.plan,
            probe: None,
        }
    }
}

/// In which order the ways take their turns: another one in each round, so that no
/// way always runs after the same other one; the same in each run of the bench.
fn order(point: &str, round: u32, count: usize) -> Vec<usize> {
    let mut order: Vec<(u64, usize)> = (0..count)
        .map(|index| {
            let mut hasher = DefaultHasher::new();
            (point, round, index).hash(&mut hasher);
            (hasher.finish(), index)
        })
        .collect();
    order.sort_unstable();
    order.into_iter().map(|(_, index)| index).collect()
}

fn progress(scenario: &str, point: &Point, peer: &str, run: &Run) -> String {
    let figures = point.measures.iter().take(3).filter_map(|measure| {
        let value = run.values.get(&measure.key)?;
        Some(format!("{} {value:.4} {}", measure.label, measure.unit))
    });
    format!(
        "{scenario} | {} | round {} | {peer}: {}; held down by {}",
        point.name,
        run.round + 1,
        figures.collect::<Vec<_>>().join(", "),
        run.bottleneck
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_has_an_order_of_its_own() {
        let orders: Vec<_> = (0..5).map(|round| order("64 B x 16", round, 7)).collect();
        for order in &orders {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, [0, 1, 2, 3, 4, 5, 6]);
        }
        let distinct: BTreeSet<_> = orders.iter().collect();
        assert_eq!(distinct.len(), orders.len());
        assert_eq!(orders[3], order("64 B x 16", 3, 7));
    }
}
