//! Durations, counted as HdrHistogram counts them.
//!
//! The cells are those of an HdrHistogram of two significant digits from 8 ns to
//! 60 s. One thread counts without a lock or an allocation; others read the
//! cells as they are at any time, and fill a [`hdrhistogram::Histogram`] only then.

use std::time::Duration;

use hdrhistogram::{CreationError, Histogram};

use super::Counter;

/// 8 ns is the least difference that is told apart: 1 us is a multiple of it, and
/// so is each bound of [`Distribution::up_to`] that doubles from there.
const UNIT_BITS: u32 = 3;
/// Cells of the first octave; half as many of each further one. Two digits need
/// 2 * 10^2 of them, rounded up to a power of two.
const FIRST_BITS: u32 = 8;
const HALF: usize = 1 << (FIRST_BITS - 1);
/// Longer durations are counted as this one.
const MAX_NS: u64 = 60_000_000_000;
const CELLS: usize = cell(MAX_NS) + 1;

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Latency {
    /// From a complete startup packet to the ledger's verdict.
    Admission,
    /// From the dial to the backend's accept.
    BackendConnect,
    /// From accept to the backend's ReadyForQuery.
    Ready,
    /// One round of a worker's loop, from its wake-up to its next wait.
    Round,
}

impl Latency {
    /// All, in the order of their index.
    pub const ALL: [Self; 4] = [
        Self::Admission,
        Self::BackendConnect,
        Self::Ready,
        Self::Round,
    ];

    /// The word in `gatectl latency`.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Admission => "admission",
            Self::BackendConnect => "backend_connect",
            Self::Ready => "ready",
            Self::Round => "loop",
        }
    }
}

/// Counts durations; one thread writes.
#[derive(Debug)]
pub(super) struct Recorder {
    sum_ns: Counter,
    cells: Box<[Counter]>,
}

impl Default for Recorder {
    fn default() -> Self {
        Self {
            sum_ns: Counter::default(),
            cells: (0..CELLS).map(|_| Counter::default()).collect(),
        }
    }
}

impl Recorder {
    #[inline]
    pub fn record(&self, duration: Duration) {
        let nanos = duration
            .as_secs()
            .saturating_mul(1_000_000_000)
            .saturating_add(u64::from(duration.subsec_nanos()));
        self.cells[cell(nanos)].add(1);
        self.sum_ns.add(nanos);
    }

    pub fn read(&self) -> Distribution {
        Distribution {
            sum_ns: self.sum_ns.get(),
            cells: self.cells.iter().map(Counter::get).collect(),
        }
    }
}

/// The cell of a duration. The longest duration of a cell is where the next one
/// begins in HdrHistogram: bounds of OpenMetrics include their own value.
#[inline]
const fn cell(nanos: u64) -> usize {
    let nanos = if nanos > MAX_NS { MAX_NS } else { nanos };
    let units = nanos.saturating_sub(1) >> UNIT_BITS;
    let least = (1_u64 << FIRST_BITS) - 1;
    let octave = u64::BITS - FIRST_BITS - (units | least).leading_zeros();
    octave as usize * HALF + (units >> octave) as usize
}

/// The longest duration of a cell.
fn longest_ns(cell: usize) -> u64 {
    let octave = (cell / HALF).saturating_sub(1);
    let within = cell - octave * HALF;
    (within as u64 + 1) << octave << UNIT_BITS
}

/// Durations counted up to one moment, of one worker or of several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Distribution {
    sum_ns: u64,
    cells: Box<[u64]>,
}

impl Default for Distribution {
    fn default() -> Self {
        Self {
            sum_ns: 0,
            cells: vec![0; CELLS].into_boxed_slice(),
        }
    }
}

impl Distribution {
    /// How many durations there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.cells.iter().sum()
    }

    /// Their sum in nanoseconds.
    #[must_use]
    pub const fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// How many are no longer than this: exact if it is a microsecond, doubled any
    /// number of times, else to two digits.
    #[must_use]
    pub fn up_to(&self, nanos: u64) -> u64 {
        self.cells[..=cell(nanos)].iter().sum()
    }

    /// The cells that are not empty: the longest duration of each in
    /// nanoseconds, and how many it has.
    pub fn cells(&self) -> impl Iterator<Item = (u64, u64)> {
        let cells = self.cells.iter().enumerate();
        cells
            .filter(|(_, count)| **count > 0)
            .map(|(cell, count)| (longest_ns(cell), *count))
    }

    /// Adds another worker's.
    pub fn add(&mut self, other: &Self) {
        self.sum_ns = self.sum_ns.wrapping_add(other.sum_ns);
        for (cell, more) in self.cells.iter_mut().zip(&other.cells) {
            *cell += more;
        }
    }
}

/// The HdrHistogram of such cells, in nanoseconds.
///
/// # Errors
/// Never: its bounds are in order, and two digits are few enough.
pub fn histogram(
    cells: impl IntoIterator<Item = (u64, u64)>,
) -> Result<Histogram<u64>, CreationError> {
    let mut all = Histogram::new_with_bounds(1 << UNIT_BITS, MAX_NS, 2)?;
    for (longest, count) in cells {
        all.saturating_record_n(longest.saturating_sub(1), count);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(nanos: impl IntoIterator<Item = u64>) -> Distribution {
        let recorder = Recorder::default();
        for nanos in nanos {
            recorder.record(Duration::from_nanos(nanos));
        }
        recorder.read()
    }

    #[test]
    fn a_bound_counts_what_is_no_longer_than_it() {
        for doublings in 0..24 {
            let bound = 1_000_u64 << doublings;
            let all = counted([1, bound - 1, bound, bound + 1, 2 * bound, 60_000_000_000]);
            assert_eq!(all.up_to(bound), 3, "{bound} ns");
            assert_eq!(all.up_to(2 * bound), 5, "{bound} ns");
            assert_eq!(all.up_to(u64::MAX), all.count(), "{bound} ns");
        }
        let longer = counted([u64::MAX / 4, 61_000_000_000]);
        assert_eq!((longer.count(), longer.up_to(8_388_608_000)), (2, 0));
        assert_eq!(longer.sum_ns(), u64::MAX / 4 + 61_000_000_000);
    }

    #[test]
    fn the_cells_are_those_of_hdrhistogram() {
        let reference = histogram([]).expect("sound");
        let mut lowest = 0;
        for cell in 0..CELLS {
            let longest = longest_ns(cell);
            assert_eq!(super::cell(longest), cell);
            assert_eq!(super::cell(lowest + 1), cell);
            assert_eq!(reference.lowest_equivalent(longest - 1), lowest);
            assert_eq!(reference.highest_equivalent(lowest), longest - 1);
            lowest = longest;
        }
        assert!(lowest >= MAX_NS);
        assert_eq!((cell(0), cell(u64::MAX)), (0, CELLS - 1));
    }

    #[test]
    fn quantiles_are_right_to_two_digits() {
        let mut all = counted((1..=1000).map(|number| number * 1000));
        all.add(&counted((1001..=2000).map(|number| number * 1000)));
        let read = histogram(all.cells()).expect("sound");
        assert_eq!(read.len(), 2000);
        for (quantile, nanos) in [
            (0.5, 1_000_000_f64),
            (0.99, 1_980_000.0),
            (1.0, 2_000_000.0),
        ] {
            let shown = read.value_at_quantile(quantile) as f64;
            assert!((shown / nanos - 1.0).abs() < 0.01, "{quantile}: {shown}");
        }
        assert_eq!(all.sum_ns(), 2_001_000_000);
    }

    #[test]
    fn a_worker_pays_little_memory() {
        assert!(CELLS * size_of::<Counter>() <= 27 * 1024, "{CELLS}");
    }
}
