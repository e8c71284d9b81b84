//! Two builds in one run, and two reports of two runs.

use anyhow::{Context as _, Result, ensure};
use gate_tests::binaries;
use gate_tests::suite::{Stage, Suite};

use crate::harness::{Bench, QUICK, one_line, points};
use crate::report::{self, Expected};

pub fn register(suite: &mut Suite) {
    suite.kernel("two builds are measured in one run", two_builds);
    suite.kernel("two reports are compared", two_reports);
}

fn two_builds(_: &Stage) -> Result<()> {
    let bench = Bench::new()?;
    let gate = binaries::gate()?.display().to_string();
    let (base, head) = (format!("base={gate}"), format!("head={gate}"));
    let own = [
        "connect",
        "--peers",
        "head,base",
        "--gate-bin",
        &head,
        "--gate-bin",
        &base,
    ];
    bench.run_well(&bench.words_without_gate(&[&own[..], &QUICK].concat()))?;
    let expected = Expected {
        scenario: "connect",
        points: &["32 clients"],
        rounds: 2,
        peers: &["head", "base"],
        timed: true,
        rated: true,
    };
    // The ratios of each to the other are checked there.
    let report = report::expect(&bench, &expected)?;
    let point = points(&report).next().context("a point")?;
    let head = &point["paths"][0];
    let ratio = &head["ratios"]["rate"]["base"]["median"];
    ensure!(ratio.is_number(), "head / base: {}", head["ratios"]);
    let text = bench.text()?;
    ensure!(text.contains("head / base"), "no ratio in:\n{text}");
    Ok(())
}

fn two_reports(_: &Stage) -> Result<()> {
    let (a, b) = (Bench::new()?, Bench::new()?);
    for bench in [&a, &b] {
        let own = ["connect", "--peers", "gate,direct"];
        bench.run_well(&bench.words(&[&own[..], &QUICK].concat())?)?;
    }
    let files = [&a, &b].map(|bench| bench.out().join("report.json").display().to_string());
    let ended = a.run(&["report", &files[0], &files[1]])?;
    ended.expect(0)?;
    let text = one_line(&ended.stdout);
    for said in [
        "were not interleaved",
        "B / A",
        "connect, 32 clients",
        &files[0],
        &files[1],
    ] {
        ensure!(text.contains(said), "no {said:?} in:\n{}", ended.stdout);
    }
    Ok(())
}
