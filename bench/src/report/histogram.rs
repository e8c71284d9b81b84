//! Latencies.
use anyhow::Result;
use hdrhistogram::Histogram;
/// An empty one, nanoseconds.
///
/// # Errors
/// Never.
pub fn latencies() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, 60_000_000_000, 3)?)
}
