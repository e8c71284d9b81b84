//! Live sessions beside clients that ask for an endless result and never read it.

use std::io::Write as _;
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Measured, Plan, Point, Stage, measure};
use crate::host::interrupt::pause;
use crate::load::pace::Pace;
use crate::load::requests::{self, Requests};
use crate::load::{session, streams};
use crate::measure::memory;
use crate::report::model::Better;
use crate::wire;

const LIVE: usize = 16;
const BYTES: usize = 64;
/// Requests per second of the live sessions together.
const RATE: f64 = 5000.0;
/// Every buffer on the way is full by then.
const FULL_WITHIN: Duration = Duration::from_secs(1);

pub fn points(plan: &Plan) -> Vec<Point> {
    let per_second = plan.rate.unwrap_or(RATE);
    let stalled = plan.stalled;
    let pace = Pace::Open { per_second };
    vec![Point {
        sessions: LIVE + stalled,
        measures: vec![
            measure("p99_ratio", "p99 to without them", "", Better::Lower),
            measure("p99", "p99", "us", Better::Lower),
            measure("p99_alone", "p99 without them", "us", Better::Lower),
            measure("proxy_cpu", "proxy CPU", "us/request", Better::Lower),
            measure(
                "stalled_kib",
                "proxy's memory",
                "KiB/stalled client",
                Better::Lower,
            ),
            measure(
                "kernel_kib",
                "kernel\'s memory",
                "KiB/stalled client",
                Better::Lower,
            ),
        ],
        timed: Some(
            "from when a request was due to the end of its reply, beside the stalled clients",
        ),
        pace,
        ..Point::new(
            format!("{LIVE} live beside {stalled} stalled"),
            format!(
                "{per_second:.0} requests of {BYTES} B per second on {LIVE} sessions, first alone, then beside {stalled} clients that ask for an endless result and never read"
            ),
            Box::new(move |stage| run(stage, stalled, pace)),
        )
    }]
}

fn run(stage: &Stage<'_>, stalled: usize, pace: Pace) -> Result<Measured> {
    let live = Requests {
        sessions: LIVE,
        bytes: BYTES,
        reply_bytes: BYTES,
        pace,
    };
    let plan = Plan {
        seconds: stage.plan.stall_seconds,
        ..stage.plan.clone()
    };
    let stage = &Stage {
        plan: &plan,
        ..stage.clone()
    };
    let start = || requests::start(&stage.place, stage.target, live);
    let alone = stage.run_units(start()?)?;
    let before = memory::now(stage.proxy)?;
    let _readers: Vec<TcpStream> = (0..stalled)
        .map(|index| stall(stage).with_context(|| format!("stalled client {index}")))
        .collect::<Result<_>>()?;
    pause(FULL_WITHIN)?;
    let after = memory::now(stage.proxy)?;
    let mut beside = stage.run_units(start()?)?;
    let value = |measured: &Measured, key: &str| {
        let found = measured.values.iter().find(|(name, _)| name == key);
        found.map_or(f64::NAN, |(_, value)| *value)
    };
    let (p99_alone, p99) = (value(&alone, "p99"), value(&beside, "p99"));
    let grown = (after.user_kib - before.user_kib) / stalled.max(1) as f64;
    // What befell the first half befell the ratio.
    beside.window.disturbed = beside.window.disturbed.or(alone.window.disturbed);
    beside.failed += alone.failed;
    beside.unfinished += alone.unfinished;
    beside.failure = beside.failure.or(alone.failure);
    let kernel = (after.kernel_kib - before.kernel_kib) / stalled.max(1) as f64;
    beside.values.extend([
        ("kernel_kib".to_owned(), kernel),
        ("p99_alone".to_owned(), p99_alone),
        ("p99_ratio".to_owned(), p99 / p99_alone),
    ]);
    if stage.proxy.is_some() {
        beside.values.push(("stalled_kib".to_owned(), grown));
    }
    Ok(beside)
}

fn stall(stage: &Stage<'_>) -> Result<TcpStream> {
    let mut stream = session::open(stage.target)?;
    streams::shrink(&stream)?;
    stream.write_all(&wire::query(wire::DOWNLOAD))?;
    Ok(stream)
}
