//! Endless streams.

use anyhow::{Result, bail};

use super::{Measured, Point, Stage, measure};
use crate::load::streams::{self, Way};
use crate::report::model::Better;

pub fn points() -> Vec<Point> {
    let ways = [
        (Way::Down, "down", "from server to client"),
        (Way::Up, "up", "from client to server"),
    ];
    let mut points = Vec::new();
    for streams in [1, 8] {
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
                    format!("{streams} sessions with an endless COPY {about}, nothing copied or looked at by load and backend"),
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
    let all: f64 = window
        .sides
        .iter()
        .map(|(_, used)| used.cpu.as_secs_f64())
        .sum();
    Ok(Measured {
        values: vec![
            ("rate".to_owned(), gigabytes / window.elapsed.as_secs_f64()),
            (
                "proxy_cpu".to_owned(),
                window.cpu("proxy").as_secs_f64() / gigabytes,
            ),
            ("all_cpu".to_owned(), all / gigabytes),
        ],
        window,
        latency: None,
        failed: tally.failed,
        failure: tally.failure,
    })
}
