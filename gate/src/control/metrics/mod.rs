//! `/metrics`: OpenMetrics text of the ledger's words and the workers' counts.
//!
//! Nothing is kept here. At each scrape the gauges are read from the very
//! words that decisions read, and the counters are summed over the workers.
//! Users and databases have series of their own only if they have a limit of
//! their own; strangers with random names all fall under `other`.
#![forbid(unsafe_code)]

mod places;
mod series;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use gate_common::abi::{ListenerState, slot};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::registry::{Registry, Unit};

use super::limited::{Limited, Scope};
use crate::backends::AddressReport;
use crate::config::name;
use crate::host;
use crate::ledger::{LimitKey, LimitRow};
use crate::session::outcome::{
    CancelOutcome, CloseReason, ConnectFailure, Reason, StartupFailure, WaitOutcome,
};
use crate::state::{KernelState, State};
use crate::stats::{ACCEPT_ERRORS, Direction, Latency, Stats};
use series::{Labels, OTHER, Series, gauge_value, labels, limit_value};

/// Content type of the text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The text of one scrape, `# EOF` included.
///
/// # Errors
/// Never: writing to a string does not fail.
pub fn scrape(state: &Arc<State>, limited: &Arc<Limited>) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Gate {
        state: Arc::clone(state),
        limited: Arc::clone(limited),
    }));
    let mut out = String::with_capacity(16 * 1024);
    text::encode(&mut out, &registry)?;
    Ok(out)
}

struct Gate {
    state: Arc<State>,
    limited: Arc<Limited>,
}

impl fmt::Debug for Gate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Gate")
    }
}

impl Collector for Gate {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Series {
            encoder: &mut encoder,
        };
        self.connections(&mut out)?;
        self.names(&mut out)?;
        self.kernel(&mut out)?;
        self.ends(&mut out)?;
        self.backends(&mut out)?;
        self.durations(&mut out)?;
        self.workers(&mut out)?;
        self.placement(&mut out)?;
        self.accept_queues(&mut out)?;
        self.process(&mut out)
    }
}

impl Gate {
    fn connections(&self, out: &mut Series<'_, '_>) -> fmt::Result {
        let (state, ledger) = (&self.state, &self.state.ledger);
        out.gauges(
            "gate_connections_active",
            "Admitted sessions",
            self.by_listener(|words| &words.admitted),
        )?;
        out.gauges(
            "gate_connections_pending",
            "Accepted connections without a valid startup packet",
            self.by_listener(|words| &words.pending),
        )?;
        out.gauge(
            "gate_connections_waiting",
            "Clients that wait for a place under a limit",
            i64::from(state.waiting.len()),
        )?;
        out.counters(
            "gate_waited",
            "Clients that have waited for a place",
            WaitOutcome::ALL.iter().map(|outcome| {
                let count = self.sum(|stats| stats.waited_count(*outcome));
                (labels([("outcome", outcome.label().to_owned())]), count)
            }),
        )?;
        out.gauge(
            "gate_connection_limit",
            "Admitted sessions allowed; 0 is unlimited, -1 nobody",
            limit_value(ledger.plain_limit(slot::TOTAL)),
        )?;
        out.gauge(
            "gate_pending_limit",
            "Pending connections allowed; 0 is unlimited",
            limit_value(ledger.max_pending()),
        )?;
        let rejected = state
            .listeners
            .iter()
            .enumerate()
            .flat_map(|(index, listener)| {
                Reason::ALL.iter().map(move |reason| {
                    let labels = labels([
                        ("listener", listener.address.to_string()),
                        ("reason", reason.label().to_owned()),
                    ]);
                    (
                        labels,
                        self.sum(|stats| stats.rejected_count(index, *reason)),
                    )
                })
            });
        out.counters("gate_connections_rejected", "Clients refused", rejected)?;
        let scope = |scope: Scope| labels([("scope", scope.label().to_owned())]);
        out.gauges(
            "gate_limited",
            "Whether a kind of limit is reached",
            Scope::ALL.map(|each| (scope(each), i64::from(self.limited.is_limited(each)))),
        )?;
        out.counters_with_unit(
            "gate_limited",
            "Time for which a kind of limit was reached",
            Unit::Seconds,
            Scope::ALL.map(|each| (scope(each), self.limited.limited_for(each).as_secs_f64())),
        )
    }

    fn names(&self, out: &mut Series<'_, '_>) -> fmt::Result {
        // If the table cannot be read its series are missing, not wrong.
        let Ok(rows) = self.state.ledger.limits() else {
            return Ok(());
        };
        let user = |row: &LimitRow| match &row.key {
            LimitKey::User(user) => Some(user.clone()),
            _ => None,
        };
        let database = |row: &LimitRow| match &row.key {
            LimitKey::Database(database) => Some(database.clone()),
            _ => None,
        };
        let (default_user, default_database) = (
            self.state.ledger.plain_limit(slot::DEFAULT_USER),
            self.state.ledger.plain_limit(slot::DEFAULT_DATABASE),
        );
        out.named("user", &rows, user, default_user)?;
        out.named("database", &rows, database, default_database)?;
        let backends = || {
            rows.iter().filter_map(|row| match &row.key {
                LimitKey::Backend(backend) => {
                    Some((labels([("backend", name::escape(backend))]), row))
                }
                _ => None,
            })
        };
        out.gauges(
            "gate_backend_connections_active",
            "Sessions of a backend",
            backends().map(|(labels, row)| (labels, gauge_value(row.used))),
        )?;
        out.gauges(
            "gate_backend_connection_limit",
            "Sessions allowed to a backend; 0 is unlimited, -1 nobody",
            backends().map(|(labels, row)| (labels, limit_value(row.limit))),
        )
    }

    fn kernel(&self, out: &mut Series<'_, '_>) -> fmt::Result {
        let (state, ledger) = (&self.state, &self.state.ledger);
        let active = state.kernel == KernelState::Active;
        out.gauge(
            "gate_kernel_active",
            "Whether the kernel plane counts and enforces",
            i64::from(active),
        )?;
        if active {
            let listener =
                |address: std::net::SocketAddr| labels([("listener", address.to_string())]);
            out.gauges(
                "gate_kernel_sockets",
                "Sockets that hold a token of the listener's ceiling",
                state.listeners.iter().map(|info| {
                    (
                        listener(info.address),
                        gauge_value(ledger.sockets(info.index)),
                    )
                }),
            )?;
            out.gauges(
                "gate_kernel_ceiling",
                "Sockets allowed to the listener; 0 is unlimited, -1 nobody",
                state.listeners.iter().map(|info| {
                    (
                        listener(info.address),
                        limit_value(ledger.ceiling(info.index)),
                    )
                }),
            )?;
            out.gauges(
                "gate_kernel_over",
                "Sockets over the listener's ceiling",
                self.by_listener(|words| &words.over),
            )?;
            let refused = state.listeners.iter().flat_map(|info| {
                let words = ledger.state(info.index);
                let verdicts = [("over", &words.over_total), ("reset", &words.reset_total)];
                verdicts.map(|(verdict, count)| {
                    let labels = labels([
                        ("listener", info.address.to_string()),
                        ("verdict", verdict.to_owned()),
                    ]);
                    (labels, count.load(Ordering::SeqCst))
                })
            });
            out.counters(
                "gate_kernel_refused",
                "Sockets refused by the kernel",
                refused,
            )?;
            out.counters(
                "gate_kernel_unrecorded",
                "Sockets for whose record the kernel had no memory, treated as over",
                self.by_listener(|words| &words.unrecorded_total)
                    .map(|(labels, count)| (labels, count.cast_unsigned())),
            )?;
        }
        out.counters(
            "gate_ledger_errors",
            "Impossible counts seen; must stay 0",
            [(
                labels([("kind", "impossible_count".to_owned())]),
                ledger.errors(),
            )],
        )
    }

    fn ends(&self, out: &mut Series<'_, '_>) -> fmt::Result {
        out.counters(
            "gate_startup_failures",
            "Connections that ended before a valid startup packet",
            StartupFailure::ALL.iter().map(|failure| {
                let count = self.sum(|stats| stats.startup_failed_count(*failure));
                (labels([("reason", failure.label().to_owned())]), count)
            }),
        )?;
        out.counters(
            "gate_sessions_closed",
            "Admitted sessions that ended",
            CloseReason::ALL.iter().map(|reason| {
                let labels = labels([
                    ("reason", reason.label().to_owned()),
                    ("fault", reason.fault().label().to_owned()),
                ]);
                (labels, self.sum(|stats| stats.closed_count(*reason)))
            }),
        )?;
        out.counters_with_unit(
            "gate_relayed",
            "Bytes passed on",
            Unit::Bytes,
            Direction::ALL.map(|direction| {
                let bytes = self.sum(|stats| stats.relayed_bytes(direction));
                (labels([("direction", direction.label().to_owned())]), bytes)
            }),
        )?;
        out.counters(
            "gate_cancel_requests",
            "CancelRequests done with",
            CancelOutcome::ALL.iter().map(|outcome| {
                let count = self.sum(|stats| stats.cancelled_count(*outcome));
                (labels([("outcome", outcome.label().to_owned())]), count)
            }),
        )?;
        let errors = ACCEPT_ERRORS.iter().map(|(_, errno)| *errno).chain([OTHER]);
        out.counters(
            "gate_accept_errors",
            "Failures of accept",
            errors.enumerate().map(|(index, errno)| {
                let count = self.sum(|stats| stats.accept_failed_count(index));
                (labels([("errno", errno.to_owned())]), count)
            }),
        )
    }

    fn backends(&self, out: &mut Series<'_, '_>) -> fmt::Result {
        let config = self.state.config();
        let failures = config
            .backends
            .iter()
            .enumerate()
            .flat_map(|(index, backend)| {
                ConnectFailure::ALL.iter().map(move |failure| {
                    let labels = labels([
                        ("backend", backend.name.clone()),
                        ("reason", failure.label().to_owned()),
                    ]);
                    (
                        labels,
                        self.sum(|stats| stats.connect_failed_count(index, *failure)),
                    )
                })
            });
        out.counters(
            "gate_backend_connect_failures",
            "Backends that could not be reached",
            failures,
        )?;
        let now = Instant::now();
        let addresses = || {
            let backends = config.backends.iter().enumerate();
            backends.flat_map(move |(place, backend)| {
                let of = move |report: AddressReport<'_>| {
                    labels([
                        ("backend", backend.name.clone()),
                        ("address", report.address.to_string()),
                    ])
                };
                let reports = self.state.backends.report(place, now);
                reports.map(move |report| (of(report), report))
            })
        };
        out.gauges(
            "gate_backend_up",
            "Whether an address of a backend is taken for up",
            addresses().map(|(labels, report)| (labels, i64::from(report.up))),
        )?;
        out.counters(
            "gate_backend_address_connects",
            "Dials of an address that were connected",
            addresses().map(|(labels, report)| (labels, report.connected)),
        )?;
        out.counters(
            "gate_backend_address_failures",
            "Dials of an address that were not",
            addresses().map(|(labels, report)| (labels, report.failed)),
        )
    }

    fn durations(&self, out: &mut Series<'_, '_>) -> fmt::Result {
        for latency in Latency::ALL {
            let (name, help) = match latency {
                Latency::Admission => (
                    "gate_admission_duration",
                    "From a complete startup packet to the decision",
                ),
                Latency::BackendConnect => (
                    "gate_backend_connect_duration",
                    "From the dial to the backend's accept",
                ),
                Latency::Ready => (
                    "gate_ready_duration",
                    "From accept to the backend's ReadyForQuery",
                ),
                Latency::Round => (
                    "gate_loop_duration",
                    "One round of a worker's loop, from its wake-up to its next wait",
                ),
            };
            out.histogram(name, help, &self.state.latency(latency, None))?;
        }
        Ok(())
    }

    fn workers(&self, out: &mut Series<'_, '_>) -> fmt::Result {
        let by_worker = |count: fn(&Stats) -> u64| {
            let workers = self.state.stats.iter().enumerate();
            workers.map(move |(worker, stats)| {
                (labels([("worker", worker.to_string())]), count(stats))
            })
        };
        out.counters(
            "gate_worker_connections_accepted",
            "Connections that a worker accepted, refused ones included",
            by_worker(Stats::accepted_count),
        )?;
        out.gauges(
            "gate_worker_connections",
            "Connections that a worker holds, pending and refused ones included",
            by_worker(Stats::connections).map(|(labels, count)| (labels, gauge_value(count))),
        )
    }

    fn process(&self, out: &mut Series<'_, '_>) -> fmt::Result {
        // Without a free descriptor they cannot be counted: no series then.
        if let Ok(open) = host::count_open_fds() {
            out.gauge("gate_open_fds", "Open file descriptors", gauge_value(open))?;
        }
        if self.state.fds_max != u64::MAX {
            out.gauge(
                "gate_max_fds",
                "File descriptors that gate may open",
                gauge_value(self.state.fds_max),
            )?;
        }
        Ok(())
    }

    fn by_listener(
        &self,
        word: impl Fn(&ListenerState<AtomicU64>) -> &AtomicU64,
    ) -> impl Iterator<Item = (Labels, i64)> {
        self.state.listeners.iter().map(move |info| {
            let count = word(self.state.ledger.state(info.index)).load(Ordering::SeqCst);
            (
                labels([("listener", info.address.to_string())]),
                gauge_value(count),
            )
        })
    }

    fn sum(&self, count: impl Fn(&Stats) -> u64) -> u64 {
        self.state.stats.iter().map(|stats| count(stats)).sum()
    }
}
