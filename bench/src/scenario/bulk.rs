//! Endless streams.

use anyhow::{Result, bail};

use super::stage::cpu_values;
use super::{Measured, Point, Stage, measure};
use crate::load::streams::{self, Way};
use crate::report::model::Better;

pub fn points() -> Vec<Point> {
    let ways = [
        (Way::Down, "down", "from server to client"),
        (Way::Up, "up", "from client to server"),
    ];
    let mut points = Vec::new();
    for (streams, sessions) in [(1, "one session"), (8, "8 sessions")] {
        for (way, name, about) in ways {
            let work = Box::new(move |stage: &Stage<'_>| run(stage, streams, way));
            points.push(Point {
                sessions: streams,
                measures: vec![
                    measure("proxy_cpu", "proxy CPU", "s/GB", Better::Lower),
                    measure("rate", "rate", "GB/s", Better::Higher),
                    measure("all_cpu", "CPU of all sides", "s/GB", Better::Lower),
                ],
                ..Point::new(
                    format!("{streams} {name}"),
                    format!(
                        "endless COPY {about} on {sessions}, nothing copied or looked at by load \
                         and backend"
                    ),
                    work,
                )
            });
        }
    }
    points
}

fn run(stage: &Stage<'_>, streams: usize, way: Way) -> Result<Measured> {
    let crew = streams::start(&stage.place, stage.target, streams, way)?;
    let (tally, window, uploaded) = stage.run_counting(crew, || stage.backend.uploaded())?;
    let bytes = match way {
        Way::Down => tally.bytes,
        Way::Up => uploaded,
    };
    if bytes == 0 {
        bail!("not one byte came through in time");
    }
    let gigabytes = bytes as f64 / 1e9;
    let mut values = cpu_values(&window, gigabytes);
    let rate = gigabytes / window.elapsed.as_secs_f64();
    values.push(("rate".to_owned(), rate));
    Ok(Measured {
        values,
        window,
        latency: None,
        failed: tally.failed,
        failure: tally.failure,
        unfinished: 0,
    })
}
