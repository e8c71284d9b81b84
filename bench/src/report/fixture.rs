//! Reports for tests: a small one whose every figure is known, and one as a run writes it.

use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use super::histogram::{Interval, PERCENTILES, keep, latencies};
use super::model::{
    Better, HostChange, Latency, Measure, PathReport, PeerInfo, Placement, PointReport, Report,
    Run, SCHEMA, ScenarioReport, Side,
};
use crate::host::facts::Facts;

/// One point with gate (rounds 0, 1, 2), haproxy (0, 2 and 3), and pgbouncer left out.
pub fn small() -> Report {
    let cpu = measure("cpu", "proxy CPU", "us/request", Better::Lower);
    let mut gate = path("gate", &[(0, 10.0), (1, 20.0), (2, 30.0)]);
    gate.runs[1].repeated = 2;
    let mut haproxy = path("haproxy", &[(0, 20.0), (2, 20.0), (3, 60.0)]);
    haproxy.runs[1].disturbed = Some("a backup ran".to_owned());
    let pgbouncer = PathReport {
        peer: "pgbouncer".to_owned(),
        left_out: Some("it does not refuse users".to_owned()),
        ..PathReport::default()
    };
    let mut report = empty();
    report.scenarios.push(ScenarioReport {
        name: "relay".to_owned(),
        about: "what relayed bytes cost".to_owned(),
        points: vec![PointReport {
            name: "64 B x 16".to_owned(),
            about: "16 sessions, each one request at a time".to_owned(),
            measures: vec![cpu],
            paths: vec![gate, haproxy, pgbouncer],
        }],
    });
    report
}

/// Percentile p at about p microseconds.
pub fn latency(count: u64) -> Latency {
    let us = |percent: f64| if percent == 99.9 { 999.0 } else { percent };
    Latency {
        of: "from request to answer".to_owned(),
        percentiles_us: PERCENTILES.iter().map(|&p| (p, us(p))).collect(),
        count,
        histogram: "none.hlog".to_owned(),
    }
}

/// Two scenarios as a run writes them, with histograms in the folder.
pub fn realistic(folder: &Path) -> Report {
    let mut random = Random(42);
    let mut report = empty();
    let relay = [("64 B x 16, open", 1.0), ("8 KiB x 64, open", 2.6)];
    report.scenarios.push(ScenarioReport {
        name: "relay".to_owned(),
        about: "what a request and its answer cost on their way".to_owned(),
        points: relay
            .iter()
            .map(|(name, scale)| relay_point(name, *scale, folder, &mut random))
            .collect(),
    });
    report.scenarios.push(ScenarioReport {
        name: "storm".to_owned(),
        about: "what a client costs that is refused".to_owned(),
        points: vec![storm_point(&mut random)],
    });
    report
}

fn relay_point(name: &str, scale: f64, folder: &Path, random: &mut Random) -> PointReport {
    let peers = [
        ("direct", 0.0, 14.0),
        ("gate", 5.1, 19.0),
        ("haproxy", 6.0, 22.0),
        ("pgbouncer", 9.4, 29.0),
        ("nginx", 7.1, 24.0),
        ("tokio", 6.6, 21.0),
        ("tokio-uring", 5.6, 20.5),
    ];
    let paths = peers.iter().map(|&(peer, cpu, us)| {
        let mut path = PathReport {
            peer: peer.to_owned(),
            ..PathReport::default()
        };
        let mut intervals = Vec::new();
        for round in 0..5 {
            let noise = random.around(1.0, 0.05);
            let mut run = run(round, &[("rate", 40_000.0 * random.around(1.0, 0.0005))]);
            if cpu > 0.0 {
                run.values.insert("cpu".to_owned(), cpu * scale * noise);
                run.sides
                    .push(side("proxy", cpu * scale * noise * 0.04, 0.012));
            }
            run.sides.push(side("load", 0.41 * noise, 0.031));
            run.sides.push(side("backend", 0.22 * noise, 0.008));
            run.bottleneck = if peer == "pgbouncer" {
                "proxy"
            } else {
                "schedule"
            }
            .to_owned();
            path.runs.push(run);
            intervals.push(interval(peer, round, us * scale * noise, random));
        }
        let file = format!("{}-{peer}", name.replace([' ', ','], "_"));
        let latency = keep(
            folder,
            &file,
            "from when a request was due to its answer",
            &intervals,
        );
        path.latency = Some(latency.expect("the folder can be written"));
        path
    });
    let mut paths: Vec<PathReport> = paths.collect();
    paths[2].runs[3].repeated = 1;
    paths[4].runs[1].disturbed =
        Some("the load waited 0.31 of the time for a CPU; allowed are 0.10".to_owned());
    PointReport {
        name: name.to_owned(),
        about: "every session sends a request when its schedule says so, 40,000 each second in \
                all, and the server answers as much as it was sent"
            .to_owned(),
        measures: vec![
            measure("cpu", "proxy CPU", "us/request", Better::Lower),
            measure("rate", "requests", "per second", Better::Higher),
        ],
        paths,
    }
}

fn storm_point(random: &mut Random) -> PointReport {
    let peers = [
        ("gate", 412_000.0, 2.2),
        ("haproxy", 61_000.0, 31.0),
        ("pgbouncer", 24_000.0, 40.0),
    ];
    let paths = peers.iter().map(|&(peer, rate, cpu)| {
        let mut path = PathReport {
            peer: peer.to_owned(),
            ..PathReport::default()
        };
        for round in 0..5 {
            let noise = random.around(1.0, 0.08);
            let mut run = run(round, &[("rate", rate * noise), ("cpu", cpu / noise)]);
            run.values.insert("failed".to_owned(), 0.0);
            run.sides = vec![side("proxy", 0.97, 0.02), side("load", 0.8 * noise, 0.05)];
            run.bottleneck = if peer == "gate" && round > 2 {
                "load"
            } else {
                "proxy"
            }
            .to_owned();
            path.runs.push(run);
        }
        path
    });
    let mut paths: Vec<PathReport> = paths.collect();
    paths.push(PathReport {
        peer: "nginx".to_owned(),
        left_out: Some("it knows no users, so it cannot refuse one".to_owned()),
        ..PathReport::default()
    });
    PointReport {
        name: "polite".to_owned(),
        about: "every client is answered with an ErrorResponse".to_owned(),
        measures: vec![
            measure("rate", "refusals", "per second", Better::Higher),
            measure("cpu", "proxy CPU", "us/refusal", Better::Lower),
            measure("failed", "unanswered", "clients", Better::Lower),
        ],
        paths,
    }
}

fn empty() -> Report {
    let peer = |name: &str, version: Option<&str>, command: &str| PeerInfo {
        name: name.to_owned(),
        version: version.map(str::to_owned),
        commands: vec![command.to_owned()],
        absent: None,
        note: None,
    };
    Report {
        schema: SCHEMA,
        started: "2026-11-30T12:00:00Z".to_owned(),
        command: "gate-bench run relay storm".to_owned(),
        commit: "0123456789ab-dirty".to_owned(),
        host: Facts {
            kernel: "6.1.0-44-amd64".to_owned(),
            cpus: 8,
            cpu_model: "AMD EPYC 7763 64-Core Processor".to_owned(),
            congestion_control: "cubic".to_owned(),
        },
        nic: None,
        postgres: None,
        goals: Vec::new(),
        host_changes: vec![HostChange {
            setting: "net.core.somaxconn".to_owned(),
            before: "4096".to_owned(),
            during: "65535".to_owned(),
        }],
        placement: Placement {
            notes: Vec::new(),
            gate_cpus: vec![0, 1],
            load_cpus: vec![2, 3, 6],
        },
        rounds: 5,
        seconds: 10.0,
        peers: vec![
            peer("gate", Some("gate 0.1.0"), "gate --config bench.toml"),
            peer(
                "haproxy",
                Some("HAProxy version 2.6.12-1+deb12u2 2025/04/01 - https://haproxy.org/"),
                "haproxy -W -f peers/haproxy.cfg",
            ),
            PeerInfo {
                note: None,
                name: "nginx".to_owned(),
                version: None,
                commands: Vec::new(),
                absent: Some(
                    "nginx is not installed: apt-get install nginx libnginx-mod-stream".to_owned(),
                ),
            },
        ],
        scenarios: Vec::new(),
    }
}

fn measure(key: &str, label: &str, unit: &str, better: Better) -> Measure {
    Measure {
        key: key.to_owned(),
        label: label.to_owned(),
        unit: unit.to_owned(),
        better,
    }
}

fn path(peer: &str, cpu: &[(u32, f64)]) -> PathReport {
    let runs = cpu.iter().map(|&(round, cpu)| run(round, &[("cpu", cpu)]));
    PathReport {
        peer: peer.to_owned(),
        runs: runs.collect(),
        ..PathReport::default()
    }
}

fn run(round: u32, values: &[(&str, f64)]) -> Run {
    let values = values
        .iter()
        .map(|(key, value)| ((*key).to_owned(), *value));
    Run {
        round,
        seconds: 10.0,
        values: values.collect(),
        ..Run::default()
    }
}

fn side(name: &str, cpus: f64, delay: f64) -> Side {
    Side {
        name: name.to_owned(),
        cpus,
        delay: Some(delay),
    }
}

/// Latencies with a tail, about so many microseconds in the middle.
pub fn interval(peer: &str, round: u32, us: f64, random: &mut Random) -> Interval {
    let mut histogram = latencies();
    for _ in 0..5_000 {
        let tail = (1.0 / random.next().max(1e-6)).powf(0.35);
        let nanos = us * 1000.0 * random.around(0.75, 0.15) * tail;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "positive"
        )]
        histogram.saturating_record(nanos as u64);
    }
    Interval {
        tag: format!("{peer}/{round}"),
        start: UNIX_EPOCH + Duration::from_secs(1_796_040_000 + 40 * u64::from(round)),
        duration: Duration::from_secs(10),
        histogram,
    }
}

/// The same numbers in every run of a test.
pub struct Random(pub u64);

impl Random {
    /// From 0 to 1 (splitmix64).
    #[expect(clippy::cast_precision_loss, reason = "of 53 bits")]
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    fn around(&mut self, middle: f64, share: f64) -> f64 {
        middle * (1.0 + share * (2.0 * self.next() - 1.0))
    }
}
