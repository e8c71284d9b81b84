//! What holds for every report, whatever was measured.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context as _, Result, ensure};
use gate_tests::host;
use serde_json::Value;

use crate::harness::{Bench, COMMIT, items, one_line};
use crate::{runs, svg};

/// Every way to the server.
pub const PEERS: [&str; 7] = [
    "gate",
    "haproxy",
    "pgbouncer",
    "nginx",
    "tokio",
    "tokio-uring",
    "direct",
];
/// gate with its kernel plane, and without.
const PLANES: [&str; 2] = ["gate", "gate-local"];

/// What cannot be measured: how the point's name begins, the peer, and part of the reason.
const CANNOT: [(&str, &str, &str); 4] = [
    ("polite", "haproxy", "does not speak PostgreSQL"),
    ("polite", "nginx", "does not speak PostgreSQL"),
    ("hard", "pgbouncer", "before it has the startup packet"),
    ("hard", "direct", "before it has the startup packet"),
];

/// What one scenario's report must be.
#[derive(Clone, Copy)]
pub struct Expected<'a> {
    pub scenario: &'a str,
    pub points: &'a [&'a str],
    pub rounds: usize,
    pub peers: &'a [&'a str],
    /// Whether there are latencies.
    pub timed: bool,
    /// Whether runs have a rate.
    pub rated: bool,
}

/// Checks report.json, report.txt, the plot and the histograms.
pub fn expect(bench: &Bench, expected: &Expected<'_>) -> Result<Value> {
    let report = bench.report()?;
    let absent = absent_peers(&report)?;
    let scenarios: Vec<&Value> = items(&report["scenarios"]).collect();
    let [scenario] = scenarios[..] else {
        anyhow::bail!("{} scenarios", scenarios.len());
    };
    ensure!(
        scenario["name"] == expected.scenario,
        "{}",
        scenario["name"]
    );
    let points: Vec<&Value> = items(&scenario["points"]).collect();
    let names: Vec<&str> = points
        .iter()
        .filter_map(|point| point["name"].as_str())
        .collect();
    ensure!(names == expected.points, "points: {names:?}");
    for point in &points {
        let name = point["name"].as_str().unwrap_or_default();
        expect_point(bench, expected, &absent, point).with_context(|| name.to_owned())?;
    }
    let drawn = bench.out().join(format!("{}.svg", expected.scenario));
    expect_plot(&fs::read_to_string(drawn)?, &points)?;
    expect_text(&bench.text()?, &report)?;
    Ok(report)
}

fn expect_point(
    bench: &Bench,
    expected: &Expected<'_>,
    absent: &BTreeSet<String>,
    point: &Value,
) -> Result<()> {
    let wanted: Vec<&str> = match expected.scenario {
        "kernel" => PLANES.to_vec(),
        _ => {
            let peers = expected.peers.iter().copied();
            peers.filter(|peer| !absent.contains(*peer)).collect()
        }
    };
    let paths: Vec<&Value> = items(&point["paths"]).collect();
    let found: Vec<&str> = paths
        .iter()
        .filter_map(|path| path["peer"].as_str())
        .collect();
    ensure!(found == wanted, "paths: {found:?} in place of {wanted:?}");
    let name = point["name"].as_str().context("a name")?;
    for path in &paths {
        let peer = path["peer"].as_str().context("a peer")?;
        let cannot = CANNOT
            .iter()
            .find(|(point, of, _)| name.starts_with(point) && *of == peer);
        match (cannot, path["left_out"].as_str()) {
            (Some((_, _, reason)), Some(why)) => {
                ensure!(why.contains(reason), "{peer} was left out: {why}");
                ensure!(
                    items(&path["runs"]).count() == 0,
                    "{peer} was left out, and measured"
                );
            }
            (None, None) => {
                let told = format!("{name}, {peer}");
                runs::expect_path(expected, point, path).context(told)?;
                expect_histogram(bench, expected.timed, path).with_context(|| peer.to_owned())?;
            }
            (cannot, why) => anyhow::bail!("{peer}: expected {cannot:?}, left out: {why:?}"),
        }
    }
    runs::expect_ratios(point)
}

/// The log of a path has as many values as the report says.
fn expect_histogram(bench: &Bench, timed: bool, path: &Value) -> Result<()> {
    let latency = &path["latency"];
    ensure!(latency.is_object() == timed, "latency: {latency}");
    if !timed {
        return Ok(());
    }
    let count = latency["count"].as_u64().context("a count")?;
    ensure!(count > 0, "not one latency");
    let file = bench
        .out()
        .join(latency["histogram"].as_str().context("a file")?);
    let plot = bench.path("one.svg");
    let (file, plot_name) = (file.display().to_string(), plot.display().to_string());
    let words = ["report", &file, "--json", "--svg", &plot_name];
    let output = bench.command(&words)?.output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "gate-bench report {file}: {said}");
    let shown: Value = serde_json::from_slice(&output.stdout)?;
    let shown: Vec<u64> = items(&shown["latencies"])
        .filter_map(|one| one["count"].as_u64())
        .collect();
    // All of it, then each run.
    let (all, each) = shown.split_first().context("nothing is shown")?;
    let sum: u64 = each.iter().sum();
    ensure!(*all == count, "{file} has {all} values, the report {count}");
    ensure!(
        each.is_empty() || sum == count,
        "the runs of {file}: {each:?}, all: {count}"
    );
    svg::expect_well_formed(&fs::read_to_string(plot)?)
}

fn expect_plot(plot: &str, points: &[&Value]) -> Result<()> {
    svg::expect_well_formed(plot)?;
    let paths = points.iter().flat_map(|point| items(&point["paths"]));
    for path in paths.filter(|path| path["left_out"].is_null()) {
        let peer = path["peer"].as_str().context("a peer")?;
        ensure!(plot.contains(peer), "the plot does not name {peer}");
    }
    Ok(())
}

/// The head of the text has what a figure is worth nothing without.
fn expect_text(text: &str, report: &Value) -> Result<()> {
    let machine = &report["host"];
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    ensure!(
        machine["kernel"] == kernel.trim(),
        "kernel: {}",
        machine["kernel"]
    );
    ensure!(report["commit"] == COMMIT, "commit: {}", report["commit"]);
    let mut wanted = vec![
        machine["kernel"].as_str(),
        machine["cpu_model"].as_str(),
        machine["congestion_control"].as_str(),
        report["commit"].as_str(),
        report["command"].as_str(),
    ];
    for peer in items(&report["peers"]).filter(|peer| peer["absent"].is_null()) {
        let commands: Vec<&str> = items(&peer["commands"]).filter_map(Value::as_str).collect();
        let name = peer["name"].as_str().context("a name")?;
        // gate without its kernel plane is the same program.
        if name != "gate-local" {
            let version = peer["version"].as_str();
            ensure!(
                version.is_some_and(|text| !text.is_empty()),
                "{name} has no version"
            );
            wanted.push(version);
        }
        let measured = crate::harness::points(report)
            .flat_map(|point| items(&point["paths"]))
            .any(|path| path["peer"] == name && path["left_out"].is_null());
        let starts = measured && name != "direct";
        ensure!(
            commands.is_empty() != starts,
            "{name} ran with {commands:?}"
        );
        wanted.extend(commands.into_iter().map(Some));
    }
    for value in wanted {
        let value = value.context("it is missing in the JSON form")?;
        ensure!(!value.is_empty(), "a fact of the head is empty");
        ensure!(
            text.contains(&one_line(value)),
            "the text does not say {value:?}"
        );
    }
    Ok(())
}

/// Peers that are not installed; in CI there are none.
fn absent_peers(report: &Value) -> Result<BTreeSet<String>> {
    let absent = items(&report["peers"]).filter(|peer| !peer["absent"].is_null());
    let absent: BTreeSet<String> = absent
        .filter_map(|peer| peer["name"].as_str())
        .map(str::to_owned)
        .collect();
    ensure!(
        absent.is_empty() || !host::in_ci(),
        "in CI no peer may be absent: {absent:?}"
    );
    let installed = ["gate", "tokio", "tokio-uring", "direct"];
    for peer in installed {
        ensure!(!absent.contains(peer), "{peer} is absent");
    }
    Ok(absent)
}
