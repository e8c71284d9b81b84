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
use super::value::{
    AdminValue, CountValue, DurationValue, KernelMode, LimitValue, LogFormat, PinValue,
};

/// Declares a table of settings: its struct, its defaults, and how it is
/// printed with its documentation. `example` shows a setting that is absent.
macro_rules! settings {
    (
        $(#[doc = $about:literal])+
        pub struct $name:ident {
            $( $(#[doc = $doc:literal])+ $field:ident: $type:ty = $default:expr $(, example $example:literal)?; )*
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name {
            $( $(#[doc = $doc])+ pub $field: $type, )*
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
        instance: String = "default".to_owned();
        /// The kernel plane: "auto" (if the host allows it, else gate says why not
        /// and counts by itself), "required" (else gate does not start), "off".
        kernel: KernelMode = KernelMode::Auto;
        /// Where `gatectl` reaches this instance: a unix socket with mode 0600.
        control: Option<PathBuf> = None, example "\"/run/gate/default/control.sock\"";
        /// Where /metrics, /healthz, /readyz and /connections are served, or "off".
        /// Whoever reaches it reads the names of users and databases.
        admin: AdminValue = "127.0.0.1:9632".into();
        /// How log lines look: "text" or "json". The environment variable RUST_LOG
        /// says which ones.
        log_format: LogFormat = LogFormat::Text;
        /// Where clients connect. Several are allowed.
        listener: Vec<ListenerSettings> = vec![ListenerSettings::default()];
        /// Where sessions go. `default` is the backend of each database that has no
        /// place of its own below.
        backend: BTreeMap<String, BackendSettings> = default_backend("127.0.0.1:5432");
        /// Where a database lives, if not at the default backend.
        database: BTreeMap<String, DatabaseSettings> = BTreeMap::new(),
            example "[database.prod]\nbackend = \"default\"";
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
    pub struct ListenerSettings {
        /// `host:port` or `[v6]:port`.
        address: String = "127.0.0.1:6432".to_owned();
        /// Sockets at this listener alone, in place of `limits.ceiling`.
        ceiling: Option<LimitValue> = None, example "500";
    }
}

settings! {
    /// One PostgreSQL server.
    pub struct BackendSettings {
        /// `host:port` or `[v6]:port`. A host name is resolved when gate starts.
        address: String = String::new();
        /// Sockets to this backend; 0 = unlimited.
        max_connections: LimitValue = LimitValue(Setting::Unlimited);
    }
}

settings! {
    /// The place of one database.
    pub struct DatabaseSettings {
        /// Name of a backend above.
        backend: String = "default".to_owned();
    }
}

settings! {
    /// How many may be connected.
    pub struct LimitSettings {
        /// Admitted sessions over all listeners.
        max_connections: LimitValue = LimitValue(Setting::AtMost(5000));
        /// Connections that were accepted and have not sent a valid startup packet
        /// yet. At the limit the longest-silent one is closed.
        max_pending: LimitValue = LimitValue(Setting::AtMost(1000));
        /// Sockets of each listener, counted exactly in the kernel. Whoever comes
        /// above it is answered 53300 after the startup packet. "auto" is
        /// max_connections + max_pending + max(64, max_connections / 64), at most
        /// what the file descriptors allow.
        ceiling: LimitValue = LimitValue(Setting::Auto);
        /// While so many sockets are over the ceiling, new ones are reset at once.
        /// "auto" is max(64, ceiling / 16).
        over_headroom: LimitValue = LimitValue(Setting::Auto);
        /// Sockets of one source address. Only 0 (unlimited) is supported yet.
        ceiling_per_source: LimitValue = LimitValue(Setting::Unlimited);
        /// Sessions of each user that has no limit of its own below.
        default_user: LimitValue = LimitValue(Setting::Unlimited);
        /// Sessions of each database that has no limit of its own below.
        default_database: LimitValue = LimitValue(Setting::Unlimited);
        /// Sessions of one user. Names are written as `gatectl` shows them: a byte
        /// that cannot be printed as \xNN, a backslash doubled, all in single quotes.
        user: BTreeMap<String, LimitValue> = BTreeMap::new(),
            example "[limits.user]\napp = 50\nadmin = 0\nretired = \"none\"\n'caf\\xe9' = 5";
        /// Sessions of one database.
        database: BTreeMap<String, LimitValue> = BTreeMap::new(),
            example "[limits.database]\nprod = 300";
    }
}

settings! {
    /// How long gate waits.
    pub struct TimeoutSettings {
        /// From accept to a valid startup packet.
        startup: DurationValue = seconds(15);
        /// For the backend to accept a connection.
        connect: DurationValue = seconds(5);
        /// From there to the end of authentication.
        auth: DurationValue = seconds(60);
        /// For a CancelRequest to be passed on.
        cancel: DurationValue = seconds(10);
        /// For a session without a byte in either direction; "0s" = never.
        idle: DurationValue = seconds(0);
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
        /// Where they run: "none" (anywhere), "cpus" (one CPU each), a list of CPUs
        /// such as [0, 2], or "nic:eth0": one on each CPU that handles a receive
        /// queue of that device, for the connections whose packets come in there.
        pin: PinValue = PinValue::Cpus;
    }
}

/// The table of backends with only `default`, at an address.
pub(super) fn default_backend(address: &str) -> BTreeMap<String, BackendSettings> {
    let backend = BackendSettings {
        address: address.to_owned(),
        ..BackendSettings::default()
    };
    BTreeMap::from([("default".to_owned(), backend)])
}

fn seconds(count: u64) -> DurationValue {
    DurationValue(Duration::from_secs(count))
}
