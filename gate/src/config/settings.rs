//! The settings as they are written: one struct for each TOML table.
//!
//! The doc comments of these structs are the comments of
//! `gate --print-config` and of `docs/gate.toml`: they are written for the
//! person who edits that file.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use gate_common::limit::Setting;
use serde::Deserialize;

use super::render::{Render, Table, Text};
use super::session_limit::SessionLimit;
use super::shape;
use super::value::{
    AdminValue, CountValue, DurationValue, KernelMode, LimitValue, LogFormat, PinValue,
};

/// Declares a table of settings: its struct, its defaults, and how it is
/// printed with its documentation. `example` shows a setting that is absent,
/// `expected` is what an error calls the table, `read` a function of
/// [`super::shape`] that says better than serde what was to be written.
macro_rules! settings {
    (
        $(#[doc = $about:literal])+
        pub struct $name:ident $(, expected $expected:literal)? {
            $(
                $(#[doc = $doc:literal])+ $field:ident: $type:ty = $default:expr
                    $(, example $example:literal)? $(, read $read:literal)?;
            )*
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
        #[serde(deny_unknown_fields, default $(, expecting = $expected)?)]
        pub struct $name {
            $( $(#[doc = $doc])+ $(#[serde(deserialize_with = $read)])? pub $field: $type, )*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $( $field: $default, )* }
            }
        }

        impl Table for $name {
            const ABOUT: &'static [&'static str] = &[$($about),+];

            fn render_settings(&self, out: &mut Text) {
                $(
                    let example = concat!($($example)?);
                    self.$field.render(out, stringify!($field), &[$($doc),+], example);
                )*
            }
        }
    };
}

/// The instance of whoever names none.
pub const DEFAULT_INSTANCE: &str = "default";

settings! {
    /// Configuration of gate. Every setting is shown with the value in force; one
    /// that is not set is shown as a comment.
    ///
    /// Command-line flags win over the environment (GATE_*), which wins over this
    /// file. SIGHUP and `gatectl reload` read it again: limits change at once,
    /// timeouts for connections that come later, all else at the next start.
    pub struct Settings {
        /// Name of this instance: 1 to 32 of a-z, 0-9, `-` and `_`. It is part of
        /// the paths of the control socket and of the pinned maps.
        instance: String = DEFAULT_INSTANCE.to_owned();
        /// The kernel plane: "auto" (if the host allows it, else gate says why not
        /// and counts by itself), "required" (else gate does not start), "off".
        kernel: KernelMode = KernelMode::Auto;
        /// Where `gatectl` reaches this instance: a unix socket with mode 0600. The
        /// lock of the instance and the socket of `--takeover` lie beside it. Tell
        /// gatectl of another path than this one, by --control or GATE_CONTROL.
        control: Option<PathBuf> = None, example "\"/run/gate/default/control.sock\"";
        /// Where /metrics, /healthz, /readyz and /connections are served, or "off".
        /// Whoever reaches it reads the names of users and databases.
        admin: AdminValue = "127.0.0.1:9632".into();
        /// How log lines look: "text" or "json". The environment variable RUST_LOG
        /// says which ones.
        log_format: LogFormat = LogFormat::Text;
        /// Where clients connect. Several are allowed.
        listener: Vec<ListenerSettings> = vec![ListenerSettings::default()],
            read "shape::listeners";
        /// Where sessions go. `default` is the backend of each database that has no
        /// place of its own below.
        backend: BTreeMap<String, BackendSettings> = default_backend("127.0.0.1:5432"),
            read "shape::backends";
        /// Where a database lives, if not at the default backend.
        database: BTreeMap<String, DatabaseSettings> = BTreeMap::new(),
            example "[database.prod]\nbackend = \"default\"", read "shape::databases";
        /// How many may be connected. 0 is unlimited, "none" is nobody. A limit that
        /// `gatectl limits set` changed wins over this file until it is unset.
        limits: LimitSettings = LimitSettings::default();
        /// How long gate waits, with the unit: "500ms", "15s", "2m".
        timeouts: TimeoutSettings = TimeoutSettings::default();
        /// The threads that serve connections.
        workers: WorkerSettings = WorkerSettings::default();
    }
}

settings! {
    /// One address where clients connect.
    pub struct ListenerSettings, expected "a table of its own: [[listener]]" {
        /// `host:port` or `[v6]:port`.
        address: String = "127.0.0.1:6432".to_owned();
        /// Sockets at this listener alone, in place of `limits.ceiling`.
        ceiling: Option<LimitValue> = None, example "500";
        /// Silence before a client is asked whether it is there; "0s" = never. With
        /// the next three, a client that vanished is noticed within two minutes.
        keepalive: DurationValue = seconds(60);
        /// From one question to the next.
        keepalive_interval: DurationValue = seconds(10);
        /// Questions without an answer before the connection is ended; with a
        /// `user_timeout` the kernel goes by that instead, for silence as well.
        keepalive_probes: u32 = 5;
        /// For a client to take bytes that were sent to it (TCP_USER_TIMEOUT), also if
        /// it is there and does not read; "0s" = the kernel's own, a quarter of an hour.
        user_timeout: DurationValue = seconds(110);
        /// Congestion control of its clients' connections, if not the system's; one of
        /// /proc/sys/net/ipv4/tcp_available_congestion_control.
        congestion_control: Option<String> = None, example "\"bbr\"";
    }
}

settings! {
    /// One PostgreSQL server.
    pub struct BackendSettings, expected "a table of its own, such as [backend.default]" {
        /// `host:port` or `[v6]:port`; a host name is resolved when gate starts. Or a
        /// unix socket: its path, or its directory for `.s.PGSQL.5432` in it.
        address: Option<String> = None, example "\"127.0.0.1:5432\"",
            read "shape::one_address";
        /// Several in place of one, 16 at most: each session goes to the first one
        /// that is up and answers.
        addresses: Option<Vec<String>> = None,
            example "[\"10.0.0.1:5432\", \"10.0.0.2:5432\"]", read "shape::several_addresses";
        /// How often several addresses, or one that failed, are checked; "0s" = never:
        /// each session tries them in their order.
        check: DurationValue = seconds(2);
        /// Sockets to this backend; 0 = unlimited. With a wait as under `limits`.
        max_connections: SessionLimit = Setting::Unlimited.into();
        /// Silence before a server is asked whether it is there; "0s" = never. With
        /// the next three, a server that vanished is noticed within two minutes.
        keepalive: DurationValue = seconds(60);
        /// From one question to the next.
        keepalive_interval: DurationValue = seconds(10);
        /// Questions without an answer before the connection is ended; with a
        /// `user_timeout` the kernel goes by that instead, for silence as well.
        keepalive_probes: u32 = 5;
        /// For a server to take bytes that were sent to it (TCP_USER_TIMEOUT), also if
        /// it is there and does not read; "0s" = the kernel's own, a quarter of an hour.
        user_timeout: DurationValue = seconds(110);
        /// Congestion control of the connections, if not the system's; one of
        /// /proc/sys/net/ipv4/tcp_available_congestion_control.
        congestion_control: Option<String> = None, example "\"bbr\"";
    }
}

settings! {
    /// The place of one database.
    pub struct DatabaseSettings, expected "a table of its own, such as [database.prod]" {
        /// Name of a backend above.
        backend: String = "default".to_owned();
    }
}

settings! {
    /// How many may be connected.
    pub struct LimitSettings {
        /// Admitted sessions over all listeners. "auto" is 5000, or what the file
        /// descriptors allow if that is less; a number above what they allow is an
        /// error.
        ///
        /// A limit on sessions, here and below and of a backend, refuses at once
        /// unless it is written with a wait: { max = 50, wait = "200ms" }. Then a
        /// client above it waits for a place, first come, first served per user, and
        /// is refused only when its time is over. At most so many wait for it as
        /// max_waiting says: { max = 50, wait = "200ms", max_waiting = 100 }; unless
        /// said as many as may be admitted, and 16 at least. Descriptors are set aside
        /// for every max_waiting that is written, and 16 for a wait without one, in
        /// one room for all limits, first come, first served. A wait is 60s at most.
        max_connections: SessionLimit = Setting::Auto.into();
        /// Connections that were accepted and have not sent a valid startup packet
        /// yet. At the limit the longest-silent one is closed. "auto" is 1000, or less
        /// where the file descriptors are few: a quarter of the connections that they
        /// allow, or 16, at most. A larger number is kept, and is an error only if
        /// the descriptors do not allow it beside the limits on sessions.
        max_pending: LimitValue = LimitValue(Setting::Auto);
        /// Sockets of each listener, counted exactly in the kernel. Whoever comes
        /// above it is answered 53300 after the startup packet. "auto" is
        /// max_connections + max_pending + max(64, max_connections / 64), at most
        /// what the file descriptors allow; clients that wait for a slot count too,
        /// so with a large max_waiting write one that has room for them. Without the
        /// kernel plane it is not enforced; one below max_connections refuses before
        /// that does.
        ceiling: LimitValue = LimitValue(Setting::Auto);
        /// While so many sockets are over the ceiling, new ones are reset at once.
        /// "auto" is max(64, ceiling / 16).
        over_headroom: LimitValue = LimitValue(Setting::Auto);
        /// Sockets of one source address. Only 0 (unlimited) is supported yet.
        ceiling_per_source: LimitValue = LimitValue(Setting::Unlimited);
        /// Sessions of each user that has no limit of its own below.
        default_user: SessionLimit = Setting::Unlimited.into();
        /// Sessions of each database that has no limit of its own below.
        default_database: SessionLimit = Setting::Unlimited.into();
        /// Sessions of one user. Names are written as `gatectl` shows them: a byte
        /// that cannot be printed as \xNN, a backslash doubled, all in single quotes.
        user: BTreeMap<String, SessionLimit> = BTreeMap::new(),
            example "[limits.user]\napp = 50\nbatch = { max = 5, wait = \"2s\" }\nadmin = 0\nretired = \"none\"\n'caf\\xe9' = 5";
        /// Sessions of one database.
        database: BTreeMap<String, SessionLimit> = BTreeMap::new(),
            example "[limits.database]\nprod = 300";
    }
}

settings! {
    /// How long gate waits.
    pub struct TimeoutSettings {
        /// From accept to a valid startup packet; then the client is closed.
        startup: DurationValue = seconds(15);
        /// For the backend to accept a connection, anew for each of its addresses;
        /// then the client is told 57P03.
        connect: DurationValue = seconds(5);
        /// From there to the end of authentication, the client's own time for its
        /// password included; then the session is closed.
        auth: DurationValue = seconds(60);
        /// For a CancelRequest to be passed on.
        cancel: DurationValue = seconds(10);
        /// For a session without a byte in either direction, in a transaction or
        /// not; then it is closed without a message. "0s" = never.
        idle: DurationValue = seconds(0);
        /// For a session whose client has ended its side, without a byte in either
        /// direction; "0s" = never.
        half_close: DurationValue = seconds(3600);
        /// For sessions to end by themselves after SIGTERM; "0s" = not at all.
        drain: DurationValue = seconds(30);
        /// For the backend to end a session whose client has vanished. The session
        /// holds its slots until then.
        abandoned: DurationValue = seconds(60);
    }
}

settings! {
    /// The threads that serve connections.
    pub struct WorkerSettings {
        /// How many: "auto" is one for each CPU that gate may run on, or for each
        /// one that `pin` names.
        count: CountValue = CountValue::Auto;
        /// Where they run: "none" (anywhere), "cpus" (one CPU each, round and round
        /// if there are more workers), a list of CPUs such as [0, 2], or
        /// "nic:eth0": one on each CPU that handles a receive queue of that device,
        /// for the connections whose packets come in there.
        pin: PinValue = PinValue::Cpus;
    }
}

/// The table of backends with only `default`, at an address.
pub(super) fn default_backend(address: &str) -> BTreeMap<String, BackendSettings> {
    let backend = BackendSettings {
        address: Some(address.to_owned()),
        ..BackendSettings::default()
    };
    BTreeMap::from([("default".to_owned(), backend)])
}

fn seconds(count: u64) -> DurationValue {
    DurationValue(Duration::from_secs(count))
}
