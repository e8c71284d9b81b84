//! What the kernel programs cost: gate with its kernel plane beside gate without.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;

use anyhow::{Context, Result, bail};
use aya::programs::loaded_programs;
use aya::sys::{Stats, enable_stats};

use super::{Measured, Plan, Point, Stage, connect, measure, relay, storm};
use crate::load::pace::Pace;
use crate::report::model::Better;

/// gate's programs begin so (`gate_sockops`, `gate_admit`, ...).
const PREFIX: &str = "gate_";

pub fn points(_: &Plan) -> Vec<Point> {
    let loads = [
        storm::polite(Pace::Closed),
        connect::point(Pace::Closed),
        relay::point(64, 16, Pace::Closed),
    ];
    let mut points = Vec::new();
    for mut point in loads {
        let work = point.work;
        point.work = Box::new(move |stage| run(stage, &work));
        point.planes = true;
        // Nothing of PostgreSQL's in it.
        point.server = super::Server::Backend;
        point.name = format!("planes: {}", point.name);
        for (key, label) in [("bpf_ns", "kernel programs"), ("bpf_runs", "their runs")] {
            let unit = if key == "bpf_ns" {
                "ns/unit"
            } else {
                "runs/unit"
            };
            point
                .measures
                .push(measure(key, label, unit, Better::Lower));
        }
        points.push(point);
    }
    points
}

/// The kernel counts time and runs of programs only while somebody asks it to:
/// about 20 ns per run, which are in these figures.
fn run(stage: &Stage<'_>, work: &super::Work) -> Result<Measured> {
    let _counting = enable_stats(Stats::RunTime).context("kernel programs cannot be timed")?;
    let edges = RefCell::new(Vec::new());
    let gate = stage.proxy.context("no gate to measure")?;
    let probe = || {
        edges.borrow_mut().push(runs(&maps_of(gate)?)?);
        Ok(())
    };
    let mut measured = work(&Stage {
        probe: Some(&probe),
        ..stage.clone()
    })?;
    let edges = edges.take();
    let [before, after] = &edges[..] else {
        bail!("the load has no beginning or no end");
    };
    let (mut time, mut count) = (0, 0);
    for (id, now) in after {
        let then = before.get(id).copied().unwrap_or_default();
        time += now.0 - then.0;
        count += now.1 - then.1;
    }
    let rate = measured.values.iter().find(|(key, _)| key == "rate");
    let (_, rate) = rate.context("the load has no rate")?;
    let units = rate * measured.window.elapsed.as_secs_f64();
    measured.values.extend([
        ("bpf_ns".to_owned(), time as f64 / units),
        ("bpf_runs".to_owned(), count as f64 / units),
    ]);
    Ok(measured)
}

/// The maps that a process has open: `map_id` in its fdinfo, proc_pid_fdinfo(5).
fn maps_of(process: u32) -> Result<BTreeSet<u32>> {
    let folder = format!("/proc/{process}/fdinfo");
    let mut maps = BTreeSet::new();
    for file in fs::read_dir(&folder).with_context(|| format!("cannot read {folder}"))? {
        let info = match fs::read_to_string(file?.path()) {
            Ok(info) => info,
            // Closed meanwhile, so it is no map: gate keeps those.
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error).with_context(|| format!("cannot read {folder}")),
        };
        let ids = info.lines().filter_map(|line| line.strip_prefix("map_id:"));
        for id in ids {
            maps.insert(id.trim().parse()?);
        }
    }
    Ok(maps)
}

/// Nanoseconds and runs so far of each of the programs that use `maps`, by its
/// number. Other gates of the machine have programs of the same names, which run
/// at the same sockets; those use other maps.
fn runs(maps: &BTreeSet<u32>) -> Result<BTreeMap<u32, (u64, u64)>> {
    let mut runs = BTreeMap::new();
    for program in loaded_programs() {
        // One that is gone by now has no figures.
        let Ok(program) = program else { continue };
        let is_gate = program
            .name_as_str()
            .is_some_and(|name| name.starts_with(PREFIX));
        if !is_gate {
            continue;
        }
        let used = program.map_ids()?.unwrap_or_default();
        if used.iter().any(|map| maps.contains(map)) {
            let time = u64::try_from(program.run_time().as_nanos())?;
            runs.insert(program.id(), (time, program.run_count()));
        }
    }
    Ok(runs)
}
