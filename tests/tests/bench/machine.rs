//! What the machine has to do with a run: programs that are not there, others
//! that take its CPUs, and a network device in place of loopback.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use gate_tests::binaries;
use gate_tests::suite::{Stage, Suite};
use serde_json::Value;

use crate::burner::Burners;
use crate::harness::{Bench, QUICK, items, points, wait_for_others};

pub fn register(suite: &mut Suite) {
    suite.kernel("a peer that is not installed is named", absent);
    suite.kernel("a disturbed run is repeated and marked", disturbed);
    suite.kernel("a virtual network device is measured", veth);
}

/// Hides a program from the words behind it, in a mount namespace of their own.
const HIDE: &str = r#"for folder in /usr/local/sbin /usr/sbin /sbin /usr/bin /usr/local/bin
do
    [ ! -f "$folder/haproxy" ] || mount --bind /dev/null "$folder/haproxy"
done
exec "$@""#;

fn absent(_: &Stage) -> Result<()> {
    let bench = Bench::new()?;
    let own = ["connect", "--peers", "gate,haproxy,direct"];
    let words = bench.words(&[&own[..], &QUICK].concat())?;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-e", "-c", HIDE, "sh"])
        .arg(binaries::gate_bench()?)
        .args(&words);
    bench.adopt(&mut command);
    wait_for_others()?;
    let ended = bench.end(bench.spawn(&mut command)?)?;
    ended.expect(0)?;
    bench.expect_nothing_left(&[ended.pid])?;
    let report = bench.report()?;
    let haproxy = items(&report["peers"]).find(|peer| peer["name"] == "haproxy");
    let why = haproxy
        .and_then(|peer| peer["absent"].as_str())
        .context("absent")?;
    ensure!(why.contains("apt-get install haproxy"), "absent: {why}");
    let text = bench.text()?;
    ensure!(
        text.contains("haproxy absent: haproxy is not installed"),
        "{text}"
    );
    let point = points(&report).next().context("a point")?;
    let measured: Vec<&str> = items(&point["paths"])
        .filter(|path| items(&path["runs"]).count() == 2)
        .filter_map(|path| path["peer"].as_str())
        .collect();
    ensure!(measured == ["gate", "direct"], "measured: {measured:?}");
    Ok(())
}

fn disturbed(_: &Stage) -> Result<()> {
    let bench = Bench::new()?;
    let own = [
        "connect",
        "--peers",
        "gate,direct",
        "--rounds",
        "1",
        "--seconds",
        "0.5",
    ];
    let more = ["--warm-up", "1", "--repeats", "1"];
    let words = bench.words(&[&own[..], &more].concat())?;
    wait_for_others()?;
    let burners = Burners::start()?;
    let ended = bench.run_well(&words);
    drop(burners);
    let said = ended?.stderr;
    ensure!(
        said.contains("again, because other programs took"),
        "{said}"
    );
    let report = bench.report()?;
    let paths = points(&report).flat_map(|point| items(&point["paths"]));
    let runs: Vec<&Value> = paths.flat_map(|path| items(&path["runs"])).collect();
    ensure!(runs.len() == 2, "{} runs", runs.len());
    for run in runs {
        ensure!(run["repeated"] == 1, "repeated: {}", run["repeated"]);
        let why = run["disturbed"].as_str().context("it is not marked")?;
        ensure!(why.contains("other programs took"), "{why}");
    }
    let text = bench.text()?;
    for said in [
        "repeated once because it was disturbed",
        "disturbed, and counted all the same",
    ] {
        ensure!(text.contains(said), "no {said:?} in:\n{text}");
    }
    Ok(())
}

fn veth(_: &Stage) -> Result<()> {
    let cpus = allowed_cpus()?;
    let cpus = &cpus[..cpus.len().min(2)];
    let list: Vec<String> = cpus.iter().map(ToString::to_string).collect();
    let list = list.join(",");
    let bench = Bench::new()?;
    let own = ["connect", "--nic", "veth", "--peers", "gate,direct"];
    let bound = ["--gate-cpus", &list, "--load-cpus", &list];
    bench.run_well(&bench.words(&[&own[..], &bound, &QUICK].concat())?)?;
    let report = bench.report()?;
    let runs: Vec<&Value> = items(&report["nic"]["runs"]).collect();
    let gate = runs
        .iter()
        .find(|run| run["peer"] == "gate")
        .context("gate's table")?;
    let rows: Vec<&Value> = items(&gate["rows"]).collect();
    ensure!(
        rows.len() == cpus.len(),
        "{} queues for {cpus:?}",
        rows.len()
    );
    let (mut packets, mut connections) = (0, gate["elsewhere"].as_u64().unwrap_or_default());
    for row in rows {
        let cpu = row["cpu"].as_u64().context("a queue without a CPU")?;
        ensure!(cpus.contains(&cpu), "CPU {cpu}");
        ensure!(row["worker"].is_number(), "no worker on CPU {cpu}");
        packets += row["packets"].as_u64().context("packets are not counted")?;
        connections += row["connections"]
            .as_u64()
            .context("connections are not counted")?;
    }
    ensure!(packets > 0, "no packets");
    let done = sessions_done(&report)?;
    // Those of the warm-up came on top of it.
    ensure!(
        connections as f64 >= done,
        "{connections} connections, {done} sessions"
    );
    let text = bench.text()?;
    for word in [
        "QUEUE IRQ CPU WORKER PACKETS CONNECTIONS",
        "connect",
        "veth",
    ] {
        ensure!(text.contains(word), "no {word:?} in:\n{text}");
    }
    expect_no_namespaces()
}

/// Of gate in the first round, which the table of queues is of.
fn sessions_done(report: &Value) -> Result<f64> {
    let point = points(report).next().context("a point")?;
    let gate = items(&point["paths"]).find(|path| path["peer"] == "gate");
    let run = &gate.context("gate")?["runs"][0];
    let rate = run["values"]["rate"].as_f64().context("a rate")?;
    let seconds = run["seconds"].as_f64().context("a time")?;
    Ok((rate * seconds).floor())
}

fn expect_no_namespaces() -> Result<()> {
    let names = fs::read_dir("/run/netns").into_iter().flatten().flatten();
    let ours = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let dead = |name: &String| {
        let mut numbers = name.split('-').filter(|part| part.parse::<u32>().is_ok());
        let process = numbers.next().map(|number| Path::new("/proc").join(number));
        name.starts_with("gate-bench-") && !process.is_some_and(|process: PathBuf| process.exists())
    };
    let left: Vec<String> = ours.filter(dead).collect();
    ensure!(left.is_empty(), "network namespaces are left: {left:?}");
    Ok(())
}

/// The CPUs of this process, proc_pid_status(5).
fn allowed_cpus() -> Result<Vec<u64>> {
    let status = fs::read_to_string("/proc/self/status")?;
    let list = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        .context("no Cpus_allowed_list")?;
    let mut cpus = Vec::new();
    for part in list.trim().split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(from.parse::<u64>()?..=to.parse()?);
    }
    Ok(cpus)
}
