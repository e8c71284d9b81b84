//! A run from its options to its report.

use std::collections::BTreeMap;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, Result, bail, ensure};

use crate::backend::Backend;
use crate::flame::{self, Recording};
use crate::host::facts::Facts;
use crate::host::namespace::inside;
use crate::host::network::Network;
use crate::host::settings::{self, Changed};
use crate::host::{cpus, descriptors, interrupt, veth};
use crate::load::crew::Place;
use crate::options::Options;
use crate::peer::{Kind, Peer};
use crate::report::model::{NicReport, Placement, PointReport, Report, SCHEMA, ScenarioReport};
use crate::report::{finish, goals, histogram};
use crate::roster::{self, Asked};
use crate::runner::{Done, Nic, Postgres, Runner};
use crate::scenario::{Point, Scenario};

/// Runs what was asked for.
///
/// # Errors
/// A signal came, the options make no sense, or a way to the server failed; a
/// report of what there is was written even then.
pub fn run(options: &Options) -> Result<()> {
    let started = SystemTime::now();
    let asked = roster::asked(options)?;
    let mut placement = cpus::place(options.gate_cpus.as_ref(), options.load_cpus.as_ref())?;
    if options.goals() && options.gate_cpus.is_none() {
        // PgBouncer has one thread: nobody has more.
        placement.gate_cpus.truncate(1);
        placement.notes = cpus::notes(&placement.gate_cpus, &placement.load_cpus)?;
    }
    let plan = options.plan()?;
    let seconds = plan.seconds.as_secs_f64();
    if options.flame {
        flame::perf_version()?;
    }
    finish::make_folder(&options.out)?;
    // Clients and the backend's ends of thousands of sessions are ours.
    descriptors::raise()?;
    veth::remove_leftovers();
    interrupt::note_signals()?;
    let changed = Changed::make(settings::of_every_run(
        options.congestion_control.as_deref(),
    ))?;
    let nic = open_nic(options, &mut placement, &asked)?;
    let listen = nic.as_ref().map(|nic| nic.network.load_address);
    let load_namespace = nic.as_ref().map(|nic| nic.network.load_namespace());
    let present = asked.iter().filter(|one| one.version.is_ok());
    let load = Place {
        cpus: placement.load_cpus.clone(),
    };
    let mut runner = Runner {
        plan,
        peers: present.map(|one| one.peer.clone()).collect(),
        planes: roster::planes(&asked),
        backend: inside(load_namespace, || {
            Backend::start(listen.unwrap_or(Ipv4Addr::LOCALHOST.into()), &load)
        })??,
        nic,
        postgres: options
            .postgres
            .zip(options.postgres_pid)
            .map(|(address, pid)| Postgres {
                address,
                pid,
                socket: options.postgres_socket.clone(),
            }),
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
        seconds,
        peers: Vec::new(),
        scenarios: Vec::new(),
        nic: None,
        postgres: options.postgres_about.clone(),
        goals: Vec::new(),
    };
    let outcome = run_scenarios(options, &mut runner, &mut report);
    report.peers = roster::infos(&asked, &runner.commands);
    report.nic = runner.nic.as_ref().map(|nic| NicReport {
        device: nic.network.device.name.clone(),
        driver: nic.network.device.driver.clone(),
        about: nic.network.about.clone(),
        notes: nic.network.notes(&runner.placement.load_cpus),
        runs: nic.runs.clone(),
    });
    report.complete();
    if options.goals() {
        report.goals = goals::judge(&report);
    }
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
fn open_nic(options: &Options, placement: &mut Placement, asked: &[Asked]) -> Result<Option<Nic>> {
    let Some(device) = &options.nic else {
        return Ok(None);
    };
    let gate = asked.iter().find_map(|one| match &one.peer.kind {
        Kind::Gate { program, .. } => Some(program.with_file_name("gatectl")),
        _ => None,
    });
    let gatectl = gate.context("--nic shows gate's workers: gate is not among --peers")?;
    let namespace = options.peer_namespace.as_deref();
    let network = Network::open(
        device,
        namespace,
        &placement.gate_cpus,
        &placement.load_cpus,
    )?;
    placement.gate_cpus = network.worker_cpus()?;
    placement.notes = cpus::notes(&placement.gate_cpus, &placement.load_cpus)?;
    let gate_namespace = match network.gate_namespace() {
        Some(namespace) => namespace.try_clone_to_owned()?,
        None => fs::File::open("/proc/thread-self/ns/net")?.into(),
    };
    Ok(Some(Nic {
        network,
        gate_namespace: Arc::new(gate_namespace),
        gatectl,
        runs: Vec::new(),
    }))
}

fn run_scenarios(options: &Options, runner: &mut Runner, report: &mut Report) -> Result<()> {
    let plan = &runner.plan;
    let work: Vec<(Scenario, Vec<Point>)> = if options.goals() {
        Scenario::of_goals(plan)
    } else {
        let scenarios = Scenario::resolve(&options.scenarios).into_iter();
        scenarios.map(|one| (one, one.points(plan))).collect()
    };
    for (scenario, points) in work {
        report.scenarios.push(ScenarioReport {
            name: scenario.name(),
            about: scenario.about(),
            points: Vec::new(),
        });
        for point in points.iter().filter(|point| is_asked_for(options, point)) {
            let done = runner.run(&scenario.name(), point);
            let reported = keep_latencies(&options.out, scenario, point, done)?;
            let points = report.scenarios.last_mut().map(|one| &mut one.points);
            points.context("a scenario")?.push(reported);
            interrupt::check()?;
            if options.flame {
                draw_flame(&options.out, runner, scenario, point);
            }
        }
        // An hour's figures are not lost with what comes after them.
        report.complete();
        finish::write_json(report, &options.out)?;
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

/// One more run of the first way, under perf. Without it there is no flame graph,
/// and all else.
fn draw_flame(out: &Path, runner: &mut Runner, scenario: Scenario, point: &Point) {
    let peers = if point.planes {
        &runner.planes
    } else {
        &runner.peers
    };
    let able =
        |peer: &&Peer| peer.kind != Kind::Direct && runner.reason_against(peer, point).is_none();
    let Some(peer) = peers.iter().find(able).cloned() else {
        return;
    };
    let name = format!("{}-{}", scenario.name(), point.name);
    let svg = out.join(format!("flame-{}.svg", file_name(&name)));
    let title = format!("{}: {name}", peer.name);
    let drawn = runner.with_proxy(&peer, point, |runner, proxy| {
        let recording = Recording::begin(proxy.pid.context("no process")?)?;
        (point.work)(&runner.stage(&peer, point, proxy))?;
        recording.draw(&title, &svg)
    });
    match drawn {
        Ok(()) => eprintln!("{}", svg.display()),
        Err(error) => eprintln!("gate-bench: no flame graph of {title}: {error:#}"),
    }
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
