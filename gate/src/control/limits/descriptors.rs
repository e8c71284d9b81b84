//! Limits in force against the file descriptors: what [`crate::budget::fit`] is
//! to a configuration.
#![forbid(unsafe_code)]

use std::fmt;

use gate_common::abi::slot;
use gate_common::limit::{Limit, Setting};

use super::{LimitError, key_text, row, unreadable};
use crate::budget::Beside;
use crate::host::FDS_PER_SESSION;
use crate::ledger::{Ledger, LimitKey};

/// Says no to a limit that the descriptors do not allow beside the others. What is
/// not above the limit in force is never refused: it makes nothing worse.
pub(super) fn check(ledger: &Ledger, key: &LimitKey, value: Setting) -> Result<(), LimitError> {
    let of_sessions = is_of_sessions(key);
    if !of_sessions && *key != LimitKey::MaxPending {
        return Ok(());
    }
    let (Setting::AtMost(wanted), Limit::AtMost(cap)) = (value, ledger.plain_limit(slot::FD_CAP))
    else {
        return Ok(());
    };
    let now = in_force(ledger, key)?;
    if matches!(now, Limit::AtMost(now) if wanted <= now) {
        return Ok(());
    }
    let of = |count: u64| count.saturating_mul(FDS_PER_SESSION);
    let beside = Beside::in_force(ledger);
    let (room, need, mut others) = if of_sessions {
        let need = format!("so many sessions need {} of them{beside}", of(wanted));
        let pending = (beside.pending > 0).then(|| "max-pending".to_owned());
        (beside.room(cap), need, Vec::from_iter(pending))
    } else {
        // Less than unlimited is whatever leaves room for one.
        let most = match now {
            Limit::Unlimited => Most::default(),
            _ => most_sessions(ledger).map_err(unreadable)?,
        };
        let sessions = most.sessions.max(1);
        let beside = Beside {
            pending: 0,
            ..beside
        };
        let need = format!(
            "so many pending clients need {} of them, {sessions} {} {}{beside}",
            of(wanted),
            if sessions == 1 { "session" } else { "sessions" },
            of(sessions)
        );
        let room = beside.room(cap).saturating_sub(sessions);
        (room, need, Vec::from_iter(most.limit()))
    };
    if wanted <= room {
        return Ok(());
    }
    if beside.waiting > 0 {
        others.push("max_waiting in the configuration".to_owned());
    }
    let (text, _) = key_text(key);
    let cure = match room {
        0 if others.is_empty() => String::new(),
        0 => format!("lower {}, or ", others.join(" or ")),
        _ => format!("set it to {room} or less, or "),
    };
    Err(LimitError(format!(
        "{text} {wanted} is more than the file descriptors of gate allow: {need}, \
         {FDS_PER_SESSION} each, and gate has {cap} for connections beside its own; {cure}raise \
         RLIMIT_NOFILE (LimitNOFILE=) and start gate again"
    )))
}

/// Says in the log what [`excess`] finds.
pub fn warn_of_excess(ledger: &Ledger) {
    match excess(ledger) {
        Ok(None) => {}
        Ok(Some(excess)) => tracing::warn!("{excess}"),
        Err(error) => tracing::error!("{error}"),
    }
}

/// Limits in force that are more than the descriptors allow: each was in order
/// when it was set, but a start, a reload or another limit changed what it is
/// beside.
///
/// # Errors
/// The table of names could not be read.
pub fn excess(ledger: &Ledger) -> Result<Option<Excess>, LimitError> {
    let Limit::AtMost(cap) = ledger.plain_limit(slot::FD_CAP) else {
        return Ok(None);
    };
    let most = most_sessions(ledger).map_err(unreadable)?;
    let beside = Beside::in_force(ledger);
    let excess = Excess { most, beside, cap };
    Ok((excess.most.sessions.max(1) > excess.room()).then_some(excess))
}

/// More sessions than there is room for; its text is a warning for people.
#[derive(Debug)]
pub struct Excess {
    most: Most,
    beside: Beside,
    cap: u64,
}

impl Excess {
    const fn room(&self) -> u64 {
        self.beside.room(self.cap)
    }
}

impl fmt::Display for Excess {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { most, beside, cap } = self;
        out.write_str("the limits in force are more than the file descriptors of gate allow: ")?;
        let sessions = most.sessions.max(1);
        let descriptors = sessions.saturating_mul(FDS_PER_SESSION);
        match most.limit() {
            Some(limit) => write!(out, "sessions ({limit}) {descriptors}")?,
            None => write!(out, "a session {descriptors}")?,
        }
        write!(
            out,
            "{beside}, {FDS_PER_SESSION} each, and gate has {cap} for connections beside its own; \
             clients beyond {} sessions may be refused with 53300; lower or unset a limit (`gatectl \
             limits list`), or raise RLIMIT_NOFILE (LimitNOFILE=) and start gate again",
            self.room()
        )
    }
}

/// How many sessions the limits in force let in.
#[derive(Debug, Default, PartialEq, Eq)]
struct Most {
    /// 0 if no limit has a number.
    sessions: u64,
    /// The limit that says so.
    key: Option<LimitKey>,
}

impl Most {
    /// The limit as it is written for `gatectl limits set`.
    fn limit(&self) -> Option<String> {
        self.key.as_ref().map(|key| match key_text(key) {
            (key, Some(name)) => format!("{key} {name}"),
            (key, None) => key.to_owned(),
        })
    }
}

/// By the limit on all sessions, or without one by the largest of the others.
fn most_sessions(ledger: &Ledger) -> std::io::Result<Most> {
    if let Limit::AtMost(sessions) = ledger.plain_limit(slot::TOTAL) {
        return Ok(Most {
            sessions,
            key: Some(LimitKey::MaxConnections),
        });
    }
    let rows = ledger.limits()?.into_iter();
    let numbers = rows.filter_map(|row| match row.limit {
        Limit::AtMost(sessions) if is_of_sessions(&row.key) => Some(Most {
            sessions,
            key: Some(row.key),
        }),
        _ => None,
    });
    Ok(numbers.max_by_key(|most| most.sessions).unwrap_or_default())
}

/// A name that nobody knows yet has the limit of its kind.
fn in_force(ledger: &Ledger, key: &LimitKey) -> Result<Limit, LimitError> {
    if let Some(row) = row(ledger, key)? {
        return Ok(row.limit);
    }
    Ok(match key {
        LimitKey::User(_) => ledger.plain_limit(slot::DEFAULT_USER),
        LimitKey::Database(_) => ledger.plain_limit(slot::DEFAULT_DATABASE),
        _ => Limit::Unlimited,
    })
}

/// Limits that admission holds sessions against.
const fn is_of_sessions(key: &LimitKey) -> bool {
    matches!(
        key,
        LimitKey::MaxConnections
            | LimitKey::DefaultUser
            | LimitKey::DefaultDatabase
            | LimitKey::User(_)
            | LimitKey::Database(_)
            | LimitKey::Backend(_)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::ledger::Layer;

    /// With the descriptors of 50 connections.
    fn ledger(toml: &str) -> Ledger {
        let ledger = Ledger::local();
        let config = Config::from_toml(toml).expect(toml);
        ledger.apply_config(&config).expect("applied");
        ledger.set_fd_cap(100);
        ledger
    }

    fn put(ledger: &Ledger, key: &LimitKey, setting: Setting) {
        ledger
            .set_limit(key, Layer::Runtime, setting)
            .expect("stored");
    }

    #[test]
    fn what_is_tighter_than_the_limit_in_force_is_never_refused() {
        let at = Setting::AtMost;
        let app = LimitKey::User(b"app".to_vec());
        // All of it is over the descriptors already, and every number less helps.
        let over = ledger(
            "[limits]\nmax_connections = 80\nmax_pending = 70\ndefault_user = 60\n\
             default_database = { max = 9, wait = \"1s\", max_waiting = 5 }",
        );
        for (key, now) in [
            (LimitKey::MaxConnections, 80),
            (LimitKey::MaxPending, 70),
            (LimitKey::DefaultUser, 60),
            (app, 60),
        ] {
            check(&over, &key, at(now)).expect("as now");
            check(&over, &key, at(now - 1)).expect("less");
            check(&over, &key, at(now + 1)).expect_err("more");
        }
        // Unlimited is more than any number, and leaves no room to the sessions.
        let unlimited = ledger("[limits]\nmax_connections = 50\nmax_pending = 0");
        check(&unlimited, &LimitKey::MaxPending, at(49)).expect("less");
        let error = check(&unlimited, &LimitKey::MaxPending, at(50)).expect_err("no session fits");
        for part in ["1 session 2, 2 each", "set it to 49 or less"] {
            assert!(error.0.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn without_any_room_the_cure_is_the_other_limit() {
        let error = |toml: &str, key: LimitKey| {
            let error = check(&ledger(toml), &key, Setting::AtMost(61)).expect_err(toml);
            assert!(!error.0.contains("0 or less"), "{error}");
            error.0
        };
        let waits = "default_database = { max = 9, wait = \"1s\", max_waiting = 5 }";
        let table = [
            (
                "max_connections = 50\nmax_pending = 1".to_owned(),
                LimitKey::MaxPending,
                "; lower max-connections, or raise",
            ),
            (
                "max_connections = 0\nmax_pending = 1\n[limits.user]\n'a\\xff' = 50".to_owned(),
                LimitKey::MaxPending,
                "; lower user a\\xff, or raise",
            ),
            (
                format!("max_connections = 45\nmax_pending = 1\n{waits}"),
                LimitKey::MaxPending,
                "; lower max-connections or max_waiting in the configuration, or raise",
            ),
            (
                format!("max_connections = 1\nmax_pending = 45\n{waits}"),
                LimitKey::MaxConnections,
                "; lower max-pending or max_waiting in the configuration, or raise",
            ),
        ];
        for (limits, key, cure) in table {
            let error = error(&format!("[limits]\n{limits}"), key);
            assert!(error.contains(cure), "{cure}: {error}");
        }
    }

    #[test]
    fn an_excess_is_seen_however_it_arose() {
        let at = Setting::AtMost;
        let over = |ledger: &Ledger| {
            let excess = excess(ledger).expect("read");
            excess.map(|over| {
                let text = over.to_string();
                assert!(text.contains("gate has 100 for"), "{text}");
                (over.most.limit(), over.most.sessions, over.room())
            })
        };
        let ledger = ledger("[limits]\nmax_connections = 30\nmax_pending = 20");
        assert_eq!(over(&ledger), None);
        put(&ledger, &LimitKey::MaxPending, at(10));
        put(&ledger, &LimitKey::MaxConnections, at(40));
        assert_eq!(over(&ledger), None);
        // As by an unset.
        put(&ledger, &LimitKey::MaxPending, Setting::Inherit);
        let total = Some("max-connections".to_owned());
        assert_eq!(over(&ledger), Some((total, 40, 30)));
        put(&ledger, &LimitKey::MaxConnections, Setting::Inherit);
        assert_eq!(over(&ledger), None);
        // As by a reload: it fits by itself, but not beside a runtime limit.
        put(&ledger, &LimitKey::User(b"app".to_vec()), at(30));
        let toml = "[limits]\nmax_connections = 0\nmax_pending = 25";
        let config = Config::from_toml(toml).expect("valid");
        ledger.apply_config(&config).expect("applied");
        assert_eq!(over(&ledger), Some((Some("user app".to_owned()), 30, 25)));
        // Not even one session.
        put(&ledger, &LimitKey::User(b"app".to_vec()), Setting::Inherit);
        assert_eq!(over(&ledger), None);
        put(&ledger, &LimitKey::MaxPending, at(50));
        assert_eq!(over(&ledger), Some((None, 0, 0)));
    }
}
