//! Limits against what the file descriptors allow.
//!
//! A limit that cannot be reached lies: clients would be refused below it, for
//! want of descriptors. So a configuration with such a number is no
//! configuration for this host, and `gatectl` does not set one. The numbers that
//! nobody wrote, the defaults of `max_connections` and `max_pending`, are lowered
//! instead.
//!
//! Every connection has the descriptors of a session from its accept on, its own
//! and its backend's, until it is refused or has ended: whoever is admitted is
//! never refused for want of the second. So clients that are pending and
//! those that wait for a slot count as sessions do.
#![forbid(unsafe_code)]

use std::fmt;

use gate_common::abi::slot;
use gate_common::limit::{Limit, Setting};

use crate::config::{Config, ConfigError, name};
use crate::host::{FDS_PER_SESSION, FdBudget};
use crate::ledger::Ledger;

/// What `max_pending` is not lowered below, if that is no more than half of the
/// connections that there can be.
const PENDING_MIN: u64 = 16;
/// Of the connections that there can be so many may be pending, unless somebody
/// wrote how many: 1 of this.
const PENDING_SHARE: u64 = 4;

/// Clients that may be there beside the sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Beside {
    /// That have not said what they want; 0 if nobody bounds them.
    pub pending: u64,
    /// That wait for a slot.
    pub waiting: u64,
}

impl Beside {
    /// Beside the sessions of this configuration.
    fn configured(config: &Config) -> Self {
        let pending = match config.limits.max_pending {
            Setting::AtMost(number) => number,
            _ => 0,
        };
        Self {
            pending,
            waiting: config.limits.waits.promised(),
        }
    }

    /// By the limits that are in force.
    #[must_use]
    pub fn in_force(ledger: &Ledger) -> Self {
        let number = |limit| match limit {
            Limit::AtMost(number) => number,
            Limit::Unlimited | Limit::None => 0,
        };
        Self {
            pending: number(ledger.max_pending()),
            waiting: number(ledger.plain_limit(slot::WAITING)),
        }
    }

    /// How many sessions so many descriptors leave room for.
    #[must_use]
    pub const fn room(self, descriptors: u64) -> u64 {
        (descriptors / FDS_PER_SESSION).saturating_sub(self.pending.saturating_add(self.waiting))
    }

    /// Descriptors of so many sessions and all these.
    #[must_use]
    pub const fn descriptors(self, sessions: u64) -> u64 {
        sessions
            .saturating_add(self.pending)
            .saturating_add(self.waiting)
            .saturating_mul(FDS_PER_SESSION)
    }
}

/// Goes on after a count of descriptors.
impl fmt::Display for Beside {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (count, who) in [
            (self.pending, "pending clients (max_pending)"),
            (self.waiting, "waiting clients (max_waiting)"),
        ] {
            if count > 0 {
                let descriptors = count.saturating_mul(FDS_PER_SESSION);
                write!(out, ", {count} {who} {descriptors}")?;
            }
        }
        Ok(())
    }
}

/// The configuration as this host can run it.
///
/// # Errors
/// [`ConfigError::Invalid`] for the first limit that needs more descriptors than
/// there are, with the numbers.
pub fn fit(config: &Config, budget: &FdBudget) -> Result<Config, ConfigError> {
    let mut fitted = config.clone();
    let waiting = config.limits.waits.promised();
    let limits = &mut fitted.limits;
    if limits.max_pending_auto
        && let Setting::AtMost(default) = limits.max_pending
    {
        let beside = Beside {
            pending: 0,
            waiting,
        };
        let left = beside
            .room(budget.sessions)
            .saturating_sub(most_sessions(config).max(1));
        let most = budget.sessions_max();
        let least = PENDING_MIN.min(most / 2).max(1);
        let share = left.min(most / PENDING_SHARE);
        limits.max_pending = Setting::AtMost(default.min(share.max(least)));
    }
    let beside = Beside::configured(&fitted);
    let room = beside.room(budget.sessions);
    if room == 0 {
        return Err(crowded(&fitted, beside, budget));
    }
    let limits = &mut fitted.limits;
    if let Setting::AtMost(default) = limits.max_connections
        && limits.max_connections_auto
        && default > room
    {
        limits.max_connections = Setting::AtMost(room);
    }
    for (setting, limit) in written(&fitted) {
        if let Setting::AtMost(wanted) = limit
            && wanted > room
        {
            return Err(over(setting, wanted, beside, budget));
        }
    }
    Ok(fitted)
}

/// The largest number of sessions that somebody wrote.
fn most_sessions(config: &Config) -> u64 {
    let numbers = written(config).into_iter().map(|(_, limit)| match limit {
        Setting::AtMost(number) => number,
        _ => 0,
    });
    // The first is `max_connections`.
    let nobody_wrote = usize::from(config.limits.max_connections_auto);
    numbers.skip(nobody_wrote).max().unwrap_or(0)
}

/// Every limit on sessions, by its path in the file.
fn written(config: &Config) -> Vec<(String, Setting)> {
    let limits = &config.limits;
    let mut all = vec![
        ("limits.max_connections".to_owned(), limits.max_connections),
        ("limits.default_user".to_owned(), limits.default_user),
        (
            "limits.default_database".to_owned(),
            limits.default_database,
        ),
    ];
    for (table, by_name) in [("user", &limits.user), ("database", &limits.database)] {
        let named = by_name.iter().map(|(name, limit)| {
            let path = format!("limits.{table}.{}", name::escape(name));
            (path, *limit)
        });
        all.extend(named);
    }
    all.extend(config.backends.iter().map(|backend| {
        let path = format!("backend.{}.max_connections", backend.name);
        (path, backend.max_connections)
    }));
    all
}

fn over(setting: String, wanted: u64, beside: Beside, budget: &FdBudget) -> ConfigError {
    let room = beside.room(budget.sessions);
    ConfigError::Invalid {
        setting,
        cause: format!(
            "{wanted} sessions need {} file descriptors{beside}, {FDS_PER_SESSION} each, and {}",
            wanted.saturating_mul(FDS_PER_SESSION),
            there_are(budget),
        ),
        cure: format!(
            "set it to {room} or less, or to 0 (unlimited), {}or raise RLIMIT_NOFILE (ulimit -Hn, or \
             LimitNOFILE= in the unit) by {}",
            if beside == Beside::default() {
                ""
            } else {
                "or lower the others, "
            },
            beside.descriptors(wanted).saturating_sub(budget.sessions),
        ),
    }
}

/// Without a descriptor for a single session.
fn crowded(config: &Config, beside: Beside, budget: &FdBudget) -> ConfigError {
    let Beside { pending, waiting } = beside;
    let both = budget.sessions_max().saturating_sub(1);
    let wrote_pending = !config.limits.max_pending_auto && pending >= waiting;
    let room = both.saturating_sub(waiting);
    let waiting_room = both.saturating_sub(pending);
    let (setting, cure) = if wrote_pending && room > 0 {
        let cure = format!("set it to {room} or less, or to 0 (unlimited)");
        ("limits.max_pending", cure)
    } else if waiting_room > 0 {
        let cure = format!("lower max_waiting to {waiting_room} or less in all");
        ("limits", cure)
    } else {
        let cure = format!("lower max_waiting and max_pending to {both} or less together");
        ("limits", cure)
    };
    ConfigError::Invalid {
        setting: setting.to_owned(),
        cause: format!(
            "clients that are no sessions yet need descriptors{beside}, {FDS_PER_SESSION} each, and {}: \
             not one is left for a session",
            there_are(budget),
        ),
        cure: format!(
            "{cure}, or raise RLIMIT_NOFILE (ulimit -Hn, or LimitNOFILE= in the unit) by {} at least",
            beside.descriptors(1).saturating_sub(budget.sessions),
        ),
    }
}

fn there_are(budget: &FdBudget) -> String {
    let FdBudget {
        limit, sessions, ..
    } = *budget;
    format!(
        "there are {sessions} for connections: RLIMIT_NOFILE (hard) is {limit}, of which gate keeps {} \
         for itself",
        limit.saturating_sub(sessions)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 100 connections of 256 descriptors.
    const BUDGET: FdBudget = FdBudget {
        limit: 256,
        sessions: 201,
        pipes: 2,
    };
    const BACKEND: &str = "[backend.default]\naddress = \"127.0.0.1:5432\"\n";

    fn fitted(toml: &str) -> Result<Config, String> {
        let config = Config::from_toml(toml).expect(toml);
        fit(&config, &BUDGET).map_err(|error| error.to_string())
    }

    fn assert_refused(toml: &str, parts: &[&str]) {
        let error = fitted(toml).expect_err(toml);
        for part in parts {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn a_limit_that_cannot_be_reached_is_refused_with_the_numbers() {
        let no_pending = "[limits]\nmax_pending = 0\n";
        let table = [
            (
                "limits.max_connections",
                format!("{no_pending}max_connections = 101"),
            ),
            (
                "limits.default_user",
                format!("{no_pending}default_user = 101"),
            ),
            (
                "limits.default_database",
                format!("{no_pending}default_database = 101"),
            ),
            (
                "limits.user.app",
                format!("{no_pending}[limits.user]\napp = 101"),
            ),
            (
                "limits.user.a\\xff",
                format!("{no_pending}[limits.user]\n'a\\xff' = {{ max = 101 }}"),
            ),
            (
                "limits.database.prod",
                format!("{no_pending}[limits.database]\nprod = 101"),
            ),
            (
                "backend.default.max_connections",
                format!("{no_pending}{BACKEND}max_connections = 101"),
            ),
        ];
        for (path, toml) in table {
            let error = fitted(&toml).expect_err(&toml);
            assert!(error.starts_with(&format!("{path}: ")), "{error}");
            let parts = [
                "101 sessions need 202 file descriptors, 2 each",
                "are 201 for connections",
                "(hard) is 256",
                "keeps 55 ",
                "to 100 or less",
                "by 1",
                "LimitNOFILE=",
            ];
            assert_refused(&toml, &parts);
            fitted(&toml.replace("101", "100")).expect("100 fit");
        }
    }

    #[test]
    fn who_is_pending_or_waits_counts_as_sessions_do() {
        let toml = "[limits]\nmax_pending = 30\nmax_connections = 51\n\
                    default_user = { max = 20, wait = \"1s\", max_waiting = 20 }";
        assert_refused(
            toml,
            &[
                "limits.max_connections: 51 sessions need 102 file descriptors",
                ", 30 pending clients (max_pending) 60",
                ", 20 waiting clients (max_waiting) 40, 2 each",
                "to 50 or less",
                "or lower the others",
                "by 1",
            ],
        );
        let fits = |toml: &str| fitted(toml).expect(toml);
        fits(&toml.replace("51", "50"));
        fits(&toml.replace("= 30", "= 29"));
        fits(&toml.replace("max_waiting = 20", "max_waiting = 19"));
        assert_refused(
            "[limits]\nmax_connections = 0\nmax_pending = 100",
            &[
                "limits.max_pending: ",
                "100 pending clients (max_pending) 200, 2 each",
                "not one is left for a session",
                "to 99 or less, or to 0 (unlimited)",
                "by 1 at least",
            ],
        );
        fits("[limits]\nmax_connections = 0\nmax_pending = 99");
    }

    #[test]
    fn the_cure_for_a_crowd_is_one() {
        let waits = |pending: &str, waiting: u64| {
            format!(
                "[limits]\nmax_pending = {pending}\n\
                 max_connections = {{ max = 0, wait = \"1s\", max_waiting = {waiting} }}"
            )
        };
        let table = [
            (
                "100",
                40,
                "limits.max_pending: ",
                "set it to 59 or less",
                ("59", 40),
            ),
            (
                "60",
                40,
                "limits.max_pending: ",
                "set it to 59 or less",
                ("0", 40),
            ),
            (
                "40",
                60,
                "limits: ",
                "lower max_waiting to 59 or less in all",
                ("40", 59),
            ),
            (
                "1",
                100,
                "limits: ",
                "lower max_waiting to 98 or less in all",
                ("1", 98),
            ),
            (
                "0",
                100,
                "limits: ",
                "lower max_waiting to 99 or less in all",
                ("0", 99),
            ),
            (
                "\"auto\"",
                90,
                "limits: ",
                "to 83 or less in all",
                ("\"auto\"", 83),
            ),
            (
                "100",
                100,
                "limits: ",
                "max_pending to 99 or less together",
                ("50", 49),
            ),
        ];
        for (pending, waiting, setting, cure, cured) in table {
            let toml = waits(pending, waiting);
            assert_refused(&toml, &[setting, cure, "not one is left for a session"]);
            fitted(&waits(cured.0, cured.1)).expect(cure);
        }
        // What nobody wrote leaves room for one session at least.
        for waiting in 0..=83 {
            fitted(&waits("\"auto\"", waiting)).expect("fits");
        }
    }

    #[test]
    fn the_defaults_are_lowered_and_no_limit_is_none() {
        let most = |toml: &str| {
            let limits = fitted(toml).expect(toml).limits;
            (limits.max_connections, limits.max_pending)
        };
        let at = Setting::AtMost;
        assert_eq!(most(""), (at(75), at(25)));
        assert_eq!(
            most("[limits]\nmax_connections = \"auto\"\nmax_pending = \"auto\""),
            (at(75), at(25))
        );
        assert_eq!(
            most("[limits]\nmax_connections = 0"),
            (Setting::Unlimited, at(25))
        );
        assert_eq!(
            most("[limits]\nmax_connections = \"none\""),
            (Setting::None, at(25))
        );
        // What is written is kept, and the others have the rest.
        assert_eq!(most("[limits]\nmax_connections = 80"), (at(80), at(20)));
        assert_eq!(most("[limits]\nmax_connections = 84"), (at(84), at(16)));
        assert_refused("[limits]\nmax_connections = 85", &["to 84 or less"]);
        assert_eq!(most("[limits]\ndefault_user = 80"), (at(80), at(20)));
        assert_eq!(most("[limits]\nmax_pending = 60"), (at(40), at(60)));
        assert_eq!(
            most("[limits]\nmax_pending = 0"),
            (at(100), Setting::Unlimited)
        );
        assert_eq!(
            most("[limits]\nmax_connections = { max = \"auto\", wait = \"1s\" }"),
            (at(59), at(25))
        );
        let config = Config::from_toml("").expect("valid");
        let large = FdBudget {
            limit: 20_000,
            pipes: 0,
            sessions: 12_000,
        };
        assert_eq!(fit(&config, &large).expect("fits"), config);
        // Down to the smallest budget there is.
        for (sessions, most) in [(4, (at(1), at(1))), (9, (at(2), at(2)))] {
            let small = FdBudget { sessions, ..BUDGET };
            let limits = fit(&config, &small).expect("fits").limits;
            assert_eq!((limits.max_connections, limits.max_pending), most);
        }
    }
}
