//! Settings of the machine are other ones during a run and the old ones after
//! it, however it ends; and nothing else is left behind.

use std::fs;
use std::time::Duration;

use anyhow::{Result, ensure};
use gate_tests::host;
use gate_tests::suite::{Stage, Suite};
use serde_json::Value;

use crate::harness::{
    ANOTHER, Bench, Ended, QUICK, Running, items, one_line, points, wait_for_others,
};

/// What a run changes, and to what.
const SETTINGS: [(&str, &str); 5] = [
    ("net.ipv4.ip_local_port_range", "10000 65535"),
    ("net.ipv4.tcp_tw_reuse", "1"),
    ("net.ipv4.tcp_max_tw_buckets", "1048576"),
    (SOMAXCONN, "8192"),
    ("net.ipv4.tcp_max_syn_backlog", "8192"),
];
const SOMAXCONN: &str = "net.core.somaxconn";
/// More than what a run wants is as good.
const OR_MORE: [&str; 3] = [
    "net.ipv4.tcp_max_tw_buckets",
    SOMAXCONN,
    "net.ipv4.tcp_max_syn_backlog",
];
/// The kernel's own, less than a run wants.
const SOMAXCONN_UNTUNED: &str = "4096";

/// Longer than any test lets it run.
const ENDLESS: [&str; 9] = [
    "connect",
    "--peers",
    "gate,direct",
    "--rounds",
    "1000",
    "--seconds",
    "1",
    "--repeats",
    "0",
];

pub fn register(suite: &mut Suite) {
    suite.kernel("host settings are put back after a run", normal_end);
    suite.kernel("host settings are put back after SIGINT", interrupted);
    suite.kernel("host settings are put back after SIGTERM", terminated);
    suite.kernel(
        "host settings are put back by the run after SIGKILL",
        killed,
    );
    suite.kernel("a second bench at the same time is refused", second);
}

fn normal_end(_: &Stage) -> Result<()> {
    let bench = Bench::new()?;
    let own = ["connect", "--peers", "gate,direct"];
    let words = bench.words(&[&own[..], &QUICK].concat())?;
    let (before, running) = start(&bench, &words)?;
    let ended = bench.end(running)?;
    ended.expect(0)?;
    expect_clean(&bench, &before, &[ended.pid])?;
    let report = bench.report()?;
    let text = bench.text()?;
    for ((name, wanted), value) in SETTINGS.iter().zip(&before.values) {
        let change = items(&report["host_changes"]).find(|change| change["setting"] == *name);
        ensure!(
            change.is_some() != is_met(name, wanted, value),
            "{name}: {change:?}"
        );
        if let Some(change) = change {
            ensure!(
                change["before"] == *value.as_str() && change["during"] == *wanted,
                "{change}"
            );
            let line = format!("{name} {value} -> {wanted}");
            ensure!(text.contains(&line), "no {line:?} in:\n{text}");
        }
    }
    Ok(())
}

fn interrupted(_: &Stage) -> Result<()> {
    ends_in_order(libc::SIGINT)
}

fn terminated(_: &Stage) -> Result<()> {
    ends_in_order(libc::SIGTERM)
}

/// What was measured until then is in the report.
fn ends_in_order(signal: i32) -> Result<()> {
    let bench = Bench::new()?;
    let own = [
        "admit",
        "connect",
        "--rate",
        "300",
        "--peers",
        "gate,direct",
    ];
    let (before, mut running) = start(&bench, &bench.words(&[&own[..], &QUICK].concat())?)?;
    running.wait_for("connect | 32 clients | round 1")?;
    running.signal(signal)?;
    let ended = bench.end(running)?;
    ended.expect_complaint(1, "interrupted")?;
    expect_clean(&bench, &before, &[ended.pid])?;
    let report = bench.report()?;
    let first = points(&report).next();
    let paths: Vec<&Value> = first
        .iter()
        .flat_map(|point| items(&point["paths"]))
        .collect();
    ensure!(paths.len() == 2, "not in the report: {paths:?}");
    ensure!(
        paths.iter().all(|path| items(&path["runs"]).count() == 2),
        "{paths:?}"
    );
    ensure!(bench.text()?.contains("300 clients/s"), "not in the text");
    ensure!(bench.out().join("admit.svg").exists(), "no plot");
    Ok(())
}

fn killed(_: &Stage) -> Result<()> {
    let bench = Bench::new()?;
    let words = [&ENDLESS[..], &["--nic", "veth"]].concat();
    let (before, mut running) = start(&bench, &bench.words(&words)?)?;
    // A proxy, its pins and its folder are there.
    running.wait_for("round 2 | gate")?;
    running.signal(libc::SIGKILL)?;
    let first = bench.end(running)?;
    ensure!(first.code.is_none(), "it was not killed: {:?}", first.code);
    ensure!(
        values()? != before.values,
        "the settings came back by themselves"
    );
    let own = ["connect", "--nic", "veth", "--peers", "gate,direct"];
    let next = bench.run(&bench.words(&[&own[..], &QUICK].concat())?)?;
    next.expect(0)?;
    let said = "putting back what a bench that was killed has changed";
    ensure!(next.stderr.contains(said), "{}", next.stderr);
    expect_clean(&bench, &before, &[first.pid, next.pid])
}

fn second(_: &Stage) -> Result<()> {
    let bench = Bench::new()?;
    let (before, running) = start(&bench, &bench.words(&ENDLESS)?)?;
    let other = Bench::new()?;
    let own = ["connect", "--peers", "direct"];
    let words = other.words(&[&own[..], &QUICK].concat())?;
    let refused: Ended = other.end(other.start_at_once(&words)?)?;
    refused.expect_complaint(1, &format!("{ANOTHER} {}", running.pid()))?;
    ensure!(
        !other.out().join("report.json").exists(),
        "it wrote a report"
    );
    expect_changed("the first one goes on")?;
    running.signal(libc::SIGINT)?;
    let ended = bench.end(running)?;
    ended.expect_complaint(1, "interrupted")?;
    expect_clean(&bench, &before, &[ended.pid, refused.pid])
}

/// Starts a bench and waits until the machine is as it wants it; the settings
/// before that, which are to outlive the bench.
fn start(bench: &Bench, words: &[String]) -> Result<(Before, Running)> {
    wait_for_others()?;
    let before = Before::note()?;
    let mut running = bench.start_at_once(words)?;
    running.wait_for("(put back at the end)")?;
    expect_changed("a run changes them")?;
    Ok((before, running))
}

/// The settings before a run.
struct Before {
    values: Vec<String>,
    /// What a machine had that is tuned already; put back when dropped.
    tuned: Option<String>,
}

impl Before {
    /// Has at least one setting be other than a run wants it.
    fn note() -> Result<Self> {
        let mut before = Self {
            values: values()?,
            tuned: None,
        };
        let mut settings = SETTINGS.iter().zip(&before.values);
        if settings.all(|((name, wanted), value)| is_met(name, wanted, value)) {
            before.tuned = Some(read(SOMAXCONN)?);
            write(SOMAXCONN, SOMAXCONN_UNTUNED)?;
            before.values = values()?;
        }
        Ok(before)
    }
}

impl Drop for Before {
    fn drop(&mut self) {
        if let Some(value) = &self.tuned
            && let Err(error) = write(SOMAXCONN, value)
        {
            eprintln!("{SOMAXCONN} was {value}, and stays {SOMAXCONN_UNTUNED}: {error}");
        }
    }
}

fn is_met(name: &str, wanted: &str, value: &str) -> bool {
    let number = |text: &str| text.parse::<u64>().ok();
    let both = number(value).zip(number(wanted));
    let more = both.is_some_and(|(value, wanted)| value > wanted);
    value == wanted || (more && OR_MORE.contains(&name))
}

fn expect_changed(when: &str) -> Result<()> {
    host::eventually(Duration::from_secs(5), when, || {
        for (name, wanted) in SETTINGS {
            let value = read(name)?;
            ensure!(is_met(name, wanted, &value), "{name} is {value}");
        }
        Ok(Some(()))
    })
}

fn expect_clean(bench: &Bench, before: &Before, pids: &[u32]) -> Result<()> {
    for ((name, _), value) in SETTINGS.iter().zip(&before.values) {
        let now = read(name)?;
        ensure!(now == *value, "{name} is {now} in place of {value}");
    }
    bench.expect_nothing_left(pids)
}

fn values() -> Result<Vec<String>> {
    SETTINGS.iter().map(|(name, _)| read(name)).collect()
}

fn read(name: &str) -> Result<String> {
    Ok(one_line(&fs::read_to_string(file(name))?))
}

fn write(name: &str, value: &str) -> Result<()> {
    Ok(fs::write(file(name), value)?)
}

fn file(name: &str) -> String {
    format!("/proc/sys/{}", name.replace('.', "/"))
}
