//! What makes no sense is refused, with the cause.

use std::fs;

use anyhow::Result;
use gate_tests::binaries;
use gate_tests::suite::{Stage, Suite};

use crate::harness::{Bench, QUICK};

pub fn register(suite: &mut Suite) {
    suite.local("options that make no sense are refused", options);
    suite.local("programs that are not there are named", programs);
    suite.local("files that are no reports are refused", files);
}

fn options(_: &Stage) -> Result<()> {
    let bench = Bench::new()?;
    for (words, code, fragment) in [
        (
            &["connect", "--peers", "gate,haprox"][..],
            1,
            "there is no peer `haprox`; there are gate, haproxy",
        ),
        (&["conect"], 2, "invalid value 'conect'"),
        (
            &["connect", "--rate", "0"],
            1,
            "--rate 0: from 1 to 10000000 per second",
        ),
        (&["connect", "--rate", "NaN"], 1, "--rate NaN"),
        (
            &["connect", "--seconds", "0"],
            1,
            "--seconds 0: from 0.1 to 3600 seconds",
        ),
        (&["goals", "relay"], 1, "name it alone"),
        (
            &["goals", "--peers", "haproxy"],
            1,
            "`goals` are those of the way `gate`",
        ),
        (
            &["mixed", "--mixed-workers", "0"],
            2,
            "0 is not in 1..=1024",
        ),
        (&["connect", "--rounds", "0"], 2, "0 is not in 1..=1000"),
        (
            &["connect", "--warm-up=-1"],
            1,
            "--warm-up -1: from 0 to 3600 seconds",
        ),
        (
            &["connect", "--disturbed-above=-1"],
            1,
            "--disturbed-above -1",
        ),
        (
            &["connect", "--gate-cpus", "1023"],
            1,
            "CPU 1023 is not one of those",
        ),
        (&["connect", "--gate-cpus", "0,0"], 2, "lists a CPU twice"),
        (
            &["connect", "--only", "nothing of that name"],
            1,
            "no load of these scenarios is left: see --only",
        ),
        (&["connect", "--nic", "no-such-nic"], 1, "no-such-nic"),
        (&["connect", "--peer-namespace", "x"], 2, "--nic"),
        (&["connect", "--postgres-pid", "1"], 2, "--postgres"),
        (
            &["connect", "--congestion-control", "no-such"],
            1,
            "no-such",
        ),
    ] {
        let ended = bench.run(&bench.words(words)?)?;
        ended.expect_complaint(code, fragment)?;
        bench.expect_nothing_left(&[ended.pid])?;
    }
    Ok(())
}

fn programs(_: &Stage) -> Result<()> {
    let bench = Bench::new()?;
    let gate = binaries::gate()?.display().to_string();
    let named = format!("gate={gate}");
    for (words, code, fragment) in [
        (
            &["--gate-bin", "no-such-gate"][..],
            1,
            "cannot run no-such-gate",
        ),
        (&["--gate-bin", "/dev/null"], 1, "cannot run /dev/null"),
        (
            &["--gate-bin", &gate, "--gate-bin", &named],
            1,
            "two ways are called `gate`",
        ),
        (&[], 2, "--gate-bin"),
    ] {
        let words = [&["connect", "--peers", "gate"][..], words].concat();
        let ended = bench.run(&bench.words_without_gate(&words))?;
        ended.expect_complaint(code, fragment)?;
    }
    // There is a server, but nobody listens.
    let own = [
        "mixed",
        "--only",
        "tpcb",
        "--peers",
        "direct",
        "--postgres",
        "127.0.0.1:1",
        "--postgres-pid",
        "1",
    ];
    let ended = bench.run(&bench.words(&[&own[..], &QUICK].concat())?)?;
    ended.expect_complaint(1, "127.0.0.1")
}

fn files(_: &Stage) -> Result<()> {
    let bench = Bench::new()?;
    let own = ["connect", "--peers", "direct"];
    bench.run_well(&bench.words(&[&own[..], &QUICK].concat())?)?;
    let log = bench.out().join("connect-32-clients-direct.hlog");
    let log = fs::read_to_string(log)?;
    let report = fs::read_to_string(bench.out().join("report.json"))?;
    // The last interval has lost its last line; the second one is cut within.
    let lines: Vec<&str> = log.lines().collect();
    let less = lines[..lines.len() - 1].join("\n") + "\n";
    for (name, text, fragment) in [
        (
            "cut.hlog",
            &log[..log.len() - 40],
            "cannot be used; copy or measure it again",
        ),
        (
            "less.hlog",
            &less,
            "cannot be used; copy or measure it again",
        ),
        ("empty.hlog", "", "it is no report of gate-bench"),
        (
            "other.json",
            &report.replacen("\"schema\": 1", "\"schema\": 99", 1),
            "has schema 99",
        ),
        ("none.json", "{}", "it is JSON, but no report of gate-bench"),
        (
            "cut.json",
            &report[..report.len() / 2],
            "the report is cut off",
        ),
    ] {
        let file = bench.path(name);
        fs::write(&file, text)?;
        let file = file.display().to_string();
        let ended = bench.run(&["report", &file])?;
        ended.expect_complaint(1, fragment)?;
        ended.expect_complaint(1, name)?;
    }
    let folder = bench.out().display().to_string();
    bench
        .run(&["report", &folder])?
        .expect_complaint(1, "Is a directory")?;
    bench
        .run(&["report", "no-such-file"])?
        .expect_complaint(1, "no-such-file")?;
    bench.run(&["report"])?.expect_complaint(2, "<FILE>")
}
