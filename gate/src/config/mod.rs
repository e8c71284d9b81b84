//! Configuration: text to validated values.
//!
//! | module | what it holds |
//! |---|---|
//! | [`backend`] | where PostgreSQL is, and how sockets are set up |
//! | [`command`] | flags and environment, and where the configuration came from |
//! | [`settings`] | the settings as written: one struct per TOML table, documented for its reader |
//! | `resolve` | addresses of TCP, from text |
//! | [`shape`] | the tables and lists around them, and what an error says of another shape |
//! | [`value`] | single values: limits, durations, pinning |
//! | [`session_limit`] | limits on sessions, with the wait for a place |
//! | [`render`] | settings as TOML with their documentation |
//! | [`name`] | names of users and databases as text |
//! | `validate` | from [`settings`] to [`Config`] |
#![forbid(unsafe_code)]

pub mod backend;
pub mod command;
pub mod name;
pub mod render;
mod resolve;
pub mod session_limit;
pub mod settings;
pub mod shape;
mod validate;
pub mod value;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use gate_common::limit::Setting;

use crate::admission::WaitsFor;
pub use backend::{ADDRESSES_MAX, Address, Backend, Keepalive, TcpOptions};
pub use command::{ConfigSource, Flags};
pub use session_limit::WaitPolicy;
pub use settings::DEFAULT_INSTANCE;
pub use validate::{check_instance, control_path};
pub use value::{KernelMode, LogFormat};

use settings::Settings;

/// What gate runs with: validated, addresses resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// 1 to 32 of `[a-z0-9_-]`.
    pub instance: String,
    /// At least one, addresses distinct.
    pub listeners: Vec<Listener>,
    /// At least one: the first is `default`.
    pub backends: Vec<Backend>,
    /// Databases with a place of their own: index in `backends`.
    pub databases: BTreeMap<Vec<u8>, usize>,
    /// How many may be connected.
    pub limits: Limits,
    /// How long gate waits.
    pub timeouts: Timeouts,
    /// The worker threads.
    pub workers: Workers,
    /// Whether the kernel programs are loaded.
    pub kernel: KernelMode,
    /// Path of the control socket.
    pub control: PathBuf,
    /// Address of the admin HTTP.
    pub admin: Option<SocketAddr>,
    /// How log lines look.
    pub log_format: LogFormat,
}

/// One address where clients connect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listener {
    /// Where.
    pub address: SocketAddr,
    /// Sockets at this listener; [`Setting::Inherit`] takes [`Limits::ceiling`].
    pub ceiling: Setting,
    /// How the sockets of its clients are set up.
    pub tcp: TcpOptions,
}

/// `max_connections` unless it is written, where the descriptors allow so many.
pub const MAX_CONNECTIONS_DEFAULT: u64 = 5000;

/// `max_pending` unless it is written, where the descriptors allow so many.
pub const MAX_PENDING_DEFAULT: u64 = 1000;

/// How many may be connected. No setting here is [`Setting::Inherit`];
/// [`Setting::Auto`] occurs in `ceiling` and `over_headroom` only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Admitted sessions over all listeners.
    pub max_connections: Setting,
    /// Nobody wrote that number: a start may lower it to what the descriptors
    /// allow.
    pub max_connections_auto: bool,
    /// Connections without a valid startup packet; never [`Setting::None`].
    pub max_pending: Setting,
    /// As `max_connections_auto`, of `max_pending`.
    pub max_pending_auto: bool,
    /// Sockets of each listener.
    pub ceiling: Setting,
    /// Sockets over the ceiling before SYNs are reset; never [`Setting::None`].
    pub over_headroom: Setting,
    /// Sockets of one source: [`Setting::Unlimited`] until it is supported.
    pub ceiling_per_source: Setting,
    /// Sessions of a user without a limit of its own.
    pub default_user: Setting,
    /// Sessions of a database without a limit of its own.
    pub default_database: Setting,
    /// By name, 1 to 63 bytes.
    pub user: BTreeMap<Vec<u8>, Setting>,
    /// By name, 1 to 63 bytes.
    pub database: BTreeMap<Vec<u8>, Setting>,
    /// Which of these refuse at once, and which let clients wait.
    pub waits: Waits,
}

/// How long clients may wait for a place, by the limit that refused them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// For `max_connections`.
    pub max_connections: WaitPolicy,
    /// For the limit of a user without one of its own in the configuration.
    pub default_user: WaitPolicy,
    /// For the limit of a database without one of its own in the configuration.
    pub default_database: WaitPolicy,
    /// By name: each user that has a limit in the configuration.
    pub user: BTreeMap<Vec<u8>, WaitPolicy>,
    /// By name: each database that has a limit in the configuration.
    pub database: BTreeMap<Vec<u8>, WaitPolicy>,
    /// By name: every backend.
    pub backend: BTreeMap<Vec<u8>, WaitPolicy>,
}

impl Waits {
    /// For how many clients that wait descriptors are set aside, in one room for
    /// all limits, first come, first served. Of the policies for names without a limit of their own each counts
    /// once, for how many such names there will be nobody knows.
    #[must_use]
    pub fn promised(&self) -> u64 {
        let unnamed = [
            self.max_connections,
            self.default_user,
            self.default_database,
        ];
        let named = [&self.user, &self.database, &self.backend];
        let all = unnamed.iter();
        all.chain(named.into_iter().flat_map(BTreeMap::values))
            .filter(|policy| policy.waits())
            .map(|policy| u64::from(policy.promised))
            .sum()
    }

    /// The policy of a limit. One that `gatectl` set waits as the configuration
    /// says for that name.
    #[must_use]
    pub fn policy(&self, limit: &WaitsFor) -> WaitPolicy {
        match limit {
            WaitsFor::Total => self.max_connections,
            WaitsFor::User(name) => *self.user.get(name).unwrap_or(&self.default_user),
            WaitsFor::Database(name) => *self.database.get(name).unwrap_or(&self.default_database),
            WaitsFor::Backend(name) => self.backend.get(name).copied().unwrap_or_default(),
        }
    }
}

/// How long gate waits. Only `idle` (never) and `drain` (not at all) can be
/// zero; none is longer than a year.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// From accept to a valid startup packet.
    pub startup: Duration,
    /// For the backend to accept a connection.
    pub connect: Duration,
    /// From there to the end of authentication.
    pub auth: Duration,
    /// For a CancelRequest to be passed on.
    pub cancel: Duration,
    /// For a session without a byte in either direction.
    pub idle: Duration,
    /// For a session whose client has ended its side, without a byte; zero for never.
    pub half_close: Duration,
    /// For sessions to end by themselves after SIGTERM.
    pub drain: Duration,
    /// For the backend to end a session whose client has vanished.
    pub abandoned: Duration,
}

/// The worker threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workers {
    /// How many: 1 to [`value::CountValue::MAX`]. `None` with [`Pin::Nic`]: as
    /// many as there are CPUs that handle its queues.
    pub count: Option<usize>,
    /// Where they run.
    pub pin: Pin,
}

/// Where workers run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Pin {
    /// Anywhere.
    None,
    /// One allowed CPU each, round and round.
    Cpus,
    /// Worker `n` on the `n`th; as many as there are workers.
    List(Vec<usize>),
    /// On the CPUs that handle the receive queues of this network device.
    Nic(String),
}

/// Why there is no configuration to run with. Exit code 2.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration file {path}: {error}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The text is no configuration; the error shows the line.
    #[error("{origin}: {}", error.to_string().trim_end())]
    Parse {
        /// The file, or what stands for it.
        origin: String,
        /// What is wrong where.
        error: Box<toml::de::Error>,
    },
    /// A setting has a value that cannot be.
    #[error("{setting}: {cause}; {cure}")]
    Invalid {
        /// Its path in the configuration.
        setting: String,
        /// What is wrong.
        cause: String,
        /// What to do.
        cure: String,
    },
}

impl Config {
    /// Reads a configuration from TOML text alone: no file, no flags.
    ///
    /// # Errors
    /// As [`ConfigSource::load`].
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        parse(text, "configuration").and_then(|settings| Self::from_settings(&settings))
    }

    /// Validates settings and resolves their host names.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`], for the first setting that cannot be.
    pub fn from_settings(settings: &Settings) -> Result<Self, ConfigError> {
        validate::validate(settings)
    }

    /// The settings that differ from `old` and take effect at the next start
    /// only: all but limits and timeouts.
    #[must_use]
    pub fn fixed_differences(&self, old: &Self) -> Vec<&'static str> {
        let listener = |listener: &Listener| (listener.address, listener.tcp.clone());
        let listeners =
            |config: &Self| -> Vec<_> { config.listeners.iter().map(listener).collect() };
        let backend = |backend: &Backend| Backend {
            max_connections: Setting::Inherit,
            ..backend.clone()
        };
        let backends = |config: &Self| -> Vec<_> { config.backends.iter().map(backend).collect() };
        let differences = [
            ("instance", self.instance != old.instance),
            ("listener", listeners(self) != listeners(old)),
            ("backend", backends(self) != backends(old)),
            ("database", self.databases != old.databases),
            ("workers", self.workers != old.workers),
            ("kernel", self.kernel != old.kernel),
            ("control", self.control != old.control),
            ("admin", self.admin != old.admin),
            ("log_format", self.log_format != old.log_format),
        ];
        let differing = differences.into_iter().filter(|(_, differs)| *differs);
        differing.map(|(setting, _)| setting).collect()
    }
}

fn parse(text: &str, origin: &str) -> Result<Settings, ConfigError> {
    toml::from_str(text).map_err(|error| ConfigError::Parse {
        origin: origin.to_owned(),
        error: Box::new(error),
    })
}

#[cfg(test)]
mod backend_tests;
#[cfg(test)]
mod tests;
