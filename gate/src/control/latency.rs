//! How long things took, as HdrHistogram has it.
#![forbid(unsafe_code)]

use super::api::{Latencies, LatencyEntry, LatencyQuery};
use crate::state::State;
use crate::stats::{Latency, histogram};

/// Why latencies cannot be read as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LatencyError {
    /// No such worker.
    #[error("there is no worker {worker}: they are 0 to {last}")]
    Worker {
        /// The one asked for.
        worker: usize,
        /// The last there is.
        last: usize,
    },
    /// Never.
    #[error("no histogram can be made: {0}")]
    Histogram(#[from] hdrhistogram::CreationError),
}

/// Reads all, of one worker or over all of them.
///
/// # Errors
/// See [`LatencyError`].
pub fn read(state: &State, query: &LatencyQuery) -> Result<Latencies, LatencyError> {
    let workers = state.stats.len();
    if let Some(worker) = query.worker.filter(|worker| *worker >= workers) {
        let last = workers.saturating_sub(1);
        return Err(LatencyError::Worker { worker, last });
    }
    let entry = |latency: Latency| -> Result<LatencyEntry, LatencyError> {
        let all = state.latency(latency, query.worker);
        let values = histogram(all.cells())?;
        // An empty one answers 0 to everything.
        let quantile = |quantile| values.value_at_quantile(quantile);
        Ok(LatencyEntry {
            name: latency.label().to_owned(),
            count: all.count(),
            sum_ns: all.sum_ns(),
            p50_ns: quantile(0.5),
            p90_ns: quantile(0.9),
            p99_ns: quantile(0.99),
            p999_ns: quantile(0.999),
            max_ns: values.max(),
            cells: query.cells.then(|| all.cells().collect()),
        })
    };
    let latencies: Result<Vec<_>, _> = Latency::ALL.into_iter().map(entry).collect();
    Ok(Latencies {
        worker: query.worker,
        latencies: latencies?,
    })
}
