//! What holds for the runs of a path: all figures are there, and what the report
//! makes of them is what comes out here, too.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::harness::items;
use crate::report::Expected;

/// Figures of a proxy: without one there are none.
const OF_PROXY: [&str; 5] = [
    "proxy_cpu",
    "user_kib",
    "user_mib",
    "idle_cpu",
    "stalled_kib",
];

/// The runs, and their spread.
pub fn expect_path(expected: &Expected<'_>, point: &Value, path: &Value) -> Result<()> {
    let runs: Vec<&Value> = items(&path["runs"]).collect();
    let rounds: Vec<u64> = runs
        .iter()
        .filter_map(|run| run["round"].as_u64())
        .collect();
    ensure!(
        rounds == (0..expected.rounds as u64).collect::<Vec<_>>(),
        "rounds: {rounds:?}"
    );
    let proxy = has_proxy(point, path);
    let (keys, none): (Vec<String>, Vec<String>) = keys(point)?
        .into_iter()
        .partition(|key| proxy || !OF_PROXY.contains(&key.as_str()));
    for run in &runs {
        for key in &none {
            let value = &run["values"][key.as_str()];
            ensure!(value.is_null(), "{key} of no proxy: {value}");
        }
        for key in &keys {
            let value = run["values"][key.as_str()].as_f64();
            ensure!(value.is_some_and(f64::is_finite), "{key}: {value:?}");
        }
        let rate = run["values"]["rate"].as_f64();
        ensure!(rate.is_some() == expected.rated, "rate: {rate:?}");
        ensure!(rate.is_none_or(|rate| rate > 0.0), "rate: {rate:?}");
        ensure!(
            run["failed"] == 0,
            "{} failed: {}",
            run["failed"],
            run["failure"]
        );
        ensure!(
            run["seconds"].as_f64().is_some_and(|seconds| seconds > 0.0),
            "no time"
        );
        expect_sides(proxy, run)?;
    }
    for key in &keys {
        let values = runs
            .iter()
            .filter_map(|run| run["values"][key.as_str()].as_f64());
        expect_spread(&path["spread"][key.as_str()], values.collect()).context(key.clone())?;
    }
    Ok(())
}

/// Direct has none, except where PostgreSQL itself refuses.
fn has_proxy(point: &Value, path: &Value) -> bool {
    let name = point["name"].as_str();
    path["peer"] != "direct" || name.is_some_and(|name| name.starts_with("polite"))
}

fn expect_sides(proxy: bool, run: &Value) -> Result<()> {
    let wanted = ["proxy", "load", "backend", "ksoftirqd"];
    let wanted = &wanted[usize::from(!proxy)..];
    let sides: Vec<&str> = items(&run["sides"])
        .filter_map(|side| side["name"].as_str())
        .collect();
    ensure!(sides == wanted, "sides: {sides:?}");
    for side in items(&run["sides"]) {
        let cpus = side["cpus"].as_f64();
        ensure!(cpus.is_some_and(|cpus| cpus >= 0.0), "{side}");
        // Of pgbench, which has ended by then, it is not known.
        let delay = &side["delay"];
        let known = delay.as_f64().is_some_and(|delay| delay >= 0.0);
        ensure!(
            known || (delay.is_null() && side["name"] == "load"),
            "{side}"
        );
    }
    Ok(())
}

/// Ratios of every path to every other one, paired by round.
pub fn expect_ratios(point: &Value) -> Result<()> {
    let paths: Vec<&Value> = items(&point["paths"]).collect();
    for key in keys(point)? {
        for one in &paths {
            for other in paths.iter().filter(|other| other["peer"] != one["peer"]) {
                let name = other["peer"].as_str().context("a peer")?;
                let found = &one["ratios"][key.as_str()][name];
                let ratios = paired(one, other, &key);
                let told = || format!("{key}, {} / {name}", one["peer"]);
                if ratios.is_empty() {
                    ensure!(found.is_null(), "{}: a ratio of nothing: {found}", told());
                } else {
                    expect_spread(found, ratios).with_context(told)?;
                }
            }
        }
    }
    Ok(())
}

/// Of each round that both have; there is no ratio to nothing.
fn paired(one: &Value, other: &Value, key: &str) -> Vec<f64> {
    let value = |path: &Value, round: &Value| {
        let run = items(&path["runs"]).find(|run| run["round"] == *round)?;
        run["values"][key].as_f64()
    };
    let rounds: BTreeSet<String> = items(&one["runs"])
        .map(|run| run["round"].to_string())
        .collect();
    let ratios = rounds.iter().filter_map(|round| {
        let round: Value = serde_json::from_str(round).ok()?;
        let (value, to) = (value(one, &round)?, value(other, &round)?);
        (to != 0.0).then_some(value / to)
    });
    ratios.collect()
}

/// Median, lowest and highest of these values.
fn expect_spread(found: &Value, mut values: Vec<f64>) -> Result<()> {
    values.sort_by(f64::total_cmp);
    let (Some(&min), Some(&max)) = (values.first(), values.last()) else {
        anyhow::bail!("no values");
    };
    let middle = values.len() / 2;
    let median = if values.len() % 2 == 1 {
        values[middle]
    } else {
        f64::midpoint(values[middle - 1], values[middle])
    };
    for (name, value) in [("min", min), ("median", median), ("max", max)] {
        let shown = found[name]
            .as_f64()
            .with_context(|| format!("no {name}: {found}"))?;
        // Figures go through decimal text.
        let near = (shown - value).abs() <= value.abs() * 1e-9;
        ensure!(near, "{name} is {shown} in place of {value}");
    }
    ensure!(
        found["min"].as_f64() <= found["median"].as_f64()
            && found["median"].as_f64() <= found["max"].as_f64(),
        "{found}"
    );
    Ok(())
}

/// The columns of a point.
fn keys(point: &Value) -> Result<Vec<String>> {
    let keys: Vec<String> = items(&point["measures"])
        .filter_map(|measure| measure["key"].as_str())
        .map(str::to_owned)
        .collect();
    ensure!(!keys.is_empty(), "a point without measures");
    Ok(keys)
}
