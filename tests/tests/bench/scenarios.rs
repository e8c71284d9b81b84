//! One test per scenario, with every peer that is there.

use anyhow::{Context as _, Result, ensure};
use gate_tests::gate::{Gate, Plan};
use gate_tests::host;
use gate_tests::postgres::{Postgres, SUPERUSER, binaries};
use gate_tests::suite::{Plane, Stage, Suite};
use serde_json::Value;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use crate::harness::{Bench, QUICK, items, points, postgres_words};
use crate::report::{self, Expected, PEERS};

const DEFAULT: Expected<'static> = Expected {
    scenario: "",
    points: &[],
    rounds: 2,
    peers: &PEERS,
    timed: true,
    rated: true,
};

/// Nobody connects to the gate that this is the backend of.
const NO_SERVER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9);

pub fn register(suite: &mut Suite) {
    suite.kernel("storm is measured on every way", storm);
    suite.kernel("admit is measured on every way", admit);
    suite.kernel("relay is measured on every way", relay);
    suite.kernel("bulk is measured on every way", bulk);
    suite.kernel("idle is measured on every way", idle);
    suite.kernel("connect is measured on every way", connect);
    suite.kernel("kernel is measured with the planes and without", kernel);
    suite.kernel("stall is measured on every way", stall);
    suite.kernel("mixed is measured on every way", mixed);
    suite.kernel("mixed runs pgbench's own mix, too", tpcb_like);
    suite.kernel("the server may be on a unix socket", by_unix);
    suite.kernel("bulk comes in by a unix socket", bulk_by_unix);
}

fn measure(stage: &Stage, words: &[&str], expected: Expected<'_>) -> Result<Value> {
    prepare(stage.postgres)?;
    let bench = Bench::new()?;
    let mut words = bench.words(&[&[expected.scenario][..], words, &QUICK].concat())?;
    words.extend(postgres_words(stage)?);
    let ended = bench.run_well(&words)?;
    let report = report::expect(&bench, &expected)?;
    ensure!(ended.stdout.contains("report.json"), "{}", ended.stdout);
    Ok(report)
}

fn storm(stage: &Stage) -> Result<()> {
    let names = [
        "polite, 64 clients",
        "polite, 300 clients/s",
        "hard, 64 clients",
    ];
    let expected = Expected {
        scenario: "storm",
        points: &names,
        ..DEFAULT
    };
    // The kernel plane is what refuses hard: the local one would be left out.
    let words = ["--rate", "300", "--kernel", "required"];
    measure(stage, &words, expected).map(drop)
}

fn admit(stage: &Stage) -> Result<()> {
    let expected = Expected {
        scenario: "admit",
        points: &["300 clients/s"],
        ..DEFAULT
    };
    measure(stage, &["--rate", "300"], expected).map(drop)
}

fn relay(stage: &Stage) -> Result<()> {
    let expected = Expected {
        scenario: "relay",
        points: &["64 B x 16", "64 B x 16 at 300/s"],
        ..DEFAULT
    };
    let words = ["--only", "64 B x 16", "--rate", "300"];
    measure(stage, &words, expected).map(drop)
}

fn bulk(stage: &Stage) -> Result<()> {
    let expected = Expected {
        scenario: "bulk",
        points: &["1 down", "1 up"],
        timed: false,
        ..DEFAULT
    };
    measure(stage, &["--only", "1 "], expected).map(drop)
}

fn idle(stage: &Stage) -> Result<()> {
    let expected = Expected {
        scenario: "idle",
        points: &["20 sessions"],
        timed: false,
        rated: false,
        ..DEFAULT
    };
    let report = measure(stage, &["--idle", "20"], expected)?;
    let point = points(&report).next().context("a point")?;
    for key in ["user_kib", "kernel_kib"] {
        let shown = items(&point["measures"]).any(|measure| measure["key"] == key);
        ensure!(shown, "{key} is not among the measures");
    }
    Ok(())
}

fn connect(stage: &Stage) -> Result<()> {
    let expected = Expected {
        scenario: "connect",
        points: &["32 clients"],
        ..DEFAULT
    };
    measure(stage, &[], expected).map(drop)
}

fn kernel(stage: &Stage) -> Result<()> {
    let names = [
        "planes: polite, 64 clients",
        "planes: 32 clients",
        "planes: 64 B x 16",
    ];
    let expected = Expected {
        scenario: "kernel",
        points: &names,
        ..DEFAULT
    };
    // Another gate of this machine, whose programs run at the same sockets: what
    // they cost is not gate-local's.
    let _other = Gate::start_plan(Plan {
        in_our_cgroup: true,
        ..Plan::new(Plane::Kernel, NO_SERVER, "")
    })?;
    let report = measure(stage, &[], expected)?;
    let storm = points(&report).next().context("a point")?;
    for path in items(&storm["paths"]) {
        for run in items(&path["runs"]) {
            let runs = run["values"]["bpf_runs"].as_f64().context("bpf_runs")?;
            let with_plane = path["peer"] == "gate";
            ensure!((runs > 0.0) == with_plane, "{}: {runs} runs", path["peer"]);
        }
    }
    Ok(())
}

fn stall(stage: &Stage) -> Result<()> {
    let expected = Expected {
        scenario: "stall",
        points: &["16 live beside 5 stalled"],
        ..DEFAULT
    };
    let words = ["--rate", "300", "--stalled", "5"];
    measure(stage, &words, expected).map(drop)
}

fn mixed(stage: &Stage) -> Result<()> {
    let pgbench = pgbench()?;
    let expected = Expected {
        scenario: "mixed",
        points: &["pgbench -S", "pgbench -S -C"],
        timed: false,
        ..DEFAULT
    };
    let words = ["--only=-S", "--pgbench", &pgbench];
    measure(stage, &words, expected).map(drop)
}

fn tpcb_like(stage: &Stage) -> Result<()> {
    let pgbench = pgbench()?;
    let expected = Expected {
        scenario: "mixed",
        points: &["pgbench tpcb-like"],
        peers: &["gate", "direct"],
        timed: false,
        ..DEFAULT
    };
    let words = [
        "--only",
        "tpcb",
        "--peers",
        "direct,gate",
        "--pgbench",
        &pgbench,
    ];
    measure(stage, &words, expected).map(drop)
}

const BY_UNIX: [&str; 3] = ["gate-unix", "haproxy-unix", "pgbouncer-unix"];

fn by_unix(stage: &Stage) -> Result<()> {
    let pgbench = pgbench()?;
    let peers = ["--peers", &BY_UNIX.join(",")];
    let relay = Expected {
        scenario: "relay",
        points: &["64 B x 16"],
        peers: &BY_UNIX,
        ..DEFAULT
    };
    let words = ["--only", "64 B x 16", "--pace", "closed"];
    let report = measure(stage, &[&words[..], &peers].concat(), relay)?;
    for peer in items(&report["peers"]).filter(|peer| peer["name"] == "gate-unix") {
        let line = peer["commands"][0].as_str().context("a command")?;
        ensure!(line.contains("--backend $BACKEND"), "{line}");
    }
    let mixed = Expected {
        scenario: "mixed",
        points: &["pgbench -S", "pgbench -S -C"],
        peers: &BY_UNIX,
        timed: false,
        ..DEFAULT
    };
    let words = ["--only=-S", "--pgbench", &pgbench];
    measure(stage, &[&words[..], &peers].concat(), mixed).map(drop)
}

fn bulk_by_unix(stage: &Stage) -> Result<()> {
    let expected = Expected {
        scenario: "bulk",
        points: &["1 down", "1 up"],
        peers: &["gate-unix"],
        timed: false,
        ..DEFAULT
    };
    let words = ["--only", "1 ", "--peers", "gate-unix"];
    measure(stage, &words, expected).map(drop)
}

pub fn pgbench() -> Result<String> {
    Ok(binaries()?.join("pgbench").display().to_string())
}

/// The roles and tables that the bench asks a PostgreSQL for.
pub fn prepare(postgres: &Postgres) -> Result<()> {
    static PREPARED: OnceLock<Result<(), String>> = OnceLock::new();
    let prepared = PREPARED.get_or_init(|| fill(postgres).map_err(|error| format!("{error:#}")));
    prepared.clone().map_err(|error| anyhow::anyhow!("{error}"))
}

fn fill(postgres: &Postgres) -> Result<()> {
    let mut admin = postgres.admin()?;
    admin.query("create role bench login")?;
    admin.query("create role refused login connection limit 0")?;
    admin.close()?;
    let address = postgres.address();
    let mut command = Command::new(pgbench()?);
    command
        .args(["--initialize", "--quiet", "--scale", "1"])
        .args(["--host", &address.ip().to_string()])
        .args(["--port", &address.port().to_string()])
        .args(["--username", SUPERUSER, SUPERUSER]);
    let output = host::run(&mut command, Duration::from_secs(60))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "pgbench --initialize: {said}");
    Ok(())
}
