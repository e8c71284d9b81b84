//! A limit that admission holds sessions against, and how long a client may
//! wait for a place under it.
//!
//! It is written as a plain limit, or as a table with `max`, `wait` and
//! `max_waiting`.
#![forbid(unsafe_code)]

use std::fmt;
use std::time::Duration;

use gate_common::limit::Setting;
use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

use super::value::{DurationValue, LimitValue};

/// The longest wait: a pool that waits longer has given up long ago.
pub const WAIT_MAX: Duration = Duration::from_secs(60);
/// As many may wait at least, unless `max_waiting` says less.
const WAITING_DEFAULT_MIN: u32 = 16;

/// What becomes of clients that a limit refuses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitPolicy {
    /// How long one may wait for a place; zero refuses at once.
    pub wait: Duration,
    /// How many may wait for this limit at the same time.
    pub max_waiting: u32,
    /// For so many of them descriptors are set aside: all, if somebody wrote how
    /// many. What all limits set aside is one room, first come, first served: who
    /// waits for another limit may have taken it.
    pub promised: u32,
}

impl WaitPolicy {
    /// Whether anybody may wait at all.
    #[must_use]
    pub const fn waits(&self) -> bool {
        !self.wait.is_zero() && self.max_waiting > 0
    }
}

/// See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimit {
    /// The limit itself.
    pub max: LimitValue,
    /// How long a client may wait.
    pub wait: DurationValue,
    /// How many may; `None` for what [`SessionLimit::policy`] says.
    pub max_waiting: Option<u32>,
}

impl SessionLimit {
    /// The policy, its default filled in.
    #[must_use]
    pub fn policy(&self) -> WaitPolicy {
        let by_limit = match self.max.0 {
            Setting::AtMost(number) => u32::try_from(number).unwrap_or(u32::MAX),
            Setting::Inherit | Setting::Unlimited | Setting::None | Setting::Auto => 0,
        };
        WaitPolicy {
            wait: self.wait.0,
            max_waiting: self
                .max_waiting
                .unwrap_or(by_limit.max(WAITING_DEFAULT_MIN)),
            promised: self.max_waiting.unwrap_or(WAITING_DEFAULT_MIN),
        }
    }
}

impl From<LimitValue> for SessionLimit {
    fn from(max: LimitValue) -> Self {
        Self {
            max,
            wait: DurationValue(Duration::ZERO),
            max_waiting: None,
        }
    }
}

impl From<Setting> for SessionLimit {
    fn from(max: Setting) -> Self {
        LimitValue(max).into()
    }
}

impl<'de> Deserialize<'de> for SessionLimit {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        source.deserialize_any(SessionLimitVisitor)
    }
}

struct SessionLimitVisitor;

impl<'de> Visitor<'de> for SessionLimitVisitor {
    type Value = SessionLimit;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(
            "a number, a string, or a table such as { max = 50, wait = \"200ms\", max_waiting = 100 }",
        )
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<SessionLimit, E> {
        LimitValue::from_integer(number.into())
            .map(SessionLimit::from)
            .map_err(E::custom)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<SessionLimit, E> {
        LimitValue::from_integer(number.into())
            .map(SessionLimit::from)
            .map_err(E::custom)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<SessionLimit, E> {
        text.parse::<LimitValue>()
            .map(SessionLimit::from)
            .map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<SessionLimit, A::Error> {
        let table = SessionLimitTable::deserialize(MapAccessDeserializer::new(map))?;
        let wait = table.wait.unwrap_or(DurationValue(Duration::ZERO));
        if wait.0 > WAIT_MAX {
            return Err(A::Error::custom(format!(
                "a wait of {wait} is too long: at most {}",
                DurationValue(WAIT_MAX)
            )));
        }
        let Some(max) = table.max else {
            return Err(A::Error::custom(
                "a wait is for a limit, which is missing: { max = 50, wait = \"200ms\" }",
            ));
        };
        if wait.0.is_zero() && table.max_waiting.is_some() {
            return Err(A::Error::custom(
                "max_waiting without a wait lets nobody wait: add wait = \"200ms\", or leave it out",
            ));
        }
        Ok(SessionLimit {
            max,
            wait,
            max_waiting: table.max_waiting,
        })
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SessionLimitTable {
    max: Option<LimitValue>,
    wait: Option<DurationValue>,
    max_waiting: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, render, settings::Settings};

    fn read(value: &str) -> Result<SessionLimit, String> {
        let text = format!("[limits.user]\napp = {value}");
        let settings: Settings = toml::from_str(&text).map_err(|error| error.to_string())?;
        Ok(settings.limits.user["app"])
    }

    #[test]
    fn a_limit_is_written_as_before_or_with_its_wait() {
        let policy = |value: &str| {
            let limit = read(value).expect(value);
            (
                limit.max.0,
                limit.policy().wait.as_millis(),
                limit.policy().max_waiting,
            )
        };
        let at = Setting::AtMost;
        assert_eq!(policy("50"), (at(50), 0, 50));
        assert_eq!(policy("0"), (Setting::Unlimited, 0, 16));
        assert_eq!(policy("\"none\""), (Setting::None, 0, 16));
        assert_eq!(policy("{ max = 50 }"), (at(50), 0, 50));
        assert_eq!(policy("{ max = 5, wait = \"200ms\" }"), (at(5), 200, 16));
        assert_eq!(
            policy("{ max = \"none\", wait = \"60s\", max_waiting = 3 }"),
            (Setting::None, 60_000, 3)
        );
        assert!(
            !read("{ max = 5, wait = \"1s\", max_waiting = 0 }")
                .unwrap()
                .policy()
                .waits()
        );
        assert!(!read("5").unwrap().policy().waits());
    }

    #[test]
    fn what_cannot_be_is_refused_with_its_line() {
        let table = [
            ("-1", "not a limit"),
            ("true", "expected a number"),
            ("{ wait = \"1s\" }", "max"),
            ("{ max = 5, wait = \"61s\" }", "at most 1m"),
            ("{ max = 5, wait = 3 }", "its unit"),
            ("{ max = 5, waits = \"1s\" }", "waits"),
            ("{ max = 5, max_waiting = -1 }", "u32"),
            ("{ max = 5, max_waiting = 3 }", "add wait"),
        ];
        for (value, complaint) in table {
            let error = read(value).expect_err(value);
            assert!(error.contains(complaint), "{value}: {error}");
            assert!(error.contains("line 2"), "{value}: {error}");
        }
    }

    #[test]
    fn a_wait_is_printed_so_that_it_reads_back() {
        for value in [
            "5",
            "{ max = 5, wait = \"1s 5ms\" }",
            "{ max = 0, wait = \"1s\", max_waiting = 0 }",
        ] {
            let text = format!("[limits]\nmax_connections = {value}\n[limits.user]\napp = {value}");
            let settings: Settings = toml::from_str(&text).expect("valid");
            let printed = render::to_toml(&settings);
            assert!(printed.contains(&format!("app = {value}\n")), "{printed}");
            let back: Settings = toml::from_str(&printed).expect("valid");
            assert_eq!(back, settings);
        }
    }

    #[test]
    fn the_policy_is_that_of_the_limit_which_refused() {
        let waits = Config::from_toml(
            "[limits]\nmax_connections = { max = 9, wait = \"1ms\" }\n\
             default_user = { max = 9, wait = \"2ms\" }\n\
             default_database = { max = 9, wait = \"3ms\" }\n\
             [limits.user]\napp = { max = 9, wait = \"4ms\" }\nplain = 5\n\
             [limits.database]\nprod = { max = 9, wait = \"5ms\" }\n\
             [backend.default]\naddress = \"127.0.0.1:5432\"\n\
             max_connections = { max = 9, wait = \"6ms\" }",
        )
        .expect("valid")
        .limits
        .waits;
        use crate::admission::WaitsFor;
        let table = [
            (WaitsFor::Total, 1),
            (WaitsFor::User(b"app".to_vec()), 4),
            (WaitsFor::User(b"plain".to_vec()), 0),
            (WaitsFor::User(b"other".to_vec()), 2),
            (WaitsFor::Database(b"prod".to_vec()), 5),
            (WaitsFor::Database(b"other".to_vec()), 3),
            (WaitsFor::Backend(b"default".to_vec()), 6),
            (WaitsFor::Backend(b"gone".to_vec()), 0),
        ];
        for (limit, milliseconds) in table {
            let policy = waits.policy(&limit);
            assert_eq!(policy.wait.as_millis(), milliseconds, "{limit:?}");
        }
    }

    #[test]
    fn room_is_set_aside_for_so_many_as_somebody_wrote() {
        let promised = |toml: &str| Config::from_toml(toml).expect(toml).limits.waits.promised();
        let backend = "[backend.default]\naddress = \"127.0.0.1:5432\"\n";
        let table = [
            ("", 0),
            (
                "[limits]\nmax_connections = { max = 900, wait = \"1s\" }",
                16,
            ),
            (
                "[limits]\nmax_connections = { max = 9, wait = \"1s\", max_waiting = 30 }\n\
                 default_user = { max = 9, wait = \"1s\", max_waiting = 5 }\n\
                 default_database = { max = 500 }\n\
                 [limits.user]\na = { max = 9, wait = \"1s\", max_waiting = 3 }\n\
                 b = { max = 9, wait = \"1s\" }",
                54,
            ),
            (
                &format!(
                    "{backend}max_connections = {{ max = 9, wait = \"1s\", max_waiting = 7 }}"
                ),
                7,
            ),
        ];
        for (toml, count) in table {
            assert_eq!(promised(toml), count, "{toml}");
        }
    }
}
