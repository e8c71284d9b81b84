//! Limits against what the file descriptors allow.
//!
//! A limit that cannot be reached lies: clients would be refused below it, for
//! want of descriptors. So a configuration with such a number is no
//! configuration for this host, and `gatectl` does not set one. The number that
//! nobody wrote, the default of `max_connections`, is lowered instead.
#![forbid(unsafe_code)]

use gate_common::limit::Setting;

use crate::config::{Config, ConfigError, name};
use crate::host::{FDS_PER_SESSION, FdBudget};

/// The configuration as this host can run it.
///
/// # Errors
/// [`ConfigError::Invalid`] for the first limit that needs more descriptors than
/// there are, with the numbers.
pub fn fit(config: &Config, budget: &FdBudget) -> Result<Config, ConfigError> {
    let mut fitted = config.clone();
    let limits = &mut fitted.limits;
    if let Setting::AtMost(default) = limits.max_connections
        && limits.max_connections_auto
        && default > budget.sessions_max()
    {
        limits.max_connections = Setting::AtMost(budget.sessions_max());
    }
    for (setting, limit) in written(&fitted) {
        if let Setting::AtMost(wanted) = limit
            && wanted > budget.sessions_max()
        {
            return Err(over(setting, wanted, budget));
        }
    }
    Ok(fitted)
}

/// `max_pending`, if so many silent connections would use up the descriptors: then
/// newcomers are refused, and nobody is evicted for them.
#[must_use]
pub fn pending_beyond(config: &Config, budget: &FdBudget) -> Option<u64> {
    let pending = match config.limits.max_pending {
        Setting::AtMost(number) => number,
        // 0 in the file: without a bound on purpose.
        Setting::Unlimited | Setting::None | Setting::Auto | Setting::Inherit => return None,
    };
    (pending >= budget.sessions_max()).then_some(pending)
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

fn over(setting: String, wanted: u64, budget: &FdBudget) -> ConfigError {
    let FdBudget {
        limit, sessions, ..
    } = *budget;
    ConfigError::Invalid {
        setting,
        cause: format!(
            "{wanted} sessions need {} file descriptors, {FDS_PER_SESSION} each, and there are \
             {sessions} for sessions: RLIMIT_NOFILE (hard) is {limit}, of which gate keeps {} for itself",
            wanted.saturating_mul(FDS_PER_SESSION),
            limit.saturating_sub(sessions),
        ),
        cure: format!(
            "set it to {} or less, or to 0 (unlimited), or raise RLIMIT_NOFILE (ulimit -Hn, or \
             LimitNOFILE= in the unit) by {}",
            budget.sessions_max(),
            wanted
                .saturating_mul(FDS_PER_SESSION)
                .saturating_sub(sessions),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 100 sessions of 256 descriptors.
    const BUDGET: FdBudget = FdBudget {
        limit: 256,
        sessions: 201,
        pipes: 2,
    };

    fn fitted(toml: &str) -> Result<Config, String> {
        let config = Config::from_toml(toml).expect(toml);
        fit(&config, &BUDGET).map_err(|error| error.to_string())
    }

    #[test]
    fn a_limit_that_cannot_be_reached_is_refused_with_the_numbers() {
        let backend = "[backend.default]\naddress = \"127.0.0.1:5432\"\n";
        let table = [
            (
                "limits.max_connections",
                "[limits]\nmax_connections = 101".to_owned(),
            ),
            (
                "limits.default_user",
                "[limits]\ndefault_user = 101".to_owned(),
            ),
            (
                "limits.default_database",
                "[limits]\ndefault_database = 101".to_owned(),
            ),
            ("limits.user.app", "[limits.user]\napp = 101".to_owned()),
            (
                "limits.user.a\\xff",
                "[limits.user]\n'a\\xff' = { max = 101 }".to_owned(),
            ),
            (
                "limits.database.prod",
                "[limits.database]\nprod = 101".to_owned(),
            ),
            (
                "backend.default.max_connections",
                format!("{backend}max_connections = 101"),
            ),
        ];
        for (path, toml) in table {
            let error = fitted(&toml).expect_err(&toml);
            assert!(error.starts_with(&format!("{path}: ")), "{error}");
            for part in [
                "101 sessions need 202 ",
                "are 201 for sessions",
                "(hard) is 256",
                "keeps 55 ",
                "to 100 or less",
                "by 1",
                "LimitNOFILE=",
            ] {
                assert!(error.contains(part), "{part}: {error}");
            }
            fitted(&toml.replace("101", "100")).expect("100 fit");
        }
    }

    #[test]
    fn silent_connections_that_use_up_the_descriptors_are_told_of() {
        let pending = |toml: &str| {
            let config = Config::from_toml(toml).expect(toml);
            pending_beyond(&config, &BUDGET)
        };
        assert_eq!(pending(""), Some(1000));
        assert_eq!(pending("[limits]\nmax_pending = 100"), Some(100));
        assert_eq!(pending("[limits]\nmax_pending = 99"), None);
        assert_eq!(pending("[limits]\nmax_pending = 0"), None);
    }

    #[test]
    fn the_default_is_lowered_and_no_limit_is_none() {
        let most = |toml: &str| fitted(toml).expect(toml).limits.max_connections;
        assert_eq!(most(""), Setting::AtMost(100));
        assert_eq!(
            most("[limits]\nmax_connections = \"auto\""),
            Setting::AtMost(100)
        );
        assert_eq!(most("[limits]\nmax_connections = 0"), Setting::Unlimited);
        assert_eq!(most("[limits]\nmax_connections = \"none\""), Setting::None);
        let config = Config::from_toml("").expect("valid");
        let large = FdBudget {
            limit: 20_000,
            pipes: 0,
            sessions: 10_000,
        };
        assert_eq!(fit(&config, &large).expect("fits"), config);
    }
}
