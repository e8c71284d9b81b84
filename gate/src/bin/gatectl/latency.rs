//! `gatectl latency`: how long things took since the start.

use std::fmt::Write as _;

use clap::Args;
use gate::control::api::{Latencies, LatencyEntry};
use gate::stats::{Latency, histogram};

use crate::output::{Output, Table, write};
use crate::target::{EXIT_USAGE, Failure, Target};

/// As in the class AbstractHistogram of Java's HdrHistogram, whose layout the
/// percentile text has.
const TICKS_PER_HALF_DISTANCE: u32 = 5;

#[derive(Args)]
pub struct Options {
    /// Of this worker alone
    #[arg(long, value_name = "N")]
    pub worker: Option<usize>,
    /// Print the percentiles of one kind as HdrHistogram's .hgrm text, in microseconds
    #[arg(long, value_name = "KIND", value_parser = Latency::ALL.map(Latency::label))]
    pub hgrm: Option<String>,
}

pub fn run(options: &Options, target: &Target, output: Output) -> Result<(), Failure> {
    if options.hgrm.is_some() && output.json {
        return Err(Failure {
            exit: EXIT_USAGE,
            message: "--hgrm is a text of its own: give it without --json".to_owned(),
        });
    }
    let mut path = format!("/latency?cells={}", options.hgrm.is_some());
    if let Some(worker) = options.worker {
        path += &format!("&worker={worker}");
    }
    let read: Latencies = target.ask_gate(&path)?;
    match &options.hgrm {
        None => output.print(&read, text),
        Some(kind) => {
            let entry = read.latencies.iter().find(|entry| entry.name == *kind);
            let entry = entry.ok_or_else(|| Failure::new(format!("gate times no {kind}")))?;
            write(&percentiles(entry)?)
        }
    }
}

pub fn text(read: &Latencies) -> String {
    let mut table = Table::new(["", "COUNT", "P50", "P90", "P99", "P99.9", "MAX"]);
    for entry in &read.latencies {
        let time = |nanos| match entry.count {
            0 => "-".to_owned(),
            _ => time(nanos),
        };
        table.row([
            entry.name.clone(),
            entry.count.to_string(),
            time(entry.p50_ns),
            time(entry.p90_ns),
            time(entry.p99_ns),
            time(entry.p999_ns),
            time(entry.max_ns),
        ]);
    }
    table.render()
}

fn time(nanos: u64) -> String {
    let nanos = nanos as f64;
    match nanos {
        ..1e6 => format!("{:.1}us", nanos / 1e3),
        ..1e9 => format!("{:.1}ms", nanos / 1e6),
        _ => format!("{:.1}s", nanos / 1e9),
    }
}

/// The percentile text.
pub fn percentiles(entry: &LatencyEntry) -> Result<String, Failure> {
    let cells = entry.cells.iter().flatten().copied();
    let values = histogram(cells).map_err(Failure::new)?;
    let mut text = format!(
        "{:>12} {:>14} {:>10} {:>14}\n\n",
        "Value", "Percentile", "TotalCount", "1/(1-Percentile)"
    );
    let micros = |nanos: f64| nanos / 1e3;
    let mut total = 0;
    for step in values.iter_quantiles(TICKS_PER_HALF_DISTANCE) {
        total += step.count_since_last_iteration();
        let quantile = step.quantile_iterated_to();
        let value = micros(step.value_iterated_to() as f64);
        let _ = write!(text, "{value:>12.3} {quantile:.12} {total:>10}");
        if quantile < 1.0 {
            let _ = write!(text, " {:>14.2}", 1.0 / (1.0 - quantile));
        }
        text.push('\n');
    }
    let _ = write!(
        text,
        "#[Mean    = {:>12.3}, StdDeviation   = {:>12.3}]\n\
         #[Max     = {:>12.3}, Total count    = {:>12}]\n\
         #[Buckets = {:>12}, SubBuckets     = {:>12}]\n",
        micros(values.mean()),
        micros(values.stdev()),
        micros(values.max() as f64),
        values.len(),
        values.buckets(),
        // Twice ten to the power of the digits, as a power of two.
        (2 * 10_u64.pow(u32::from(values.sigfig()))).next_power_of_two(),
    );
    Ok(text)
}
