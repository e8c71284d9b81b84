//! What the control plane says in JSON; `gatectl` reads the same types.
//!
//! A limit is a number, where 0 is unlimited. "Nobody" is `null` beside
//! `"none": true`. Names are in the escaped form of [`crate::config::name`].
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use gate_common::limit::Limit;
use serde::{Deserialize, Serialize};

/// A limit, flattened into the object that has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitField {
    limit: Option<u64>,
    /// Present if nobody is allowed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    none: bool,
}

impl LimitField {
    /// The limit in force.
    #[must_use]
    pub fn get(&self) -> Limit {
        match self.limit {
            None => Limit::None,
            Some(0) => Limit::Unlimited,
            Some(number) => Limit::AtMost(number),
        }
    }
}

impl From<Limit> for LimitField {
    fn from(limit: Limit) -> Self {
        Self {
            limit: limit_number(limit),
            none: limit == Limit::None,
        }
    }
}

/// A limit as a number: 0 is unlimited, `None` is nobody.
#[must_use]
pub const fn limit_number(limit: Limit) -> Option<u64> {
    match limit {
        Limit::Unlimited => Some(0),
        Limit::None => None,
        Limit::AtMost(number) => Some(number),
    }
}

/// `GET /connections`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connections {
    /// Over all listeners.
    pub total: Total,
    /// Users with sessions or with a limit of their own.
    pub by_user: BTreeMap<String, Named>,
    /// Databases with sessions or with a limit of their own.
    pub by_database: BTreeMap<String, Named>,
    /// The backends of the configuration.
    pub by_backend: BTreeMap<String, BackendUse>,
    /// Limits of names without one of their own.
    pub defaults: Defaults,
    /// The kernel plane.
    pub kernel: Kernel,
}

/// Sessions and pending connections over all listeners.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Total {
    /// Admitted sessions.
    pub active: u64,
    /// Connections without a valid startup packet.
    pub pending: u64,
    /// `max_connections`.
    #[serde(flatten)]
    pub limit: LimitField,
}

/// Sessions of one user or database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Named {
    /// Admitted sessions.
    pub active: u64,
    /// The limit in force.
    #[serde(flatten)]
    pub limit: LimitField,
    /// `runtime`, `config` or `default`.
    pub source: String,
}

/// Sessions of one backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendUse {
    /// Admitted sessions.
    pub active: u64,
    /// The limit in force.
    #[serde(flatten)]
    pub limit: LimitField,
}

/// Limits of names without one of their own; 0 is unlimited, `null` nobody.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Defaults {
    /// Of users.
    pub per_user: Option<u64>,
    /// Of databases.
    pub per_database: Option<u64>,
}

/// The kernel plane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// `active`, `inactive` or `off`.
    pub state: String,
    /// Why it is inactive, and the cure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Sockets of each listener.
    pub listeners: Vec<ListenerUse>,
}

/// Sockets of one listener.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListenerUse {
    /// Where it listens.
    pub address: String,
    /// Sockets that hold a token of the ceiling.
    pub sockets: u64,
    /// The ceiling in force; `null` if it is not enforced.
    pub ceiling: Option<u64>,
    /// Present if the ceiling allows nobody.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub none: bool,
    /// Sockets over it.
    pub over: u64,
}

/// `GET /status` on the control socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Name of the instance.
    pub instance: String,
    /// `starting`, `serving`, `draining`, `stopping`; from the pinned maps alone
    /// `down` if no gate runs, `unresponsive` if it does not answer,
    /// `unreachable` if it has another control socket.
    pub state: String,
    /// The process, if one runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<Process>,
    /// Who is connected.
    pub connections: Connections,
    /// `max_pending`.
    pub pending_limit: LimitField,
    /// What is limited now.
    pub limited: Vec<Limited>,
    /// How many limits were set while running.
    pub runtime_limits: usize,
}

/// A running gate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Its process id.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// Seconds since it started.
    pub uptime_seconds: u64,
    /// Worker threads.
    pub workers: usize,
    /// Open file descriptors, if they could be counted.
    pub open_fds: Option<u64>,
    /// File descriptors that it may open.
    pub max_fds: Option<u64>,
    /// Present if the descriptors allow less than the default of
    /// `max_connections`: what they allow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lowered_to: Option<u64>,
    /// Clients that wait for a place under a limit.
    #[serde(default)]
    pub waiting: u32,
    /// Clients that waited since the start, by what became of them; outcomes that
    /// never happened are left out.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub waited: BTreeMap<String, u64>,
    /// Refusals since the start, by reason; those that never happened are
    /// left out.
    pub rejected: BTreeMap<String, u64>,
    /// What each worker has, in their order.
    #[serde(default)]
    pub worker_loads: Vec<WorkerLoad>,
    /// The backends in the order of the configuration, `default` first.
    #[serde(default)]
    pub backends: Vec<BackendHealth>,
    /// How many connections wait to be accepted, by listener.
    #[serde(default)]
    pub accept_queues: Vec<AcceptQueue>,
}

/// Where one backend is, and whether it is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendHealth {
    /// Its name, escaped.
    pub backend: String,
    /// Its addresses in the order of preference.
    pub addresses: Vec<AddressHealth>,
}

/// One address of a backend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressHealth {
    /// `host:port`, or the path of a unix socket.
    pub address: String,
    /// Whether it is taken for up; one that is down is tried last.
    pub up: bool,
    /// For how long: since the start of gate if it never changed.
    pub for_seconds: u64,
    /// Sessions and CancelRequests that were connected.
    pub connected: u64,
    /// Those that could not be.
    pub failed: u64,
}

/// The accept queue of one listener.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceptQueue {
    /// The listener's address.
    pub listener: String,
    /// Connections that the kernel completed and no worker has accepted yet.
    pub length: u64,
    /// At how many the kernel drops new ones, over all workers.
    pub limit: u64,
}

/// What one worker has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerLoad {
    /// Its number, from 0.
    pub worker: usize,
    /// The CPU that it is pinned to; `null` if it is not.
    pub cpu: Option<usize>,
    /// The receive queues that this CPU handles, with `pin = "nic:..."`.
    #[serde(default)]
    pub queue: Vec<u32>,
    /// Their interrupts; a virtual device has none.
    #[serde(default)]
    pub irq: Vec<u32>,
    /// Connections that it accepted since the start, refused ones included.
    pub accepted: u64,
    /// Connections that it holds now.
    pub connections: u64,
}

/// One kind of limit that is reached now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limited {
    /// The kind, see [`super::limited::Scope`].
    pub scope: String,
    /// Who is at the limit, if it is a limit of names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<String>,
}

/// One limit of `GET /limits`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitEntry {
    /// As `gatectl limits set` takes it: `user`, `default-user`, ...
    pub key: String,
    /// Whose, for `user`, `database`, `backend` and a listener's `ceiling`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What is in force.
    #[serde(flatten)]
    pub limit: LimitField,
    /// How much of it is in use, if that means anything.
    pub used: Option<u64>,
    /// `runtime`, `config` or `default`.
    pub source: String,
    /// Present if nobody enforces it: a limit on sockets without the kernel
    /// plane.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub inactive: bool,
}

/// Body of `POST /limits/set` and `POST /limits/unset`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitChange {
    /// As in [`LimitEntry::key`].
    pub key: String,
    /// As in [`LimitEntry::name`].
    #[serde(default)]
    pub name: Option<String>,
    /// A number, `unlimited`, `none` or `auto`; absent to unset.
    #[serde(default)]
    pub value: Option<String>,
}

/// Answer to `POST /reload`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloaded {
    /// Settings that differ and wait for the next start.
    pub waiting: Vec<String>,
}

/// Answer to `POST /drain`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Draining {
    /// Sessions that are to end.
    pub active: u64,
    /// When gate ends them itself.
    pub deadline_seconds: u64,
}

/// Body of `POST /sessions`: which sessions to list. What is absent is not asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SessionQuery {
    /// Of this user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Of this database.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub database: Option<String>,
    /// In this state, see [`crate::session::outcome::SessionState`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state: Option<String>,
    /// From this IP address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// So many, the oldest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limit: Option<usize>,
}

/// Answer to `POST /sessions`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sessions {
    /// The oldest first.
    pub sessions: Vec<Session>,
    /// How many there are, those beyond the limit of the query included.
    pub found: usize,
    /// Workers that did not answer in time: their sessions are missing, or some are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unanswered: Vec<usize>,
}

/// One session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Session {
    /// Its number, of no other session of this gate.
    pub id: u64,
    /// `null` before it has said.
    pub user: Option<String>,
    /// `null` before it has said, and if it has none.
    pub database: Option<String>,
    /// The client's address and port; `null` for a CancelRequest of gate's own.
    pub source: Option<String>,
    /// The backend's name; `null` before it is to have one.
    pub backend: Option<String>,
    /// Where that backend is.
    pub backend_address: Option<String>,
    /// See [`crate::session::outcome::SessionState`].
    pub state: String,
    /// Since accept.
    pub age_seconds: f64,
    /// Since bytes last went either way.
    pub idle_seconds: f64,
    /// Bytes passed on to the backend after the startup packet.
    pub bytes_to_backend: u64,
    /// Bytes passed on to the client.
    pub bytes_to_client: u64,
    /// The worker that has it.
    pub worker: usize,
}

/// Query of `GET /latency`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LatencyQuery {
    /// Of one worker; absent, over all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<usize>,
    /// With the histogram's cells.
    pub cells: bool,
}

/// Answer to `GET /latency`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latencies {
    /// The one worker; `null` over all.
    pub worker: Option<usize>,
    /// One of each kind.
    pub latencies: Vec<LatencyEntry>,
}

/// How long one kind of thing took since the start; right to two digits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatencyEntry {
    /// See [`crate::stats::Latency`].
    pub name: String,
    /// How many there were.
    pub count: u64,
    /// Their sum.
    pub sum_ns: u64,
    /// Half were no longer.
    pub p50_ns: u64,
    /// 90 % were no longer.
    pub p90_ns: u64,
    /// 99 % were no longer.
    pub p99_ns: u64,
    /// 99.9 % were no longer.
    pub p999_ns: u64,
    /// The longest.
    pub max_ns: u64,
    /// The longest of each cell of the histogram that is not empty, and how many
    /// it has, if they were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cells: Option<Vec<(u64, u64)>>,
}

/// Any failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What is wrong, and what to do.
    pub error: String,
}
