//! The shapes of a configuration: whoever writes `[listener]` for
//! `[[listener]]` is told so in the words of the file.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use clap::ValueEnum;
use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

use super::settings::{BackendSettings, DatabaseSettings, ListenerSettings};

/// Reads the listeners.
///
/// # Errors
/// They are no list of tables.
pub fn listeners<'de, D: Deserializer<'de>>(source: D) -> Result<Vec<ListenerSettings>, D::Error> {
    source.deserialize_any(List::new("[[listener]], in double brackets"))
}

/// Reads the backends.
///
/// # Errors
/// They are no tables with names.
pub fn backends<'de, D: Deserializer<'de>>(
    source: D,
) -> Result<BTreeMap<String, BackendSettings>, D::Error> {
    source.deserialize_any(Tables::new(
        "one table for each backend, such as [backend.default]",
    ))
}

/// Reads the places of databases.
///
/// # Errors
/// They are no tables with names.
pub fn databases<'de, D: Deserializer<'de>>(
    source: D,
) -> Result<BTreeMap<String, DatabaseSettings>, D::Error> {
    source.deserialize_any(Tables::new(
        "one table for each database, such as [database.prod]",
    ))
}

/// Reads the one address of a backend.
///
/// # Errors
/// It is no string.
pub fn one_address<'de, D: Deserializer<'de>>(source: D) -> Result<Option<String>, D::Error> {
    let expected = "one address as a string; several are addresses = [\"...\", \"...\"]";
    source.deserialize_any(Words { expected }).map(Some)
}

/// Reads the addresses of a backend.
///
/// # Errors
/// They are no list of strings.
pub fn several_addresses<'de, D: Deserializer<'de>>(
    source: D,
) -> Result<Option<Vec<String>>, D::Error> {
    let expected = "a list of addresses; a single one is address = \"...\"";
    source.deserialize_any(List::new(expected)).map(Some)
}

/// Reads one of a few words.
pub(super) fn choice<'de, T: ValueEnum, D: Deserializer<'de>>(
    source: D,
    expected: &'static str,
) -> Result<T, D::Error> {
    let word = source.deserialize_any(Words { expected })?;
    T::from_str(&word, false)
        .map_err(|_| D::Error::custom(format!("`{word}` is none of the words: use {expected}")))
}

/// Reads a string.
pub(super) fn words<'de, D: Deserializer<'de>>(
    source: D,
    expected: &'static str,
) -> Result<String, D::Error> {
    source.deserialize_any(Words { expected })
}

struct Words {
    expected: &'static str,
}

impl Visitor<'_> for Words {
    type Value = String;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.expected)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }
}

struct List<T> {
    expected: &'static str,
    of: PhantomData<T>,
}

impl<T> List<T> {
    const fn new(expected: &'static str) -> Self {
        Self {
            expected,
            of: PhantomData,
        }
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for List<T> {
    type Value = Vec<T>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.expected)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Vec<T>, A::Error> {
        Vec::deserialize(SeqAccessDeserializer::new(items))
    }
}

struct Tables<T> {
    expected: &'static str,
    of: PhantomData<T>,
}

impl<T> Tables<T> {
    const fn new(expected: &'static str) -> Self {
        Self {
            expected,
            of: PhantomData,
        }
    }
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for Tables<T> {
    type Value = BTreeMap<String, T>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.expected)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<BTreeMap<String, T>, A::Error> {
        BTreeMap::deserialize(MapAccessDeserializer::new(map))
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn another_shape_is_an_error_in_the_words_of_the_file() {
        let table = [
            (
                "\n[listener]\naddress = \"127.0.0.1:1\"",
                "line 2",
                "[[listener]]",
            ),
            ("listener = [\"127.0.0.1:1\"]", "line 1", "[[listener]]"),
            (
                "[backend]\naddress = \"127.0.0.1:1\"",
                "line 2",
                "[backend.default]",
            ),
            (
                "[[backend]]\naddress = \"127.0.0.1:1\"",
                "line 1",
                "[backend.default]",
            ),
            (
                "[backend.default]\naddress = [\"127.0.0.1:1\"]",
                "line 2",
                "addresses = [",
            ),
            (
                "[backend.default]\naddresses = \"127.0.0.1:1\"",
                "line 2",
                "address = ",
            ),
            (
                "[database]\nprod = \"default\"",
                "line 2",
                "[database.prod]",
            ),
            (
                "[[database]]\nprod = \"default\"",
                "line 1",
                "[database.prod]",
            ),
            (
                "kernel = true",
                "line 1",
                "\"auto\", \"required\" or \"off\"",
            ),
            (
                "kernel = \"on\"",
                "line 1",
                "\"auto\", \"required\" or \"off\"",
            ),
            ("log_format = \"xml\"", "line 1", "\"text\" or \"json\""),
            ("admin = false", "line 1", "\"off\""),
            ("[workers]\npin = [-1]", "line 2", "-1 is no CPU"),
        ];
        for (toml, line, cure) in table {
            let error = Config::from_toml(toml).expect_err(toml).to_string();
            assert!(error.contains(line), "{toml}: {error}");
            assert!(error.contains(cure), "{toml}: {error}");
            assert!(!error.contains("Settings"), "{toml}: {error}");
            assert!(!error.ends_with('\n'), "{toml}: {error}");
        }
    }
}
