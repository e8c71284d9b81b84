//! Where PostgreSQL is, how gate's sockets are set up on both sides, and the
//! addresses that gate must not connect to: its own.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gate_common::limit::Setting;

use super::resolve::resolve;
use super::settings::{BackendSettings, ListenerSettings};
use super::validate::{UNIX_PATH_MAX, invalid, plain};
use super::value::DurationValue;
use super::{ConfigError, Listener, name};

/// Addresses that one backend can have.
pub const ADDRESSES_MAX: usize = 16;
/// The shortest period of checks.
const CHECK_MIN: Duration = Duration::from_millis(10);
/// The socket of a PostgreSQL server in its directory, at the usual port.
const SOCKET_NAME: &str = ".s.PGSQL.5432";
/// `MAX_TCP_KEEPIDLE` and `MAX_TCP_KEEPINTVL` (`net/tcp.h`).
const KEEPALIVE_SECONDS_MAX: u64 = 32767;
/// `MAX_TCP_KEEPCNT` (`net/tcp.h`).
const KEEPALIVE_PROBES_MAX: u32 = 127;
/// `TCP_CA_NAME_MAX` (`net/tcp.h`), its NUL included.
const CONGESTION_NAME_MAX: usize = 16;

/// Where a PostgreSQL server listens.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Address {
    /// An address of IPv4 or IPv6, and a port.
    Tcp(SocketAddr),
    /// The path of a unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Address {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(out),
            Self::Unix(path) => path.display().fmt(out),
        }
    }
}

/// One PostgreSQL server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    /// At most 63 bytes, a slot name and a metric label.
    pub name: String,
    /// 1 to [`ADDRESSES_MAX`], distinct, in the order of preference.
    pub addresses: Vec<Address>,
    /// How its TCP sockets are set up.
    pub tcp: TcpOptions,
    /// How often its addresses are checked; zero is never.
    pub check: Duration,
    /// Sockets to this backend.
    pub max_connections: Setting,
}

/// How the TCP sockets of one side are set up. TCP_NODELAY is set on all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TcpOptions {
    /// Absent: no keepalive.
    pub keepalive: Option<Keepalive>,
    /// TCP_USER_TIMEOUT, at most [`i32::MAX`] ms; zero is the kernel's own.
    pub user_timeout: Duration,
    /// TCP_CONGESTION; absent is the system's.
    pub congestion_control: Option<String>,
}

/// When a silent peer is asked whether it is there. Whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keepalive {
    /// Silence before the first probe.
    pub idle: Duration,
    /// From one probe to the next.
    pub interval: Duration,
    /// Probes without an answer before the connection is ended.
    pub probes: u32,
}

pub(super) fn backends(
    settings: &BTreeMap<String, BackendSettings>,
) -> Result<Vec<Backend>, ConfigError> {
    let mut backends = Vec::with_capacity(settings.len());
    for (text, backend) in settings {
        let section = format!("backend.{text}");
        name::parse(text)
            .map_err(|error| invalid(&section, error.to_string(), "choose a short, plain name"))?;
        backends.push(Backend {
            name: text.clone(),
            addresses: addresses(&section, backend)?,
            tcp: of_backend(&section, backend)?,
            check: check(&section, backend.check)?,
            max_connections: plain(
                &format!("{section}.max_connections"),
                backend.max_connections.max,
            )?,
        });
    }
    let Some(default) = backends
        .iter()
        .position(|backend| backend.name == "default")
    else {
        return Err(invalid(
            "backend",
            "there is none named `default`, where databases without a place of their own go".into(),
            "add [backend.default] or give --backend",
        ));
    };
    backends[..=default].rotate_right(1);
    Ok(backends)
}

fn check(section: &str, value: DurationValue) -> Result<Duration, ConfigError> {
    if value.0.is_zero() || value.0 >= CHECK_MIN {
        return Ok(value.0);
    }
    Err(invalid(
        format!("{section}.check"),
        format!("a check each {value} would be all that gate does"),
        "use \"10ms\" or more; \"0s\" never checks",
    ))
}

fn addresses(section: &str, backend: &BackendSettings) -> Result<Vec<Address>, ConfigError> {
    let listed = backend.addresses.as_deref().unwrap_or_default();
    let texts: Vec<(String, &str)> = match (backend.address.as_deref(), listed) {
        (None | Some(""), []) => {
            return Err(invalid(
                section,
                "it has no address".to_owned(),
                "add address = \"host:port\", or the path of a unix socket",
            ));
        }
        (Some(one), []) => vec![(format!("{section}.address"), one)],
        (None, several) => {
            let several = several.iter().enumerate();
            several
                .map(|(index, text)| (format!("{section}.addresses[{index}]"), text.as_str()))
                .collect()
        }
        (Some(_), _) => {
            return Err(invalid(
                section,
                "it has both address and addresses".to_owned(),
                "list them all in addresses, the preferred one first",
            ));
        }
    };
    if texts.len() > ADDRESSES_MAX {
        return Err(invalid(
            format!("{section}.addresses"),
            format!("there are {}", texts.len()),
            format!("at most {ADDRESSES_MAX} are possible"),
        ));
    }
    let mut addresses = Vec::with_capacity(texts.len());
    for (setting, text) in texts {
        let address = address(&setting, text)?;
        if addresses.contains(&address) {
            let cause = format!("{address} is listed twice");
            return Err(invalid(setting, cause, "remove one of the two"));
        }
        addresses.push(address);
    }
    Ok(addresses)
}

fn address(setting: &str, text: &str) -> Result<Address, ConfigError> {
    if text.starts_with('/') {
        return unix_socket(setting, text).map(Address::Unix);
    }
    let address = resolve(
        setting,
        text,
        "use host:port or [v6]:port, or the path of a unix socket, which begins with `/`",
    )?;
    if address.port() == 0 || address.ip().is_unspecified() {
        let cause = format!("nobody can connect to `{text}`");
        return Err(invalid(setting, cause, "name the server's host and port"));
    }
    Ok(Address::Tcp(address))
}

/// The socket itself, or the one in the directory that is named. What is not
/// there yet is a directory unless its name is that of a PostgreSQL socket.
fn unix_socket(setting: &str, text: &str) -> Result<PathBuf, ConfigError> {
    let named = Path::new(text);
    let is_socket = || {
        let file = named.file_name().unwrap_or_default().to_string_lossy();
        !text.ends_with('/') && file.starts_with(".s.PGSQL.")
    };
    let is_directory = match named.metadata() {
        Ok(found) => found.is_dir(),
        Err(_) => !is_socket(),
    };
    let path = if is_directory {
        named.join(SOCKET_NAME)
    } else {
        named.to_owned()
    };
    if path.as_os_str().len() >= UNIX_PATH_MAX || text.contains('\0') {
        let cause = format!("a path of {} bytes", path.as_os_str().len());
        return Err(invalid(
            setting,
            cause,
            "unix sockets take 107 at most, without NUL",
        ));
    }
    Ok(path)
}

fn of_backend(section: &str, settings: &BackendSettings) -> Result<TcpOptions, ConfigError> {
    TcpSettings {
        section,
        keepalive: settings.keepalive,
        keepalive_interval: settings.keepalive_interval,
        keepalive_probes: settings.keepalive_probes,
        user_timeout: settings.user_timeout,
        congestion_control: settings.congestion_control.as_deref(),
    }
    .validate()
}

/// The options of the sockets that a listener accepts.
pub(super) fn of_listener(
    section: &str,
    settings: &ListenerSettings,
) -> Result<TcpOptions, ConfigError> {
    TcpSettings {
        section,
        keepalive: settings.keepalive,
        keepalive_interval: settings.keepalive_interval,
        keepalive_probes: settings.keepalive_probes,
        user_timeout: settings.user_timeout,
        congestion_control: settings.congestion_control.as_deref(),
    }
    .validate()
}

/// What backends and listeners have in common as settings.
struct TcpSettings<'a> {
    section: &'a str,
    keepalive: DurationValue,
    keepalive_interval: DurationValue,
    keepalive_probes: u32,
    user_timeout: DurationValue,
    congestion_control: Option<&'a str>,
}

impl TcpSettings<'_> {
    fn validate(&self) -> Result<TcpOptions, ConfigError> {
        let keepalive = if self.keepalive.0.is_zero() {
            None
        } else {
            Some(Keepalive {
                idle: self.seconds("keepalive", self.keepalive)?,
                interval: self.seconds("keepalive_interval", self.keepalive_interval)?,
                probes: self.probes()?,
            })
        };
        Ok(TcpOptions {
            keepalive,
            user_timeout: self.user_timeout()?,
            congestion_control: self.congestion_control()?,
        })
    }

    fn seconds(&self, key: &str, value: DurationValue) -> Result<Duration, ConfigError> {
        let whole = value.0.subsec_nanos() == 0;
        if whole && (1..=KEEPALIVE_SECONDS_MAX).contains(&value.0.as_secs()) {
            return Ok(value.0);
        }
        Err(self.invalid(
            key,
            format!("the kernel has no such time as {value}"),
            format!("use whole seconds, \"1s\" to \"{KEEPALIVE_SECONDS_MAX}s\""),
        ))
    }

    fn probes(&self) -> Result<u32, ConfigError> {
        if (1..=KEEPALIVE_PROBES_MAX).contains(&self.keepalive_probes) {
            return Ok(self.keepalive_probes);
        }
        Err(self.invalid(
            "keepalive_probes",
            format!("{} probes", self.keepalive_probes),
            format!("use 1 to {KEEPALIVE_PROBES_MAX}; keepalive = \"0s\" sends none"),
        ))
    }

    fn user_timeout(&self) -> Result<Duration, ConfigError> {
        let value = self.user_timeout.0;
        let fits = i32::try_from(value.as_millis()).is_ok();
        if fits && value.subsec_nanos().is_multiple_of(1_000_000) {
            return Ok(value);
        }
        Err(self.invalid(
            "user_timeout",
            format!("the kernel has no such time as {}", self.user_timeout),
            "use whole milliseconds, 24 days at most; \"0s\" is the kernel's own timeout"
                .to_owned(),
        ))
    }

    /// Whether the kernel has it is seen at the start.
    fn congestion_control(&self) -> Result<Option<String>, ConfigError> {
        let Some(name) = self.congestion_control else {
            return Ok(None);
        };
        let printable = |byte: u8| byte.is_ascii_graphic();
        if (1..CONGESTION_NAME_MAX).contains(&name.len()) && name.bytes().all(printable) {
            return Ok(Some(name.to_owned()));
        }
        Err(self.invalid(
            "congestion_control",
            format!("`{}` is no name of one", name.escape_debug()),
            "use one of /proc/sys/net/ipv4/tcp_available_congestion_control".to_owned(),
        ))
    }

    fn invalid(&self, key: &str, cause: String, cure: String) -> ConfigError {
        invalid(format!("{}.{key}", self.section), cause, cure)
    }
}

/// gate must not connect to itself, nor listen twice at one address.
pub(super) fn check_loops(
    listeners: &[Listener],
    backends: &[Backend],
    admin: Option<SocketAddr>,
    control: &Path,
) -> Result<(), ConfigError> {
    let own: BTreeSet<SocketAddr> = listeners.iter().map(|listener| listener.address).collect();
    let reaches = |from: SocketAddr| {
        let wildcard =
            |address: &SocketAddr| address.ip().is_unspecified() && from.ip().is_loopback();
        let meets = |address: &&SocketAddr| {
            **address == from || (address.port() == from.port() && wildcard(address))
        };
        own.iter().find(meets).copied()
    };
    for backend in backends {
        for address in &backend.addresses {
            let own = match address {
                Address::Tcp(address) => {
                    reaches(*address).map(|listener| format!("listener {listener}"))
                }
                Address::Unix(path) => path
                    .starts_with(control)
                    .then(|| "control socket".to_owned()),
            };
            if let Some(own) = own {
                return Err(invalid(
                    format!("backend.{}.address", backend.name),
                    format!("{address} is gate's own {own}: it would connect to itself"),
                    "name the PostgreSQL server's address",
                ));
            }
        }
    }
    match admin.and_then(reaches) {
        Some(listener) => Err(invalid(
            "admin",
            format!("the address of the listener {listener}"),
            "choose another port, or \"off\"",
        )),
        None => Ok(()),
    }
}
