//! From settings to a [`Config`]: what one setting alone cannot know.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use gate_common::abi::{LISTENERS_MAX, SLOTS_MAX, slot};
use gate_common::limit::Setting;

use super::backend::{backends, check_loops, of_listener};
use super::name;
use super::resolve::resolve;
use super::session_limit::{SessionLimit, WaitPolicy};
use super::settings::{
    DatabaseSettings, LimitSettings, ListenerSettings, Settings, TimeoutSettings, WorkerSettings,
};
use super::value::{AdminValue, CountValue, DurationValue, LimitValue, PinValue};
use super::{
    Backend, Config, ConfigError, Limits, Listener, MAX_CONNECTIONS_DEFAULT, Pin, Timeouts, Waits,
    Workers,
};

/// Names that the maps have slots for.
const NAMES_MAX: usize = (SLOTS_MAX - slot::FIRST_NAMED) as usize;
/// `sun_path` of a unix socket, its NUL included (`linux/un.h`).
pub(super) const UNIX_PATH_MAX: usize = 108;

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
    let mut limits = limits(&settings.limits)?;
    let of_backends = settings.backend.iter();
    limits.waits.backend = of_backends
        .map(|(name, backend)| (name.clone().into_bytes(), backend.max_connections.policy()))
        .collect();
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
        AdminValue::At(text) => Some(resolve(
            "admin",
            text,
            "use host:port or [v6]:port, or \"off\" to serve nothing",
        )?),
    };
    let control = control(settings)?;
    check_loops(&listeners, &backends, admin, &control)?;
    Ok(Config {
        instance: settings.instance.clone(),
        listeners,
        backends,
        databases,
        limits,
        timeouts: timeouts(&settings.timeouts)?,
        workers: workers(&settings.workers)?,
        kernel: settings.kernel,
        control,
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
    // The lock and the takeover socket are made beside it.
    if path.as_os_str().as_encoded_bytes().ends_with(b"/") || path.is_dir() {
        let cause = format!("`{}` is a directory", path.display());
        return Err(invalid(
            "control",
            cause,
            "name the socket in it, such as `control.sock`",
        ));
    }
    Ok(path)
}

fn listeners(settings: &[ListenerSettings]) -> Result<Vec<Listener>, ConfigError> {
    let mut listeners: Vec<Listener> = Vec::with_capacity(settings.len());
    for (index, listener) in settings.iter().enumerate() {
        let section = format!("listener[{index}]");
        let tcp = of_listener(&section, listener)?;
        let setting = format!("{section}.address");
        let address = resolve(
            &setting,
            &listener.address,
            "use host:port or [v6]:port; 0.0.0.0 or [::] for every address of this host",
        )?;
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
        listeners.push(Listener {
            address,
            ceiling,
            tcp,
        });
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
    let max_pending = match not_none("max_pending", settings.max_pending)? {
        Setting::Auto => Err(invalid(
            "limits.max_pending",
            "nothing derives it, so it cannot be \"auto\"".to_owned(),
            "use a number, or 0 (unlimited)",
        )),
        setting => Ok(setting),
    }?;
    let (user, user_waits) = named_limits("limits.user", &settings.user)?;
    let (database, database_waits) = named_limits("limits.database", &settings.database)?;
    let max_connections_auto = settings.max_connections.max.0 == Setting::Auto;
    let max_connections = if max_connections_auto {
        LimitValue(Setting::AtMost(MAX_CONNECTIONS_DEFAULT))
    } else {
        settings.max_connections.max
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
        max_connections: plain("limits.max_connections", max_connections)?,
        max_connections_auto,
        max_pending,
        ceiling: settings.ceiling.0,
        over_headroom: not_none("over_headroom", settings.over_headroom)?,
        ceiling_per_source: per_source,
        default_user: plain("limits.default_user", settings.default_user.max)?,
        default_database: plain("limits.default_database", settings.default_database.max)?,
        user,
        database,
        waits: Waits {
            max_connections: SessionLimit {
                max: max_connections,
                ..settings.max_connections
            }
            .policy(),
            default_user: settings.default_user.policy(),
            default_database: settings.default_database.policy(),
            user: user_waits,
            database: database_waits,
            // Theirs are in another table.
            backend: BTreeMap::new(),
        },
    })
}

type ByName<T> = BTreeMap<Vec<u8>, T>;

/// The limits of a table by name, and how long they let clients wait.
fn named_limits(
    key: &str,
    table: &BTreeMap<String, SessionLimit>,
) -> Result<(ByName<Setting>, ByName<WaitPolicy>), ConfigError> {
    let mut limits = BTreeMap::new();
    let mut waits = BTreeMap::new();
    for (name, limit) in by_name(key, table)? {
        let setting = plain(&format!("{key}.{}", name::Escaped(&name)), limit.max)?;
        limits.insert(name.clone(), setting);
        waits.insert(name, limit.policy());
    }
    Ok((limits, waits))
}

/// A limit that nothing derives.
pub(super) fn plain(setting: &str, value: LimitValue) -> Result<Setting, ConfigError> {
    match value.0 {
        Setting::Auto => Err(invalid(
            setting,
            "\"auto\" is for ceilings, over_headroom and max_connections only".to_owned(),
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
                "only `idle` and `half_close` (never) and `drain` (not at all) can be 0",
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
        half_close: settings.half_close.0,
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

pub(super) fn invalid(
    setting: impl Into<String>,
    cause: String,
    cure: impl Into<String>,
) -> ConfigError {
    ConfigError::Invalid {
        setting: setting.into(),
        cause,
        cure: cure.into(),
    }
}
