//! A run from its options to its report.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::backend::Backend;
use crate::flame::Recording;
use crate::host::facts::Facts;
use crate::host::namespace::inside;
use crate::host::network::Network;
use crate::host::settings::{self, Changed};
use crate::host::{cpus, interrupt};
use crate::load::crew::Place;
use crate::options::Options;
use crate::peer::{Kind, Peer};
use crate::report::model::{
    NicReport, PeerInfo, Placement, PointReport, Report, SCHEMA, ScenarioReport,
};
use crate::report::{finish, histogram};
use crate::runner::{Done, Nic, Postgres, Runner};
use crate::scenario::{Point, Scenario};

/// Runs what was asked for.
///
/// # Errors
/// A signal came, the options make no sense, or a way to the server failed; a
/// report of what there is was written even then.
pub fn run(options: &Options) -> Result<()> {
    let started = SystemTime::now();
    let asked = peers(options)?;
    let mut placement = cpus::place(options.gate_cpus.as_ref(), options.load_cpus.as_ref())?;
    let plan = options.plan()?;
    fs::create_dir_all(&options.out)
        .with_context(|| format!("cannot make {}", options.out.display()))?;
    raise_descriptors()?;
    interrupt::note_signals()?;
    let changed = Changed::make(settings::of_every_run(
        options.congestion_control.as_deref(),
    ))?;
    let nic = open_nic(options, &mut placement, &asked)?;
    let listen = nic.as_ref().map(|nic| nic.network.load_address);
    let load_namespace = nic.as_ref().map(|nic| nic.network.load_namespace());
    let present = asked.iter().filter(|(_, version)| version.is_ok());
    let load = Place {
        cpus: placement.load_cpus.clone(),
    };
    let mut runner = Runner {
        plan,
        peers: present.map(|(peer, _)| peer.clone()).collect(),
        planes: planes(&asked),
        backend: inside(load_namespace, || {
            Backend::start(listen.unwrap_or(Ipv4Addr::LOCALHOST.into()), &load)
        })??,
        nic,
        postgres: options
            .postgres
            .zip(options.postgres_pid)
            .map(|(address, pid)| Postgres { address, pid }),
        placement,
        rounds: options.rounds,
        repeats: options.repeats,
        disturbed_above: options.disturbed_above / 100.0,
        commands: BTreeMap::new(),
        configs: options.out.join("configs"),
    };
    let mut report = Report {
        schema: SCHEMA,
        started: humantime::format_rfc3339_seconds(started).to_string(),
        command: command_line(),
        commit: options.commit.clone(),
        host: Facts::of_this_machine(),
        host_changes: changed.report(),
        placement: runner.placement.clone(),
        rounds: options.rounds,
        seconds: options.seconds,
        peers: Vec::new(),
        scenarios: Vec::new(),
        nic: None,
    };
    let outcome = run_scenarios(options, &mut runner, &mut report);
    report.peers = peer_infos(&asked, &runner.commands);
    report.nic = runner.nic.as_ref().map(|nic| NicReport {
        device: nic.network.device.name.clone(),
        driver: nic.network.device.driver.clone(),
        about: nic.network.about.clone(),
        notes: nic.network.notes(&runner.placement.load_cpus),
        runs: nic.runs.clone(),
    });
    report.complete();
    let written = finish::write(&report, &options.out)?;
    print!("{}", fs::read_to_string(&written.text)?);
    println!("{}", written.json.display());
    for plot in &written.plots {
        println!("{}", plot.display());
    }
    outcome?;
    complain(&report)
}

/// The network device that was asked for; gate's workers go where its queues are.
fn open_nic(
    options: &Options,
    placement: &mut Placement,
    asked: &[(Peer, Result<String>)],
) -> Result<Option<Nic>> {
    let Some(device) = &options.nic else {
        return Ok(None);
    };
    let namespace = options.peer_namespace.as_deref();
    let network = Network::open(
        device,
        namespace,
        &placement.gate_cpus,
        &placement.load_cpus,
    )?;
    placement.gate_cpus = network.worker_cpus()?;
    let gate_namespace = match network.gate_namespace() {
        Some(namespace) => namespace.try_clone_to_owned()?,
        None => fs::File::open("/proc/thread-self/ns/net")?.into(),
    };
    let gate = asked.iter().find_map(|(peer, _)| match &peer.kind {
        Kind::Gate { program, .. } => Some(program.with_file_name("gatectl")),
        _ => None,
    });
    Ok(Some(Nic {
        network,
        gate_namespace: Arc::new(gate_namespace),
        gatectl: gate.context("--nic shows gate's workers: gate is not among the peers")?,
        runs: Vec::new(),
    }))
}

/// Every way that was asked for, and its version, or why it is not there.
fn peers(options: &Options) -> Result<Vec<(Peer, Result<String>)>> {
    let mut gates = Vec::new();
    for word in &options.gate_bin {
        let (name, path) = word.split_once('=').unwrap_or(("gate", word));
        ensure!(
            gates.iter().all(|gate: &Peer| gate.name != name),
            "two gates are called `{name}`: give each a name, --gate-bin NAME=PATH"
        );
        gates.push(Peer::gate(name, Path::new(path), &options.kernel));
    }
    let first = gates.first().context("no --gate-bin")?;
    let Kind::Gate { program, .. } = &first.kind else {
        bail!("no --gate-bin");
    };
    let others = Peer::all(program, &options.kernel);
    let others = others.into_iter().filter(|peer| peer.name != "gate");
    let all: Vec<Peer> = gates.iter().cloned().chain(others).collect();
    let chosen = if options.peers.is_empty() {
        all
    } else {
        let names: Vec<_> = all.iter().map(|peer| peer.name.as_str()).collect();
        for name in &options.peers {
            ensure!(
                names.contains(&name.as_str()),
                "there is no peer `{name}`; there are {}",
                names.join(", ")
            );
        }
        let is_chosen = |peer: &Peer| options.peers.contains(&peer.name);
        all.into_iter().filter(is_chosen).collect()
    };
    let mut found = Vec::new();
    for peer in chosen {
        let version = peer.version();
        if let (Kind::Gate { .. }, Err(error)) = (&peer.kind, &version) {
            bail!("{}: {error:#}", peer.name);
        }
        if let Err(error) = &version {
            eprintln!("{} is absent: {error:#}", peer.name);
        }
        found.push((peer, version));
    }
    Ok(found)
}

/// gate with its kernel plane and without, for what compares the two.
fn planes(asked: &[(Peer, Result<String>)]) -> Vec<Peer> {
    let gate = asked.iter().find_map(|(peer, _)| match &peer.kind {
        Kind::Gate { program, .. } => Some(program),
        _ => None,
    });
    let planes = gate.map(|program| {
        [
            Peer::gate("gate", program, "required"),
            Peer::gate("gate-local", program, "off"),
        ]
    });
    planes.into_iter().flatten().collect()
}

fn run_scenarios(options: &Options, runner: &mut Runner, report: &mut Report) -> Result<()> {
    for scenario in Scenario::resolve(&options.scenarios) {
        report.scenarios.push(ScenarioReport {
            name: scenario.name(),
            about: scenario.about(),
            points: Vec::new(),
        });
        let points = scenario.points(&runner.plan);
        for point in points.iter().filter(|point| is_asked_for(options, point)) {
            let done = runner.run(&scenario.name(), point)?;
            let reported = keep_latencies(&options.out, scenario, point, done)?;
            let points = report.scenarios.last_mut().map(|one| &mut one.points);
            points.context("a scenario")?.push(reported);
            interrupt::check()?;
            if options.flame {
                draw_flame(&options.out, runner, scenario, point)?;
            }
        }
    }
    report
        .scenarios
        .retain(|scenario| !scenario.points.is_empty());
    ensure!(
        !report.scenarios.is_empty(),
        "no load of these scenarios is left: see --only and --pace"
    );
    Ok(())
}

/// One more run of the first gate, under perf.
fn draw_flame(out: &Path, runner: &mut Runner, scenario: Scenario, point: &Point) -> Result<()> {
    let is_gate = |peer: &&Peer| matches!(peer.kind, Kind::Gate { .. });
    let Some(peer) = runner.peers.iter().find(is_gate).cloned() else {
        return Ok(());
    };
    let proxy = runner.start(&peer, point)?;
    let pid = proxy.pid.context("gate is a process")?;
    let folder = out.join("perf");
    fs::create_dir_all(&folder)?;
    let recording = Recording::begin(pid, &folder)?;
    (point.work)(&runner.stage(&peer, point, &proxy))?;
    let name = format!("{}-{}", scenario.name(), point.name);
    let svg = out.join(format!("flame-{}.svg", file_name(&name)));
    let drawn = recording.draw(&format!("{}: {name}", peer.name), &svg);
    fs::remove_dir_all(&folder)?;
    eprintln!("{}", svg.display());
    drawn
}

fn is_asked_for(options: &Options, point: &Point) -> bool {
    let named = options.only.as_ref();
    options.pace.include(point.pace) && named.is_none_or(|text| point.name.contains(text))
}

/// Writes the histograms of a point beside the report.
fn keep_latencies(
    out: &Path,
    scenario: Scenario,
    point: &Point,
    done: Done,
) -> Result<PointReport> {
    let Done {
        mut report,
        latencies,
    } = done;
    let Some(of) = point.timed else {
        return Ok(report);
    };
    for (path, intervals) in report.paths.iter_mut().zip(latencies) {
        if intervals.is_empty() {
            continue;
        }
        let name = format!("{}-{}-{}", scenario.name(), point.name, path.peer);
        path.latency = Some(histogram::keep(out, &file_name(&name), of, &intervals)?);
    }
    Ok(report)
}

/// `relay-64-B-x-16-gate`.
fn file_name(name: &str) -> String {
    let words = name.split(|letter: char| !letter.is_ascii_alphanumeric());
    let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
    words.join("-")
}

fn peer_infos(
    asked: &[(Peer, Result<String>)],
    commands: &BTreeMap<String, BTreeSet<String>>,
) -> Vec<PeerInfo> {
    let mut infos: Vec<PeerInfo> = asked
        .iter()
        .map(|(peer, version)| PeerInfo {
            name: peer.name.clone(),
            version: version.as_ref().ok().cloned(),
            commands: Vec::new(),
            absent: version.as_ref().err().map(|error| format!("{error:#}")),
            note: peer.note().map(str::to_owned),
        })
        .collect();
    for (name, commands) in commands {
        let commands = commands.iter().cloned().collect();
        match infos.iter_mut().find(|info| info.name == *name) {
            Some(info) => info.commands = commands,
            None => infos.push(PeerInfo {
                name: name.clone(),
                version: None,
                commands,
                absent: None,
                note: None,
            }),
        }
    }
    infos
}

/// Ways that failed are a failure of the run, though the report is there.
fn complain(report: &Report) -> Result<()> {
    let points = report
        .scenarios
        .iter()
        .flat_map(|scenario| &scenario.points);
    let paths = points.flat_map(|point| &point.paths);
    let failed = paths.filter(|path| {
        let failed = path.left_out.as_deref();
        failed.is_some_and(|why| why.starts_with("failed"))
    });
    match failed.count() {
        0 => Ok(()),
        count => bail!("{count} ways failed under a load: see `left out` in the report"),
    }
}

/// Clients and the backend's ends of thousands of sessions are ours.
fn raise_descriptors() -> Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).context("cannot raise RLIMIT_NOFILE")
}

fn command_line() -> String {
    let words: Vec<String> = std::env::args().collect();
    let program = words.first().map(PathBuf::from);
    let name = program.as_deref().and_then(Path::file_name);
    let name = name.map(|name| name.to_string_lossy().into_owned());
    let rest = words.get(1..).unwrap_or_default().iter().cloned();
    name.into_iter().chain(rest).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_plain_names() {
        assert_eq!(file_name("relay-64 B x 16-gate"), "relay-64-B-x-16-gate");
        assert_eq!(file_name("storm-hard, 64/s-a.b"), "storm-hard-64-s-a-b");
    }
}
