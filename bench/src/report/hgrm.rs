//! The percentile text that HdrHistogram's `outputPercentileDistribution` prints, in
//! microseconds. Its layout is that of the Java class `AbstractHistogram`.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use hdrhistogram::Histogram;

use super::histogram::micros;

/// As in the Java class.
const TICKS_PER_HALF_DISTANCE: u32 = 5;

/// Percentile text, read.
#[derive(Clone, Debug, PartialEq)]
pub struct Hgrm {
    /// In rising order.
    pub rows: Vec<Row>,
    /// Of all values, if it says so.
    pub mean: Option<f64>,
    /// The highest value.
    pub max: f64,
    /// How many values.
    pub count: u64,
}

/// A line of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    /// In the file's unit; gate-bench writes microseconds.
    pub value: f64,
    /// From 0 to 1.
    pub quantile: f64,
    /// Values up to this one.
    pub total: u64,
}

/// Writes the percentile text of nanoseconds.
///
/// # Errors
/// The file cannot be written.
pub fn write(path: &Path, nanos: &Histogram<u64>) -> Result<()> {
    fs::write(path, text(nanos)).with_context(|| format!("write {}", path.display()))
}

/// The percentile text of nanoseconds.
#[must_use]
pub fn text(nanos: &Histogram<u64>) -> String {
    let mut text = format!(
        "{:>12} {:>14} {:>10} {:>14}\n\n",
        "Value", "Percentile", "TotalCount", "1/(1-Percentile)"
    );
    let mut total = 0;
    for step in nanos.iter_quantiles(TICKS_PER_HALF_DISTANCE) {
        total += step.count_since_last_iteration();
        let quantile = step.quantile_iterated_to();
        let value = micros(step.value_iterated_to());
        let _ = write!(text, "{value:>12.3} {quantile:.12} {total:>10}");
        if quantile < 1.0 {
            let _ = write!(text, " {:>14.2}", 1.0 / (1.0 - quantile));
        }
        text.push('\n');
    }
    let (mean, deviation) = (nanos.mean() / 1000.0, nanos.stdev() / 1000.0);
    let max = if nanos.is_empty() { 0 } else { nanos.max() };
    let _ = write!(
        text,
        "#[Mean    = {mean:>12.3}, StdDeviation   = {deviation:>12.3}]\n\
         #[Max     = {:>12.3}, Total count    = {:>12}]\n\
         #[Buckets = {:>12}, SubBuckets     = {:>12}]\n",
        micros(max),
        nanos.len(),
        nanos.buckets(),
        // Twice ten to the power of the digits, as a power of two.
        (2 * 10_u64.pow(u32::from(nanos.sigfig()))).next_power_of_two(),
    );
    text
}

/// Reads percentile text of this or of another program.
///
/// # Errors
/// It is not percentile text, or not a whole one.
pub fn read(text: &str) -> Result<Hgrm> {
    let (mut rows, mut mean, mut end) = (Vec::new(), None, None);
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.starts_with("#[Mean") {
            mean = field(line, "Mean").and_then(|mean| mean.parse().ok());
        } else if line.starts_with("#[Max") {
            end = end_of(line);
        } else if !line.is_empty() && !line.starts_with('#') && !is_head(line) {
            let row = row(line).with_context(|| {
                format!(
                    "line {} is no row of a percentile text: {line:?}",
                    number + 1
                )
            })?;
            rows.push(row);
        }
    }
    let Some((max, count)) = end else {
        bail!("its last lines (`#[Max ..., Total count ...]`) are missing: it is cut off");
    };
    let last = rows
        .last()
        .map_or((0, 1.0), |row| (row.total, row.quantile));
    ensure!(
        last == (count, 1.0),
        "its rows end at {} values, its last lines say {count}: a part is missing",
        last.0
    );
    ensure!(
        rows.is_sorted_by(|a, b| a.value <= b.value && a.total <= b.total),
        "its rows do not rise"
    );
    Ok(Hgrm {
        rows,
        mean,
        max,
        count,
    })
}

/// Whether a line is the head of percentile text.
#[must_use]
pub fn is_head(line: &str) -> bool {
    let mut words = line.split_whitespace();
    words.next() == Some("Value") && words.next() == Some("Percentile")
}

impl Hgrm {
    /// The value of a quantile: that of the first row that reaches it, which is the
    /// exact one or, between rows, one a little higher.
    #[must_use]
    pub fn value_at(&self, quantile: f64) -> Option<f64> {
        if quantile >= 1.0 {
            return self.rows.last().map(|row| row.value);
        }
        #[expect(clippy::cast_precision_loss, reason = "a share of a count")]
        let wanted = quantile * self.count as f64;
        #[expect(clippy::cast_precision_loss, reason = "a share of a count")]
        let reached = |row: &&Row| row.total as f64 >= wanted;
        self.rows.iter().find(reached).map(|row| row.value)
    }
}

fn row(line: &str) -> Option<Row> {
    let mut words = line.split_whitespace();
    let value: f64 = words.next()?.parse().ok()?;
    let quantile: f64 = words.next()?.parse().ok()?;
    let total = words.next()?.parse().ok()?;
    let valid = value.is_finite() && value >= 0.0 && (0.0..=1.0).contains(&quantile);
    valid.then_some(Row {
        value,
        quantile,
        total,
    })
}

fn end_of(line: &str) -> Option<(f64, u64)> {
    let max = field(line, "Max")?.parse().ok()?;
    // The Python port writes the name as one word, and decimals.
    let count = field(line, "Total count").or_else(|| field(line, "TotalCount"))?;
    let whole = count.split_once('.').map_or(count, |(whole, _)| whole);
    Some((max, whole.parse().ok()?))
}

/// The value of `name = value` in a line such as `#[Max = 1.000, Total count = 2]`.
fn field<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let inside = line.strip_prefix("#[")?.strip_suffix(']')?;
    let pairs = inside.split(',').filter_map(|pair| pair.split_once('='));
    let mut named = pairs.filter(|(key, _)| key.trim() == name);
    named.next().map(|(_, value)| value.trim())
}

#[cfg(test)]
mod tests {
    use super::super::histogram::latencies;
    use super::*;

    fn nanos() -> Histogram<u64> {
        let mut nanos = latencies();
        for value in 1..=20_000 {
            nanos.record(value * 1000).unwrap();
        }
        nanos
    }

    #[test]
    fn the_layout_is_that_of_the_java_tools() {
        let text = text(&nanos());
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "       Value     Percentile TotalCount 1/(1-Percentile)"
        );
        assert_eq!(lines[1], "");
        assert_eq!(
            lines[2],
            "       1.000 0.000000000000          1           1.00"
        );
        let half = lines
            .iter()
            .find(|line| line.contains(" 0.5000000"))
            .unwrap();
        assert!(half.ends_with("           2.00"), "{half}");
        let last = lines.iter().rfind(|line| !line.starts_with('#')).unwrap();
        assert!(last.ends_with(" 1.000000000000      20000"), "{last}");
        let end = &lines[lines.len() - 3..];
        assert!(end[0].starts_with("#[Mean    =    10000."), "{}", end[0]);
        assert!(
            end[1].ends_with(", Total count    =        20000]"),
            "{}",
            end[1]
        );
        assert!(
            end[2].ends_with(", SubBuckets     =         2048]"),
            "{}",
            end[2]
        );
    }

    #[test]
    fn what_is_written_is_read() {
        let nanos = nanos();
        let read = read(&text(&nanos)).unwrap();
        assert_eq!(read.count, 20_000);
        assert!((read.mean.unwrap() - 10_000.0).abs() < 10.0);
        for quantile in [0.5, 0.75, 0.9, 0.99, 0.999, 0.9999, 1.0] {
            let exact = micros(nanos.value_at_quantile(quantile));
            let value = read.value_at(quantile).unwrap();
            assert!(value >= exact * 0.999, "{quantile}: {value}, {exact}");
            assert!(value <= exact * 1.02, "{quantile}: {value}, {exact}");
        }
        assert_eq!(read.value_at(1.0), Some(read.max));
    }

    #[test]
    fn no_values_are_read_too() {
        let read = read(&text(&latencies())).unwrap();
        assert_eq!((read.count, read.value_at(0.5)), (0, None));
    }

    #[test]
    fn the_footer_of_the_python_port_is_read() {
        let theirs =
            text(&nanos()).replace("Total count    =        20000", "TotalCount = 20000.000");
        assert_eq!(read(&theirs).unwrap().count, 20_000);
    }

    #[test]
    fn a_cut_text_is_an_error() {
        let text = text(&nanos());
        let error = read(&text[..text.len() / 2]).unwrap_err().to_string();
        assert!(
            error.contains("cut off") || error.contains("no row"),
            "{error}"
        );
        let whole_lines = text[..text.len() / 2].rfind('\n').unwrap();
        let error = read(&text[..whole_lines]).unwrap_err().to_string();
        assert!(error.contains("cut off"), "{error}");
        let row = text.lines().rfind(|line| !line.starts_with('#')).unwrap();
        let error = read(&text.replacen(row, "", 1)).unwrap_err().to_string();
        assert!(error.contains("a part is missing"), "{error}");
    }
}
