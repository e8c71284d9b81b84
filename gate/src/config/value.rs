//! Single values of the configuration: how each is written and read back.
//!
//! The same text form serves the file, the environment, the command lines and
//! `gatectl`. Errors raised here while a file is read carry its line.
#![forbid(unsafe_code)]

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use gate_common::limit::Setting;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};

use super::shape;

/// The longest duration that a setting takes.
const DURATION_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// A limit: a number (0 is unlimited), `unlimited` or `none`; where a limit
/// can be derived also `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitValue(pub Setting);

impl LimitValue {
    /// Checks a number as people write it.
    ///
    /// # Errors
    /// A message if it is negative or does not fit 32 bits.
    pub fn from_integer(number: i128) -> Result<Self, String> {
        u32::try_from(number)
            .map(|number| Self(Setting::from_number(u64::from(number))))
            .map_err(|_| {
                format!(
                    "{number} is not a limit: use 0 (unlimited) to {}, or \"none\" to refuse everybody",
                    u32::MAX
                )
            })
    }
}

impl FromStr for LimitValue {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "unlimited" => Ok(Self(Setting::Unlimited)),
            "none" => Ok(Self(Setting::None)),
            "auto" => Ok(Self(Setting::Auto)),
            _ => text
                .parse()
                .map_err(|_| format!("`{text}` is not a limit: use a number (0 is unlimited), `unlimited` or `none`"))
                .and_then(Self::from_integer),
        }
    }
}

impl fmt::Display for LimitValue {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Setting::Inherit => out.write_str("inherit"),
            Setting::Unlimited => out.write_str("unlimited"),
            Setting::None => out.write_str("none"),
            Setting::Auto => out.write_str("auto"),
            Setting::AtMost(number) => number.fmt(out),
        }
    }
}

impl<'de> Deserialize<'de> for LimitValue {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        match NumberOrText::deserialize(source)? {
            NumberOrText::Number(number) => Self::from_integer(number.into()),
            NumberOrText::Text(text) => text.parse(),
        }
        .map_err(D::Error::custom)
    }
}

impl Serialize for LimitValue {
    fn serialize<S: serde::Serializer>(&self, sink: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Setting::AtMost(number) => sink.serialize_u64(number),
            Setting::Unlimited => sink.serialize_u64(0),
            Setting::Inherit | Setting::None | Setting::Auto => sink.collect_str(self),
        }
    }
}

/// A duration with its unit, such as `15s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DurationValue(pub Duration);

impl fmt::Display for DurationValue {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_duration(self.0).fmt(out)
    }
}

impl<'de> Deserialize<'de> for DurationValue {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        let text = match NumberOrText::deserialize(source)? {
            NumberOrText::Text(text) => text,
            NumberOrText::Number(number) => {
                let message =
                    format!("a duration needs its unit: \"{number}s\" or \"{number}ms\"?");
                return Err(D::Error::custom(message));
            }
        };
        let duration = humantime::parse_duration(&text).map_err(|error| {
            D::Error::custom(format!(
                "`{text}` is not a duration: {error}; write \"500ms\", \"15s\" or \"2m\", and \"0s\" \
                 for never or none where that is possible"
            ))
        })?;
        if duration > DURATION_MAX {
            return Err(D::Error::custom(format!(
                "`{text}` is longer than a year, the longest duration"
            )));
        }
        Ok(Self(duration))
    }
}

/// How many workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountValue {
    /// One for each CPU that the process may run on.
    Auto,
    /// So many.
    Number(usize),
}

impl FromStr for CountValue {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            _ if text == "auto" => Ok(Self::Auto),
            Ok(number) => Self::from_number(number),
            Err(_) => Err(format!(
                "`{text}` is not a number of workers: use `auto` or a number"
            )),
        }
    }
}

impl CountValue {
    /// Workers that one process can have.
    pub const MAX: usize = 1024;

    fn from_number(number: i64) -> Result<Self, String> {
        match usize::try_from(number) {
            Ok(number @ 1..=Self::MAX) => Ok(Self::Number(number)),
            _ => Err(format!(
                "{number} workers: use `auto` or 1 to {}",
                Self::MAX
            )),
        }
    }
}

impl<'de> Deserialize<'de> for CountValue {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        match NumberOrText::deserialize(source)? {
            NumberOrText::Number(number) => Self::from_number(number),
            NumberOrText::Text(text) => text.parse(),
        }
        .map_err(D::Error::custom)
    }
}

/// Where workers run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PinValue {
    /// Wherever the kernel puts them.
    None,
    /// One CPU each, in the order of the allowed CPUs.
    Cpus,
    /// The CPUs of this list, one worker each.
    List(Vec<usize>),
    /// The CPUs that handle the receive queues of this network device.
    Nic(String),
}

impl<'de> Deserialize<'de> for PinValue {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        source.deserialize_any(PinVisitor)
    }
}

struct PinVisitor;

impl<'de> Visitor<'de> for PinVisitor {
    type Value = PinValue;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("\"none\", \"cpus\", \"nic:DEVICE\" or a list of CPU numbers")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<PinValue, E> {
        match text {
            "none" => Ok(PinValue::None),
            "cpus" => Ok(PinValue::Cpus),
            other => match other.strip_prefix("nic:") {
                Some("") => Err(E::custom(
                    "`nic:` names no network device: write, for instance, \"nic:eth0\"",
                )),
                Some(device) => Ok(PinValue::Nic(device.to_owned())),
                None => Err(E::custom(format!(
                    "`{other}` is no way to pin workers: use \"none\", \"cpus\", \"nic:DEVICE\" or a \
                     list of CPUs"
                ))),
            },
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<PinValue, A::Error> {
        let mut cpus = Vec::new();
        while let Some(number) = items.next_element::<i64>()? {
            let cpu = usize::try_from(number).map_err(|_| {
                A::Error::custom(format!("{number} is no CPU: they are numbered from 0"))
            })?;
            if cpus.contains(&cpu) {
                return Err(A::Error::custom(format!("CPU {cpu} is listed twice")));
            }
            cpus.push(cpu);
        }
        if cpus.is_empty() {
            return Err(A::Error::custom(
                "an empty list of CPUs: use \"none\" for no pinning",
            ));
        }
        Ok(PinValue::List(cpus))
    }
}

/// Whether gate loads its kernel programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum KernelMode {
    /// If the host allows it; else gate says why not and counts by itself.
    Auto,
    /// Without them gate does not start (exit code 3).
    Required,
    /// Never.
    Off,
}

impl<'de> Deserialize<'de> for KernelMode {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        shape::choice(source, "\"auto\", \"required\" or \"off\"")
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For programs: one JSON object a line.
    Json,
}

impl<'de> Deserialize<'de> for LogFormat {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        shape::choice(source, "\"text\" or \"json\"")
    }
}

/// Where the admin HTTP listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminValue {
    /// Nowhere.
    Off,
    /// At `host:port`.
    At(String),
}

impl<'de> Deserialize<'de> for AdminValue {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        shape::words(source, "an address such as \"127.0.0.1:9632\", or \"off\"").map(Self::from)
    }
}

impl From<String> for AdminValue {
    fn from(text: String) -> Self {
        if text == "off" {
            Self::Off
        } else {
            Self::At(text)
        }
    }
}

impl From<&str> for AdminValue {
    fn from(text: &str) -> Self {
        text.to_owned().into()
    }
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a number or a string")]
enum NumberOrText {
    Number(i64),
    Text(String),
}
