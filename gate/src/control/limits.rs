//! Limits as text: listed, set and unset, for the control socket and for
//! `gatectl` on the pinned maps alike.
#![forbid(unsafe_code)]

mod descriptors;

pub use descriptors::{Excess, excess, warn_of_excess};

use gate_common::abi::{NAME_BYTES_MAX, NameKind, slot};
use gate_common::limit::{Limit, Setting};
use gate_common::slots::Book;

use super::api::{LimitChange, LimitEntry};
use crate::admission::WaitsFor;
use crate::config::name;
use crate::config::render;
use crate::config::session_limit::SessionLimit;
use crate::config::settings::LimitSettings;
use crate::config::value::{DurationValue, LimitValue};
use crate::config::{WaitPolicy, Waits};
use crate::ledger::{Layer, Ledger, LimitKey, LimitRow, LimitSource};

/// What `gatectl limits set` takes, for help and errors.
pub const KEYS: &str = "user NAME, database NAME, backend NAME, default-user, default-database, \
     max-connections, max-pending, ceiling [LISTENER], over-headroom";

/// Why a limit was not changed: a sentence for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct LimitError(String);

/// All limits in force, sorted.
///
/// # Errors
/// The table of names could not be read.
pub fn list(ledger: &Ledger) -> Result<Vec<LimitEntry>, LimitError> {
    let rows = ledger.limits().map_err(unreadable)?;
    Ok(rows
        .iter()
        .filter(|row| is_shown(row))
        .map(|row| entry(ledger, row))
        .collect())
}

/// Sets a limit. It is in force when this returns.
///
/// # Errors
/// The key, the name or the value is none, there are too few descriptors for it,
/// or the name can get no slot.
pub fn set(ledger: &Ledger, change: &LimitChange) -> Result<LimitEntry, LimitError> {
    let key = parse_key(ledger, change)?;
    let text = change.value.as_deref().unwrap_or_default();
    let value: LimitValue = text.parse().map_err(LimitError)?;
    check_value(&key, value.0)?;
    descriptors::check(ledger, &key, value.0)?;
    store(ledger, &key, value.0)
}

/// Takes back what was set while running; the configuration's limit, or the
/// default, is in force when this returns.
///
/// # Errors
/// As [`set`].
pub fn unset(ledger: &Ledger, change: &LimitChange) -> Result<LimitEntry, LimitError> {
    let key = parse_key(ledger, change)?;
    if row(ledger, &key)?.is_some() {
        return store(ledger, &key, Setting::Inherit);
    }
    // An unknown name has nothing to unset, and must not get a slot for it.
    let name = change.name.as_deref().unwrap_or_default();
    Err(LimitError(format!(
        "no {} `{name}` is known: `gatectl limits list` shows what is set",
        change.key
    )))
}

/// The limits in force as the `[limits]` tables of a configuration file, with
/// the waits of the gate that runs, if one does.
///
/// # Errors
/// The table of names could not be read.
pub fn export(ledger: &Ledger, waits: Option<&Waits>) -> Result<String, LimitError> {
    let waiting = |max: LimitValue, limit: WaitsFor| {
        let policy = waits.map(|waits| waits.policy(&limit));
        match policy.filter(WaitPolicy::waits) {
            None => SessionLimit::from(max),
            Some(policy) => {
                let unwritten = SessionLimit {
                    max,
                    wait: DurationValue(policy.wait),
                    max_waiting: None,
                };
                // A number in the file is promised in full, so none that came from
                // a limit of another size may become one.
                let written = policy.promised == policy.max_waiting && unwritten.policy() != policy;
                SessionLimit {
                    max_waiting: written.then_some(policy.max_waiting),
                    ..unwritten
                }
            }
        }
    };
    // Of names that have no entry of their own.
    let default_wait = |max, kind: fn(Vec<u8>) -> WaitsFor| waiting(max, kind(Vec::new()));
    let plain = |index| {
        let setting = ledger
            .limit(index)
            .map_or(Setting::Inherit, |words| words.setting());
        move |default: LimitValue| match setting {
            Setting::Inherit => default,
            set => LimitValue(set),
        }
    };
    let default = LimitSettings::default();
    let unlimited = LimitValue(Setting::Unlimited);
    let mut settings = LimitSettings {
        // A word that nobody set is unlimited, whatever the file's default.
        max_connections: waiting(plain(slot::TOTAL)(unlimited), WaitsFor::Total),
        max_pending: plain(slot::MAX_PENDING)(unlimited),
        ceiling: plain(slot::CEILING)(default.ceiling),
        over_headroom: plain(slot::OVER_HEADROOM)(default.over_headroom),
        default_user: default_wait(plain(slot::DEFAULT_USER)(unlimited), WaitsFor::User),
        default_database: default_wait(
            plain(slot::DEFAULT_DATABASE)(unlimited),
            WaitsFor::Database,
        ),
        ..default
    };
    let mut others = String::new();
    if waits.is_none() {
        others += "# no gate runs: how long clients wait is in its configuration alone\n";
    }
    for row in ledger.limits().map_err(unreadable)? {
        if row.source == LimitSource::Default {
            continue;
        }
        let value = LimitValue(match row.limit {
            Limit::Unlimited => Setting::Unlimited,
            Limit::None => Setting::None,
            Limit::AtMost(number) => Setting::AtMost(number),
        });
        let toml = render::limit(value);
        match row.key {
            LimitKey::User(user) => {
                let value = waiting(value, WaitsFor::User(user.clone()));
                settings.user.insert(name::escape(&user), value);
            }
            LimitKey::Database(database) => {
                let value = waiting(value, WaitsFor::Database(database.clone()));
                settings.database.insert(name::escape(&database), value);
            }
            // Their place is elsewhere in the file, and the configuration's
            // are there already.
            LimitKey::Backend(backend) if row.source == LimitSource::Runtime => {
                let name = name::escape(&backend);
                others += &format!("# backend {name}: max_connections = {toml}\n");
            }
            LimitKey::Listener(address) if row.source == LimitSource::Runtime => {
                others += &format!("# listener {address}: ceiling = {toml}\n");
            }
            _ => {}
        }
    }
    Ok(render::limits_to_toml(&settings) + &others)
}

/// How a key and its name are written.
#[must_use]
pub fn key_text(key: &LimitKey) -> (&'static str, Option<String>) {
    match key {
        LimitKey::MaxConnections => ("max-connections", None),
        LimitKey::MaxPending => ("max-pending", None),
        LimitKey::Ceiling => ("ceiling", None),
        LimitKey::OverHeadroom => ("over-headroom", None),
        LimitKey::DefaultUser => ("default-user", None),
        LimitKey::DefaultDatabase => ("default-database", None),
        LimitKey::User(user) => ("user", Some(name::escape(user))),
        LimitKey::Database(database) => ("database", Some(name::escape(database))),
        LimitKey::Backend(backend) => ("backend", Some(name::escape(backend))),
        LimitKey::Listener(address) => ("ceiling", Some(address.clone())),
    }
}

fn parse_key(ledger: &Ledger, change: &LimitChange) -> Result<LimitKey, LimitError> {
    let key = change.key.as_str();
    let Some(name) = &change.name else {
        return match key {
            "max-connections" => Ok(LimitKey::MaxConnections),
            "max-pending" => Ok(LimitKey::MaxPending),
            "ceiling" => Ok(LimitKey::Ceiling),
            "over-headroom" => Ok(LimitKey::OverHeadroom),
            "default-user" => Ok(LimitKey::DefaultUser),
            "default-database" => Ok(LimitKey::DefaultDatabase),
            "user" | "database" | "backend" => {
                Err(LimitError(format!("`{key}` needs a name: {key} NAME")))
            }
            _ => Err(unknown_key(key)),
        };
    };
    let parsed = || {
        name::parse(name)
            .map_err(|error| LimitError(format!("{key} `{}`: {error}", name.escape_debug())))
    };
    match key {
        "user" => Ok(LimitKey::User(parsed()?)),
        "database" => Ok(LimitKey::Database(parsed()?)),
        "backend" => {
            let backend = parsed()?;
            known(ledger, NameKind::Backend, &backend)?;
            Ok(LimitKey::Backend(backend))
        }
        "ceiling" => {
            known(ledger, NameKind::Listener, name.as_bytes())?;
            Ok(LimitKey::Listener(name.clone()))
        }
        "max-connections" | "max-pending" | "over-headroom" | "default-user"
        | "default-database" => Err(LimitError(format!("`{key}` takes no name"))),
        _ => Err(unknown_key(key)),
    }
}

fn unknown_key(key: &str) -> LimitError {
    let key = key.escape_debug();
    if key.to_string() == "per-source" {
        return LimitError("a limit per source is not supported yet".to_owned());
    }
    LimitError(format!("`{key}` is no limit; there are: {KEYS}"))
}

/// Backends and listeners come from the configuration alone: a limit for one
/// that is not there would be a typing error that nobody sees.
fn known(ledger: &Ledger, kind: NameKind, name: &[u8]) -> Result<(), LimitError> {
    let names = ledger.all_names().map_err(unreadable)?;
    let of_kind: Vec<&[u8]> = names
        .iter()
        .filter(|(key, _)| key.kind == kind as u8)
        .map(|(key, _)| key.name())
        .collect();
    if name.len() <= NAME_BYTES_MAX && of_kind.contains(&name) {
        return Ok(());
    }
    let what = if kind == NameKind::Backend {
        "backend"
    } else {
        "listener"
    };
    let names: Vec<String> = of_kind.iter().map(|name| name::escape(name)).collect();
    Err(LimitError(format!(
        "there is no {what} `{}`; known are: {}",
        name::escape(name),
        names.join(", ")
    )))
}

fn check_value(key: &LimitKey, value: Setting) -> Result<(), LimitError> {
    let (text, _) = key_text(key);
    match (key, value) {
        (_, Setting::Auto) if !is_of_sockets(key) => Err(LimitError(format!(
            "`auto` is for ceiling and over-headroom only: give {text} a number, `unlimited` or `none`"
        ))),
        (LimitKey::MaxPending | LimitKey::OverHeadroom, Setting::None) => Err(LimitError(format!(
            "`none` for {text} would let nobody in at all: `max-connections none` refuses all sessions politely"
        ))),
        _ => Ok(()),
    }
}

fn store(ledger: &Ledger, key: &LimitKey, setting: Setting) -> Result<LimitEntry, LimitError> {
    ledger
        .set_limit(key, Layer::Runtime, setting)
        .map_err(|error| LimitError(error.to_string()))?;
    match row(ledger, key)? {
        Some(row) => Ok(entry(ledger, &row)),
        None => Err(LimitError(
            "the limit was set, but its name is gone again".to_owned(),
        )),
    }
}

fn row(ledger: &Ledger, key: &LimitKey) -> Result<Option<LimitRow>, LimitError> {
    let rows = ledger.limits().map_err(unreadable)?;
    Ok(rows.into_iter().find(|row| row.key == *key))
}

fn entry(ledger: &Ledger, row: &LimitRow) -> LimitEntry {
    let (key, name) = key_text(&row.key);
    let countable = match row.key {
        LimitKey::Ceiling
        | LimitKey::OverHeadroom
        | LimitKey::DefaultUser
        | LimitKey::DefaultDatabase => false,
        LimitKey::MaxConnections
        | LimitKey::MaxPending
        | LimitKey::User(_)
        | LimitKey::Database(_)
        | LimitKey::Backend(_)
        | LimitKey::Listener(_) => true,
    };
    LimitEntry {
        key: key.to_owned(),
        name,
        limit: row.limit.into(),
        used: countable.then_some(row.used),
        source: row.source.label().to_owned(),
        inactive: !ledger.is_kernel() && is_of_sockets(&row.key),
    }
}

/// Limits on sockets are enforced by the kernel plane alone.
const fn is_of_sockets(key: &LimitKey) -> bool {
    matches!(
        key,
        LimitKey::Ceiling | LimitKey::OverHeadroom | LimitKey::Listener(_)
    )
}

/// Names that merely connected once, with no limit of their own, are noise.
fn is_shown(row: &LimitRow) -> bool {
    let named = matches!(row.key, LimitKey::User(_) | LimitKey::Database(_));
    !named || row.used > 0 || row.source != LimitSource::Default
}

fn unreadable(error: std::io::Error) -> LimitError {
    LimitError(format!("the table of names cannot be read: {error}"))
}
