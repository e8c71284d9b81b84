//! Where workers run, and the queues in front of them.
#![forbid(unsafe_code)]

use std::fmt;

use super::Gate;
use super::series::{Series, gauge_value, labels};

impl Gate {
    /// Which worker serves which queue.
    pub(super) fn placement(&self, out: &mut Series<'_, '_>) -> fmt::Result {
        let workers = self.state.stats.iter().enumerate();
        let pinned = workers.filter_map(|(worker, stats)| {
            let label = labels([("worker", worker.to_string())]);
            Some((label, gauge_value(stats.cpu()? as u64)))
        });
        out.gauges("gate_worker_cpu", "CPU that a worker is pinned to", pinned)?;
        let places = self.state.places.iter().enumerate();
        let queues = places.flat_map(|(worker, place)| {
            place.queues.iter().map(move |queue| {
                let irq = queue.irq.map_or(String::new(), |irq| irq.to_string());
                let labels = labels([
                    ("worker", worker.to_string()),
                    ("queue", queue.queue.to_string()),
                    ("irq", irq),
                ]);
                (labels, gauge_value(queue.cpu as u64))
            })
        });
        out.gauges(
            "gate_worker_queue_cpu",
            "CPU that handles a receive queue of the device that workers are pinned to",
            queues,
        )
    }

    /// What waits to be accepted.
    pub(super) fn accept_queues(&self, out: &mut Series<'_, '_>) -> fmt::Result {
        let listeners = self.state.listeners.iter().enumerate();
        let (mut lengths, mut limits) = (Vec::new(), Vec::new());
        for (index, info) in listeners {
            if let Some(queue) = self.state.accept_queue(index) {
                let label = labels([("listener", info.address.to_string())]);
                lengths.push((label.clone(), gauge_value(queue.length)));
                limits.push((label, gauge_value(queue.limit)));
            }
        }
        out.gauges(
            "gate_accept_queue_length",
            "Connections that the kernel completed and no worker has accepted yet",
            lengths,
        )?;
        out.gauges(
            "gate_accept_queue_limit",
            "Length of the accept queue at which the kernel drops new connections",
            limits,
        )
    }
}
