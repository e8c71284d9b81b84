//! Latencies as HdrHistograms, in nanoseconds, and the files that other tools read:
//! HdrHistogram V2 logs, one interval per run. [`super::hgrm`] has the other format.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hdrhistogram::Histogram;
use hdrhistogram::serialization::interval_log::{
    IntervalLogIterator, IntervalLogWriterBuilder, LogEntry, LogIteratorError, Tag,
};
use hdrhistogram::serialization::{Deserializer, V2DeflateSerializer};

use super::hgrm;
use super::model::Latency;

/// The percentiles of every table; 100 is the highest value.
pub const PERCENTILES: [f64; 7] = [50.0, 75.0, 90.0, 99.0, 99.9, 99.99, 100.0];

/// A percentile with fewer values beyond it is chance more than measurement.
pub const VALUES_BEYOND: f64 = 10.0;

/// The longest latency that is told from longer ones, in nanoseconds.
const HIGHEST_NS: u64 = 60_000_000_000;

/// Names the number of intervals, so that a log cut between two lines is known.
const INTERVALS: &str = "[Intervals: ";

/// An empty histogram of latencies in nanoseconds: 1 ns to 60 s, 3 significant digits.
#[must_use]
pub fn latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1, HIGHEST_NS, 3).expect("the bounds are valid")
}

/// The latencies of one run.
#[derive(Clone, Debug)]
pub struct Interval {
    /// `peer/run`; no comma, space or line break.
    pub tag: String,
    /// When its first request was due.
    pub start: SystemTime,
    /// How long it was measured.
    pub duration: Duration,
    /// Nanoseconds.
    pub histogram: Histogram<u64>,
}

/// An HdrHistogram log.
#[derive(Clone, Debug)]
pub struct Log {
    /// In the file's order.
    pub intervals: Vec<Interval>,
}

impl Log {
    /// All intervals as one histogram.
    #[must_use]
    pub fn merged(&self) -> Histogram<u64> {
        merge(self.intervals.iter())
    }

    /// One histogram per tag, in the order of their names.
    #[must_use]
    pub fn by_tag(&self) -> BTreeMap<String, Histogram<u64>> {
        self.grouped(|tag| tag)
    }

    /// One histogram per peer, which is a tag up to its last `/`.
    #[must_use]
    pub fn by_peer(&self) -> BTreeMap<String, Histogram<u64>> {
        self.grouped(peer_of)
    }

    fn grouped(&self, key: impl Fn(&str) -> &str) -> BTreeMap<String, Histogram<u64>> {
        let mut groups: BTreeMap<String, Vec<&Interval>> = BTreeMap::new();
        for interval in &self.intervals {
            let key = key(&interval.tag).to_owned();
            groups.entry(key).or_default().push(interval);
        }
        let merged = |group: Vec<&Interval>| merge(group.into_iter());
        groups
            .into_iter()
            .map(|(key, group)| (key, merged(group)))
            .collect()
    }
}

/// The percentiles of [`PERCENTILES`] with their microseconds; none of no values.
#[must_use]
pub fn percentiles_us(histogram: &Histogram<u64>) -> Vec<(f64, f64)> {
    if histogram.is_empty() {
        return Vec::new();
    }
    let value = |percent: f64| histogram.value_at_quantile(quantile(percent));
    PERCENTILES
        .iter()
        .map(|&percent| (percent, micros(value(percent))))
        .collect()
}

/// Whether enough of so many values are beyond a percentile; the highest value is
/// what it is.
#[must_use]
pub fn supported(percent: f64, count: u64) -> bool {
    percent >= 100.0 || beyond(percent, count) >= VALUES_BEYOND
}

/// Writes the latencies of one way to the server under one load: `<name>.hlog` and,
/// of all runs together, `<name>.hgrm`.
///
/// # Errors
/// A file cannot be written, or a tag has a space or a comma.
pub fn keep(folder: &Path, name: &str, of: &str, intervals: &[Interval]) -> Result<Latency> {
    let file = format!("{name}.hlog");
    write_log(&folder.join(&file), of, intervals)?;
    let merged = merge(intervals.iter());
    hgrm::write(&folder.join(format!("{name}.hgrm")), &merged)?;
    Ok(Latency {
        of: of.to_owned(),
        percentiles_us: percentiles_us(&merged),
        count: merged.len(),
        histogram: file,
    })
}

/// Writes a log in HdrHistogram's version 2, compressed as the Java tools want it.
///
/// # Errors
/// The file cannot be written, or a tag has a space or a comma.
pub fn write_log(path: &Path, of: &str, intervals: &[Interval]) -> Result<()> {
    let bytes = log_bytes(of, intervals).with_context(|| path.display().to_string())?;
    fs::write(path, bytes).with_context(|| format!("write {}", path.display()))
}

fn log_bytes(of: &str, intervals: &[Interval]) -> Result<Vec<u8>> {
    let start = intervals.iter().map(|interval| interval.start).min();
    let start = start.unwrap_or(UNIX_EPOCH);
    let mut bytes = Vec::new();
    let mut serializer = V2DeflateSerializer::new();
    let mut log = IntervalLogWriterBuilder::new()
        .add_comment(concat!(
            "[Logger: gate-bench ",
            env!("CARGO_PKG_VERSION"),
            "]"
        ))
        .add_comment("[Histogram log format version 1.3]")
        .add_comment(&format!("[Values: nanoseconds, {of}]"))
        .add_comment(&format!("{INTERVALS}{}]", intervals.len()))
        .with_start_time(start)
        .with_max_value_divisor(1000.0)
        .begin_log_with(&mut bytes, &mut serializer)?;
    for interval in intervals {
        let tag = Tag::new(&interval.tag)
            .with_context(|| format!("tag {:?} has a space or a comma", interval.tag))?;
        let since = interval.start.duration_since(start).unwrap_or_default();
        log.write_histogram(&interval.histogram, since, interval.duration, Some(tag))?;
    }
    Ok(bytes)
}

/// Reads a log, of gate-bench or of another program.
///
/// # Errors
/// It is not a log, or not a whole one.
pub fn read_log(text: &str) -> Result<Log> {
    let mut log = Log {
        intervals: Vec::new(),
    };
    let (mut base, mut start) = (None, None);
    for entry in IntervalLogIterator::new(text.as_bytes()) {
        match entry {
            Ok(LogEntry::StartTime(time)) => start = Some(time),
            Ok(LogEntry::BaseTime(time)) => base = Some(time),
            Ok(LogEntry::Interval(interval)) => {
                let number = log.intervals.len() + 1;
                let histogram = decode(interval.encoded_histogram())
                    .with_context(|| format!("interval {number} is damaged or cut off"))?;
                let since = interval.start_timestamp();
                log.intervals.push(Interval {
                    tag: interval.tag().map_or("all", |tag| tag.as_str()).to_owned(),
                    start: UNIX_EPOCH + absolute(since, base, start),
                    duration: interval.duration(),
                    histogram,
                });
            }
            Err(LogIteratorError::ParseError { offset }) => {
                let line = 1 + text.as_bytes()[..offset]
                    .iter()
                    .filter(|byte| **byte == b'\n')
                    .count();
                bail!("line {line} is no interval of a log, or is cut off");
            }
        }
    }
    ensure!(!log.intervals.is_empty(), "it has no interval");
    let (promised, found) = (promised(text), log.intervals.len());
    ensure!(
        promised <= found,
        "it promises {promised} intervals and has {found}: it is cut off"
    );
    Ok(log)
}

/// Merges any histograms, whatever their bounds.
pub fn merge<'a>(intervals: impl Iterator<Item = &'a Interval>) -> Histogram<u64> {
    let mut merged = latencies();
    merged.auto(true);
    for interval in intervals {
        // Fails only where values do not fit, and an auto-resizing one grows.
        let _ = merged.add(&interval.histogram);
    }
    merged
}

/// The peer of a tag `peer/run`.
#[must_use]
pub fn peer_of(tag: &str) -> &str {
    tag.rsplit_once('/').map_or(tag, |(peer, _)| peer)
}

/// A percentile as a quantile, without the error of a division by 100 that would make
/// 99.9 % of 10,000 values 9,991.
#[must_use]
pub fn quantile(percent: f64) -> f64 {
    (percent * 1e6).round() / 1e8
}

/// Nanoseconds as microseconds.
#[expect(clippy::cast_precision_loss, reason = "three digits are all there are")]
#[must_use]
pub fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1000.0
}

#[expect(clippy::cast_precision_loss, reason = "compared with ten")]
fn beyond(percent: f64, count: u64) -> f64 {
    // Half a value makes up for the rounding of the multiplication.
    (count as f64).mul_add(1.0 - quantile(percent), 0.5).floor()
}

fn decode(encoded: &str) -> Result<Histogram<u64>> {
    let bytes = STANDARD.decode(encoded)?;
    Ok(Deserializer::new().deserialize(&mut bytes.as_slice())?)
}

/// The Java tools take times that are a year or more below the start as offsets from it.
fn absolute(since: Duration, base: Option<Duration>, start: Option<Duration>) -> Duration {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    match (base, start) {
        (Some(base), _) => base.saturating_add(since),
        (None, Some(start)) if since.saturating_add(YEAR) < start => start + since,
        _ => since,
    }
}

/// Of all logs that were put together in this one.
fn promised(text: &str) -> usize {
    let comments = text.lines().filter_map(|line| line.strip_prefix('#'));
    let counts = comments.filter_map(|line| line.strip_prefix(INTERVALS)?.strip_suffix(']'));
    counts.filter_map(|count| count.parse::<usize>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(tag: &str, values: &[u64]) -> Interval {
        let mut histogram = latencies();
        for &value in values {
            histogram.record(value).unwrap();
        }
        Interval {
            tag: tag.to_owned(),
            start: UNIX_EPOCH + Duration::from_secs(1_800_000_000),
            duration: Duration::from_secs(10),
            histogram,
        }
    }

    fn log_text() -> String {
        let mut second = interval("gate/1", &[3_000, 50_000_000]);
        second.start += Duration::from_millis(30_250);
        let other = interval("haproxy/0", &[7_000]);
        let intervals = [interval("gate/0", &[1_000, 2_000]), second, other];
        String::from_utf8(log_bytes("a test", &intervals).unwrap()).unwrap()
    }

    #[test]
    fn a_log_is_read_as_it_was_written_and_merges() {
        let text = log_text();
        assert!(text.starts_with("#[Logger: gate-bench "), "{text}");
        assert!(text.contains("#[StartTime: 1800000000.000 "), "{text}");
        assert!(text.contains("Tag=gate/1,30.250,10.000,"), "{text}");
        assert!(text.contains(",HISTFAAA"), "the Java tools' form: {text}");
        let log = read_log(&text).unwrap();
        assert_eq!(log.intervals.len(), 3);
        let start = log.intervals[1].start.duration_since(UNIX_EPOCH).unwrap();
        assert_eq!(start, Duration::from_millis(1_800_000_030_250));
        assert_eq!(log.merged().len(), 5);
        assert_eq!(log.by_tag()["gate/0"].len(), 2);
        let gate = &log.by_peer()["gate"];
        assert_eq!(gate.len(), 4);
        assert!(gate.equivalent(gate.max(), 50_000_000));
        assert_eq!(log.by_peer().len(), 2);
    }

    #[test]
    fn a_cut_log_is_an_error() {
        let text = log_text();
        let in_a_line = &text[..text.len() - 20];
        let error = read_log(in_a_line).unwrap_err().to_string();
        assert!(error.contains("cut off"), "{error}");
        let between_lines = &text[..=text.trim_end().rfind('\n').unwrap()];
        let error = read_log(between_lines).unwrap_err().to_string();
        assert!(error.contains("promises 3 intervals and has 2"), "{error}");
        let with_line_end = format!("{in_a_line}\n");
        let error = read_log(&with_line_end).unwrap_err().to_string();
        assert!(error.contains("interval 3 is damaged"), "{error}");
        assert!(read_log("#[StartTime: 1.0 (seconds since epoch)]\n").is_err());
    }

    #[test]
    fn logs_may_be_put_together() {
        let text = log_text();
        let both = read_log(&format!("{text}{text}")).unwrap();
        assert_eq!(both.intervals.len(), 6);
        assert_eq!(both.by_tag()["gate/0"].len(), 4);
    }

    #[test]
    fn percentiles_are_those_of_the_values() {
        let mut histogram = latencies();
        for value in 1..=10_000 {
            histogram.record(value * 100).unwrap();
        }
        let found = percentiles_us(&histogram);
        assert_eq!(found.len(), PERCENTILES.len());
        for (percent, us) in found {
            let exact = percent * 10.0;
            assert!((us / exact - 1.0).abs() < 0.001, "{percent}: {us}");
        }
        assert_eq!(quantile(99.9), 0.999);
        assert!(percentiles_us(&latencies()).is_empty());
    }

    #[test]
    fn a_percentile_needs_ten_values_beyond_it() {
        assert!(supported(99.9, 10_000));
        assert!(!supported(99.9, 9_400));
        assert!(supported(50.0, 20));
        assert!(!supported(50.0, 18));
        assert!(supported(99.99, 100_000));
        assert!(supported(100.0, 1));
    }

    #[test]
    fn a_tag_with_a_space_is_refused() {
        let error = log_bytes("a test", &[interval("my gate/0", &[1])]).unwrap_err();
        assert!(error.to_string().contains("my gate/0"), "{error}");
    }
}
