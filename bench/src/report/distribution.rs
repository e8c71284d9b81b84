//! The latencies of a file, or of a part of it, whatever its format.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use hdrhistogram::Histogram;
use serde::Serialize;

use super::hgrm::{self, Hgrm};
use super::histogram::{self, Log, PERCENTILES, micros, percentiles_us, quantile};

/// Points of a curve from p50 to p99.99.
const CURVE_POINTS: u32 = 160;

/// Latencies with what is shown of them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Distribution {
    /// The file, or the peer.
    pub name: String,
    /// How many values.
    pub count: u64,
    /// Of all values.
    pub mean_us: Option<f64>,
    /// Percentile and microseconds.
    pub percentiles_us: Vec<(f64, f64)>,
    /// The same from p50 to p99.99, close enough for a curve.
    #[serde(skip)]
    pub curve: Vec<(f64, f64)>,
}

impl Distribution {
    /// Of nanoseconds.
    #[must_use]
    pub fn of(name: &str, nanos: &Histogram<u64>) -> Self {
        Self {
            name: name.to_owned(),
            count: nanos.len(),
            mean_us: (!nanos.is_empty()).then(|| nanos.mean() / 1000.0),
            percentiles_us: percentiles_us(nanos),
            curve: curve(nanos),
        }
    }

    /// Of percentile text in microseconds.
    #[must_use]
    pub fn of_hgrm(name: &str, text: &Hgrm) -> Self {
        let value = |percent: f64| Some((percent, text.value_at(quantile(percent))?));
        let rows = text.rows.iter();
        let drawn = rows.filter(|row| (0.5..=0.9999).contains(&row.quantile));
        let mut curve: Vec<(f64, f64)> =
            drawn.map(|row| (row.quantile * 100.0, row.value)).collect();
        curve.extend(value(99.99));
        Self {
            name: name.to_owned(),
            count: text.count,
            mean_us: text.mean,
            percentiles_us: PERCENTILES.into_iter().filter_map(value).collect(),
            curve,
        }
    }

    /// The microseconds of one of the percentiles.
    #[must_use]
    pub fn at(&self, percent: f64) -> Option<f64> {
        let mut found = self.percentiles_us.iter().filter(|(p, _)| *p == percent);
        found.next().map(|(_, us)| *us)
    }
}

/// What a file of latencies has: a log, or percentile text.
#[derive(Clone, Debug)]
pub enum Latencies {
    /// HdrHistogram's log.
    Log(Log),
    /// HdrHistogram's percentile text.
    Text(Hgrm),
}

impl Latencies {
    /// Reads either, told apart by the first lines.
    ///
    /// # Errors
    /// It is neither, or not whole.
    pub fn read(text: &str) -> Result<Self> {
        let first = || text.lines().map(str::trim).take(100);
        if first().any(hgrm::is_head) {
            let text = hgrm::read(text).context(
                "this percentile text (.hgrm) cannot be used; print it again from the log it is of",
            )?;
            return Ok(Self::Text(text));
        }
        let is_log = |line: &str| {
            let head = [
                "#[StartTime: ",
                "#[Histogram log format",
                "\"StartTimestamp\"",
                "Tag=",
            ];
            head.iter().any(|head| line.starts_with(head)) || line.contains(",HIST")
        };
        if first().any(is_log) {
            let log = histogram::read_log(text).context(
                "this HdrHistogram log (.hlog) cannot be used; copy or measure it again",
            )?;
            return Ok(Self::Log(log));
        }
        bail!(
            "it is no report of gate-bench (report.json), no HdrHistogram log (.hlog) and no \
             percentile text (.hgrm); name one of these"
        )
    }

    /// Each peer apart; where there is one peer, all of it, and, if wanted, each run.
    #[must_use]
    pub fn distributions(&self, name: &str, runs: bool) -> Vec<Distribution> {
        let log = match self {
            Self::Log(log) => log,
            Self::Text(text) => return vec![Distribution::of_hgrm(name, text)],
        };
        let all = |parts: BTreeMap<String, Histogram<u64>>| -> Vec<Distribution> {
            let parts = parts.iter();
            parts
                .map(|(name, nanos)| Distribution::of(name, nanos))
                .collect()
        };
        let peers = log.by_peer();
        if peers.len() > 1 {
            return all(peers);
        }
        let mut found = vec![Distribution::of(name, &log.merged())];
        let tags = log.by_tag();
        if runs && tags.len() > 1 {
            found.extend(all(tags));
        }
        found
    }
}

/// The curve of a peer in a log; `None` if there is no such log or peer.
#[must_use]
pub fn curve_of(log: &Path, peer: &str) -> Option<Vec<(f64, f64)>> {
    let text = std::fs::read_to_string(log).ok()?;
    let log = histogram::read_log(&text).ok()?;
    log.by_peer().get(peer).map(curve)
}

fn curve(nanos: &Histogram<u64>) -> Vec<(f64, f64)> {
    if nanos.is_empty() {
        return Vec::new();
    }
    let point = |step: u32| {
        // From 1/(1-p) = 2 to 10,000 in equal ratios.
        let share = f64::from(step) / f64::from(CURVE_POINTS);
        let quantile = 1.0 - 1.0 / (2.0 * 5000_f64.powf(share));
        (quantile * 100.0, micros(nanos.value_at_quantile(quantile)))
    };
    (0..=CURVE_POINTS).map(point).collect()
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{Random, interval};
    use super::*;

    #[test]
    fn log_and_percentile_text_of_the_same_values_agree() {
        let interval = interval("gate", 0, 20.0, &mut Random(7));
        let of_log = Distribution::of("x", &interval.histogram);
        let text = hgrm::text(&interval.histogram);
        let of_text = match Latencies::read(&text).unwrap() {
            Latencies::Text(text) => Distribution::of_hgrm("x", &text),
            Latencies::Log(_) => panic!("it is no log"),
        };
        assert_eq!(of_log.count, of_text.count);
        for (percent, us) in of_log.percentiles_us {
            let other = of_text.at(percent).unwrap();
            assert!(
                (0.999..1.1).contains(&(other / us)),
                "{percent}: {us} {other}"
            );
        }
        assert_eq!(of_log.curve.len(), 161);
        assert!(of_log.curve.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1));
        assert!((of_log.curve[160].0 - 99.99).abs() < 1e-9);
    }

    #[test]
    fn other_files_are_refused_with_a_cure() {
        let error = Latencies::read("hello\nworld\n").unwrap_err().to_string();
        assert!(error.contains("name one of these"), "{error}");
    }
}
