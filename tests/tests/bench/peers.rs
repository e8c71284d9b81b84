//! Each peer from Debian by itself. Where one is not installed, the scenarios go on
//! without it, but its test here is skipped by name.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use gate_tests::host;
use gate_tests::suite::{Check, Plane, Stage, Suite};

use crate::harness::{Bench, QUICK, items, points};

/// Where nginx's stream module may be.
const MODULE_FOLDERS: [&str; 3] = ["/usr/lib", "/usr/lib64", "/usr/local/lib"];

pub fn register(suite: &mut Suite) {
    let peers: [(&str, Check); 3] = [
        ("haproxy", haproxy),
        ("pgbouncer", pgbouncer),
        ("nginx", nginx),
    ];
    for (peer, check) in peers {
        let name = format!("{peer} takes part");
        suite.needing(missing(peer), Plane::Kernel, &name, check);
    }
}

fn missing(peer: &str) -> Option<String> {
    if host::find_program(peer).is_none() {
        return Some(format!("needs {peer}"));
    }
    let module = |folder: &&str| Path::new(folder).join("nginx/modules/ngx_stream_module.so");
    let whole = peer != "nginx" || MODULE_FOLDERS.iter().any(|folder| module(folder).is_file());
    (!whole).then(|| "needs nginx's stream module".to_owned())
}

fn haproxy(_: &Stage) -> Result<()> {
    takes_part("haproxy")
}

fn pgbouncer(_: &Stage) -> Result<()> {
    takes_part("pgbouncer")
}

fn nginx(_: &Stage) -> Result<()> {
    takes_part("nginx")
}

fn takes_part(peer: &str) -> Result<()> {
    let bench = Bench::new()?;
    let own = ["connect", "--peers", peer];
    bench.run_well(&bench.words(&[&own[..], &QUICK].concat())?)?;
    let report = bench.report()?;
    let point = points(&report).next().context("a point")?;
    let path = items(&point["paths"]).next().context("a path")?;
    ensure!(path["peer"] == peer, "{} in place of it", path["peer"]);
    let rates = items(&path["runs"]).filter_map(|run| run["values"]["rate"].as_f64());
    let rates: Vec<f64> = rates.collect();
    ensure!(
        rates.len() == 2 && rates.iter().all(|rate| *rate > 0.0),
        "rates: {rates:?}"
    );
    Ok(())
}
