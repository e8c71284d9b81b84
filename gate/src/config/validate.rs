//! From settings to a [`Config`]: what one setting alone cannot know.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use gate_common::abi::{LISTENERS_MAX, SLOTS_MAX, slot};
use gate_common::limit::Setting;

use super::name;
use super::settings::{
    BackendSettings, DatabaseSettings, LimitSettings, ListenerSettings, Settings, TimeoutSettings,
    WorkerSettings,
};
use super::value::{AdminValue, CountValue, DurationValue, LimitValue, PinValue};
use super::{Backend, Config, ConfigError, Limits, Listener, Pin, Timeouts, Workers};

/// Names that the maps have slots for.
const NAMES_MAX: usize = (SLOTS_MAX - slot::FIRST_NAMED) as usize;
/// `sun_path` of a unix socket, its NUL included (`linux/un.h`).
const UNIX_PATH_MAX: usize = 108;

/// Where the control socket of an instance is unless it is configured.
#[must_use]
pub fn control_path(instance: &str) -> PathBuf {
    Path::new("/run/gate").join(instance).join("control.sock")
}

/// Checks the name of an instance.
///
/// # Errors
/// A message if it is not 1 to 32 of `[a-z0-9_-]`.
pub fn check_instance(instance: &str) -> Result<(), String> {
    let allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-');
    if (1..=32).contains(&instance.len()) && instance.bytes().all(allowed) {
        return Ok(());
    }
    Err(format!(
        "`{}` is not 1 to 32 of a-z, 0-9, `_` and `-`",
        instance.escape_debug()
    ))
}

pub(super) fn validate(settings: &Settings) -> Result<Config, ConfigError> {
    check_instance(&settings.instance).map_err(|cause| {
        invalid(
            "instance",
            cause,
            "bpffs takes no dots, so choose a name such as `pg-main`",
        )
    })?;
    let listeners = listeners(&settings.listener)?;
    let backends = backends(&settings.backend)?;
    let databases = databases(&settings.database, &backends)?;
    let limits = limits(&settings.limits)?;
    let names = limits.user.len() + limits.database.len() + backends.len();
    if names > NAMES_MAX {
        let cause = format!("{names} names of users, databases and backends");
        return Err(invalid(
            "limits",
            cause,
            format!("there is room for {NAMES_MAX}"),
        ));
    }
    let admin = match &settings.admin {
        AdminValue::Off => None,
        AdminValue::At(text) => Some(resolve("admin", text)?),
    };
    check_loops(&listeners, &backends, admin)?;
    Ok(Config {
        instance: settings.instance.clone(),
        listeners,
        backends,
        databases,
        limits,
        timeouts: timeouts(&settings.timeouts)?,
        workers: workers(&settings.workers)?,
        kernel: settings.kernel,
        control: control(settings)?,
        admin,
        log_format: settings.log_format,
    })
}

fn control(settings: &Settings) -> Result<PathBuf, ConfigError> {
    let path = settings
        .control
        .clone()
        .unwrap_or_else(|| control_path(&settings.instance));
    if !path.is_absolute() {
        let cause = format!("`{}` is not an absolute path", path.display());
        return Err(invalid("control", cause, "begin it with `/`"));
    }
    if path.as_os_str().len() >= UNIX_PATH_MAX {
        let cause = format!("a path of {} bytes", path.as_os_str().len());
        return Err(invalid("control", cause, "unix sockets take 107 at most"));
    }
    Ok(path)
}

fn listeners(settings: &[ListenerSettings]) -> Result<Vec<Listener>, ConfigError> {
    let mut listeners: Vec<Listener> = Vec::with_capacity(settings.len());
    for (index, listener) in settings.iter().enumerate() {
        let setting = format!("listener[{index}].address");
        let address = resolve(&setting, &listener.address)?;
        if address.port() == 0 {
            let cause = format!("`{}` has port 0", listener.address);
            return Err(invalid(
                setting,
                cause,
                "name the port that clients connect to",
            ));
        }
        if listeners.iter().any(|other| other.address == address) {
            let cause = format!("{address} is listed twice");
            return Err(invalid(setting, cause, "remove one of the two"));
        }
        let ceiling = listener.ceiling.map_or(Setting::Inherit, |value| value.0);
        listeners.push(Listener { address, ceiling });
    }
    // The last index belongs to the start-up probe.
    let most = LISTENERS_MAX as usize - 1;
    match listeners.len() {
        0 => Err(invalid(
            "listener",
            "there is none".to_owned(),
            "give one with [[listener]] or --listen",
        )),
        count if count > most => Err(invalid(
            "listener",
            format!("there are {count}"),
            format!("at most {most} are possible"),
        )),
        _ => Ok(listeners),
    }
}

fn backends(settings: &BTreeMap<String, BackendSettings>) -> Result<Vec<Backend>, ConfigError> {
    let mut backends = Vec::with_capacity(settings.len());
    for (text, backend) in settings {
        let section = format!("backend.{text}");
        name::parse(text)
            .map_err(|error| invalid(&section, error.to_string(), "choose a short, plain name"))?;
        if backend.address.is_empty() {
            let cause = "it has no address".to_owned();
            return Err(invalid(section, cause, "add address = \"host:port\""));
        }
        let setting = format!("{section}.address");
        let address = resolve(&setting, &backend.address)?;
        if address.port() == 0 || address.ip().is_unspecified() {
            let cause = format!("nobody can connect to `{}`", backend.address);
            return Err(invalid(setting, cause, "name the server's host and port"));
        }
        let max_connections = plain(
            &format!("{section}.max_connections"),
            backend.max_connections,
        )?;
        backends.push(Backend {
            name: text.clone(),
            address,
            max_connections,
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

fn databases(
    settings: &BTreeMap<String, DatabaseSettings>,
    backends: &[Backend],
) -> Result<BTreeMap<Vec<u8>, usize>, ConfigError> {
    let by_name = by_name("database", settings)?;
    let place = |(name, database): (Vec<u8>, &DatabaseSettings)| {
        let known = backends
            .iter()
            .position(|backend| backend.name == database.backend);
        known.map(|index| (name.clone(), index)).ok_or_else(|| {
            let names: Vec<&str> = backends
                .iter()
                .map(|backend| backend.name.as_str())
                .collect();
            invalid(
                format!("database.{}.backend", name::Escaped(&name)),
                format!("there is no backend `{}`", database.backend),
                format!("known are: {}", names.join(", ")),
            )
        })
    };
    by_name.into_iter().map(place).collect()
}

fn limits(settings: &LimitSettings) -> Result<Limits, ConfigError> {
    let not_none = |key: &str, value: LimitValue| match value.0 {
        Setting::None => Err(invalid(
            format!("limits.{key}"),
            "\"none\" would let nobody in at all".to_owned(),
            "use max_connections = \"none\" to refuse all sessions politely",
        )),
        setting => Ok(setting),
    };
    let named = |key: &str, map| -> Result<BTreeMap<Vec<u8>, Setting>, ConfigError> {
        let entries = by_name(key, map)?.into_iter();
        entries
            .map(|(name, value)| {
                plain(&format!("{key}.{}", name::Escaped(&name)), *value).map(|value| (name, value))
            })
            .collect()
    };
    let per_source = plain("limits.ceiling_per_source", settings.ceiling_per_source)?;
    if per_source != Setting::Unlimited {
        return Err(invalid(
            "limits.ceiling_per_source",
            "a limit per source is not supported yet".to_owned(),
            "set it to 0 or remove it",
        ));
    }
    Ok(Limits {
        max_connections: plain("limits.max_connections", settings.max_connections)?,
        max_pending: not_none("max_pending", settings.max_pending)
            .and_then(|setting| plain("limits.max_pending", LimitValue(setting)))?,
        ceiling: settings.ceiling.0,
        over_headroom: not_none("over_headroom", settings.over_headroom)?,
        ceiling_per_source: per_source,
        default_user: plain("limits.default_user", settings.default_user)?,
        default_database: plain("limits.default_database", settings.default_database)?,
        user: named("limits.user", &settings.user)?,
        database: named("limits.database", &settings.database)?,
    })
}

/// A limit that nothing derives.
fn plain(setting: &str, value: LimitValue) -> Result<Setting, ConfigError> {
    match value.0 {
        Setting::Auto => Err(invalid(
            setting,
            "\"auto\" is for ceilings and over_headroom only".to_owned(),
            "use a number, 0 (unlimited) or \"none\"",
        )),
        setting => Ok(setting),
    }
}

/// Entries by the bytes of their names.
fn by_name<'a, T>(
    section: &str,
    entries: &'a BTreeMap<String, T>,
) -> Result<BTreeMap<Vec<u8>, &'a T>, ConfigError> {
    let mut names = BTreeMap::new();
    for (text, value) in entries {
        let name = name::parse(text).map_err(|error| {
            invalid(
                format!("{section}.{}", text.escape_debug()),
                error.to_string(),
                "write the name as `gatectl` shows it",
            )
        })?;
        if names.insert(name, value).is_some() {
            let cause = format!("`{text}` is a second spelling of a name listed before");
            return Err(invalid(section, cause, "remove one of the two"));
        }
    }
    Ok(names)
}

fn timeouts(settings: &TimeoutSettings) -> Result<Timeouts, ConfigError> {
    let positive = |key: &str, value: DurationValue| -> Result<Duration, ConfigError> {
        if value.0.is_zero() {
            return Err(invalid(
                format!("timeouts.{key}"),
                "0 would end every connection at once".to_owned(),
                "only `idle` (never) and `drain` (not at all) can be 0",
            ));
        }
        Ok(value.0)
    };
    Ok(Timeouts {
        startup: positive("startup", settings.startup)?,
        connect: positive("connect", settings.connect)?,
        auth: positive("auth", settings.auth)?,
        cancel: positive("cancel", settings.cancel)?,
        idle: settings.idle.0,
        drain: settings.drain.0,
        abandoned: positive("abandoned", settings.abandoned)?,
    })
}

fn workers(settings: &WorkerSettings) -> Result<Workers, ConfigError> {
    let pin = match &settings.pin {
        PinValue::None => Pin::None,
        PinValue::Cpus => Pin::Cpus,
        PinValue::List(cpus) => Pin::List(cpus.clone()),
        PinValue::Nic(device) => Pin::Nic(device.clone()),
    };
    let count = match (settings.count, &pin) {
        (CountValue::Auto, Pin::List(cpus)) => Some(cpus.len()),
        // Known when the device is looked at, at the start.
        (CountValue::Auto, Pin::Nic(_)) => None,
        // Knows the affinity mask and the cgroup's CPU quota.
        (CountValue::Auto, _) => {
            let cpus = std::thread::available_parallelism().map_or(1, usize::from);
            Some(cpus.min(CountValue::MAX))
        }
        (CountValue::Number(count), Pin::List(cpus)) if count != cpus.len() => {
            return Err(invalid(
                "workers.count",
                format!("{count} workers, but {} CPUs in workers.pin", cpus.len()),
                "leave the count at \"auto\" with a list of CPUs",
            ));
        }
        (CountValue::Number(count), _) => Some(count),
    };
    Ok(Workers { count, pin })
}

/// gate must not connect to itself, nor listen twice at one address.
fn check_loops(
    listeners: &[Listener],
    backends: &[Backend],
    admin: Option<SocketAddr>,
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
        if let Some(listener) = reaches(backend.address) {
            return Err(invalid(
                format!("backend.{}.address", backend.name),
                format!(
                    "{} is gate's own listener {listener}: it would connect to itself",
                    backend.address
                ),
                "name the PostgreSQL server's address",
            ));
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

/// The first address that a text stands for.
fn resolve(setting: &str, text: &str) -> Result<SocketAddr, ConfigError> {
    if text.starts_with('/') {
        return Err(invalid(
            setting,
            format!("`{text}`: unix sockets are not supported yet"),
            "use host:port",
        ));
    }
    let unresolved = |cause: String| {
        invalid(
            setting,
            cause,
            "use host:port or [v6]:port, with a name that resolves here",
        )
    };
    match text.to_socket_addrs() {
        Ok(mut addresses) => addresses
            .next()
            .ok_or_else(|| unresolved(format!("`{text}` has no address"))),
        Err(error) => Err(unresolved(format!("`{text}` is no address: {error}"))),
    }
}

fn invalid(setting: impl Into<String>, cause: String, cure: impl Into<String>) -> ConfigError {
    ConfigError::Invalid {
        setting: setting.into(),
        cause,
        cure: cure.into(),
    }
}
