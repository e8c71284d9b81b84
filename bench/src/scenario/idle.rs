//! Memory and CPU of sessions that do nothing.

use std::time::Duration;

use anyhow::Result;

use super::{Measured, Plan, Point, Stage, measure};
use crate::host::interrupt::pause;
use crate::load::session;
use crate::measure::memory;
use crate::report::model::Better;

/// What was allocated on the way is given back by then.
const SETTLES_WITHIN: Duration = Duration::from_millis(500);

pub fn points(plan: &Plan) -> Vec<Point> {
    plan.idle.iter().map(|sessions| point(*sessions)).collect()
}

fn point(sessions: usize) -> Point {
    Point {
        sessions,
        measures: vec![
            measure("user_kib", "proxy's memory", "KiB/session", Better::Lower),
            measure(
                "kernel_kib",
                "kernel's memory",
                "KiB/session",
                Better::Lower,
            ),
            measure("user_mib", "proxy's memory in all", "MiB", Better::Lower),
            measure("idle_cpu", "proxy CPU while idle", "ms/s", Better::Lower),
        ],
        ..Point::new(
            format!("{sessions} sessions"),
            format!(
                "{sessions} sessions that have had one answer and ask nothing more; the kernel's memory is that of all sockets between client and backend"
            ),
            Box::new(move |stage| run(stage, sessions)),
        )
    }
}

fn run(stage: &Stage<'_>, count: usize) -> Result<Measured> {
    // One session has been there before, so that what a proxy allocates once for
    // all is no session's.
    let first = session::open(stage.target)?;
    pause(SETTLES_WITHIN)?;
    let before = memory::now(stage.proxy)?;
    let sessions = session::open_all(stage.target, count)?;
    pause(SETTLES_WITHIN)?;
    let after = memory::now(stage.proxy)?;
    let begin = stage.watch.snapshot()?;
    pause(stage.plan.seconds)?;
    let end = stage.watch.snapshot()?;
    drop((first, sessions));
    let window = stage.watch.window(&begin, &end);
    let each = |before: f64, after: f64| (after - before) / count as f64;
    let kernel = each(before.kernel_kib, after.kernel_kib);
    let mut values = vec![("kernel_kib".to_owned(), kernel)];
    if let Some(cpu) = window.cpu("proxy") {
        let user = each(before.user_kib, after.user_kib);
        let cpu = cpu.as_secs_f64() * 1e3 / window.elapsed.as_secs_f64();
        values.push(("user_kib".to_owned(), user));
        values.push(("user_mib".to_owned(), after.user_kib / 1024.0));
        values.push(("idle_cpu".to_owned(), cpu));
    }
    Ok(Measured {
        values,
        window,
        latency: None,
        failed: 0,
        failure: None,
        unfinished: 0,
    })
}
