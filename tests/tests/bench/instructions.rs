//! Instructions of gate's pure hot functions are counted, of them and of nothing else.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gate_tests::suite::{Plane, Stage, Suite};
use gate_tests::{binaries, host};

use crate::harness::{Bench, items, read_json};

/// Two functions: one that looks into two cells, and one that looks into 64.
const FUNCTIONS: &str = "cells: ";
const FEW_CELLS: &str = "cells: taken and given";
const MANY_CELLS: &str = "cells: refused, 64 CPUs";
/// A function of a few lines, not optimized; a program's start alone takes more.
const FEW_MAX: f64 = 5_000.0;
/// The program is built there, too.
const TIME_MAX: Duration = Duration::from_secs(900);

pub fn register(suite: &mut Suite) {
    let missing = host::find_program("valgrind").is_none();
    suite.needing(
        missing.then(|| "needs valgrind".to_owned()),
        Plane::Local,
        "instructions are counted, twice the same",
        instructions,
    );
}

fn instructions(_: &Stage) -> Result<()> {
    let bench = Bench::new()?;
    let first = count(&bench, "first.json")?;
    let second = count(&bench, "second.json")?;
    ensure!(first == second, "{first:?}, then {second:?}");
    let of = |name: &str| first.get(name).copied().with_context(|| name.to_owned());
    let (few, many) = (of(FEW_CELLS)?, of(MANY_CELLS)?);
    ensure!((10.0..FEW_MAX).contains(&few), "{FEW_CELLS}: {few}");
    // Were the rest of the program counted, it would hide the difference.
    ensure!(many > few * 5.0, "{few} for few cells, {many} for many");
    Ok(())
}

fn count(bench: &Bench, file: &str) -> Result<BTreeMap<String, f64>> {
    let file = bench.path(file);
    let mut command = Command::new(binaries::xtask()?);
    command
        .args(["bench", "instructions", "--quick", FUNCTIONS, "--json"])
        .arg(&file)
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    let output = host::run(&mut command, TIME_MAX)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "xtask: {said}");
    let counts = read_json(&file)?;
    let counts = items(&counts["functions"]).filter_map(|function| {
        let name = function["name"].as_str()?.to_owned();
        Some((name, function["instructions"].as_f64()?))
    });
    Ok(counts.collect())
}
