//! A flame graph shows where gate's cycles go.

use std::fs;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gate_tests::host;
use gate_tests::suite::{Plane, Stage, Suite};

use crate::harness::Bench;
use crate::svg;

/// A module of gate that every relayed byte passes.
const FUNCTION: &str = "gate::worker";

pub fn register(suite: &mut Suite) {
    suite.needing(
        missing(),
        Plane::Kernel,
        "a flame graph names gate's functions",
        flame,
    );
}

/// perf may be there, and forbidden.
fn missing() -> Option<String> {
    let Some(perf) = host::find_program("perf") else {
        return Some("needs perf".to_owned());
    };
    let mut command = Command::new(perf);
    command
        .args(["record", "--quiet", "--event", "cpu-clock"])
        .args(["--output", "/dev/null", "true"]);
    let tried = host::run(&mut command, Duration::from_secs(10));
    let runs = tried.is_ok_and(|output| output.status.success());
    (!runs).then(|| "needs perf's right to count".to_owned())
}

fn flame(_: &Stage) -> Result<()> {
    let bench = Bench::new()?;
    let words = [
        "relay",
        "--only",
        "64 B x 16",
        "--pace",
        "closed",
        "--peers",
        "gate",
        "--rounds",
        "1",
        "--seconds",
        "0.5",
        "--warm-up",
        "0.1",
        "--repeats",
        "0",
        "--flame",
    ];
    let ended = bench.run_well(&bench.words(&words)?)?;
    let files = fs::read_dir(bench.out())?.flatten();
    let mut drawn = files.filter(|file| {
        let name = file.file_name().to_string_lossy().into_owned();
        name.starts_with("flame-") && name.ends_with(".svg")
    });
    let drawn = drawn.next().with_context(|| ended.stderr.clone())?;
    let text = fs::read_to_string(drawn.path())?;
    svg::expect_well_formed(&text)?;
    ensure!(
        text.contains(FUNCTION),
        "{FUNCTION} is not in it; it may lack symbols"
    );
    Ok(())
}
