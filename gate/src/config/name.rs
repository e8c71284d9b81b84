//! Names of users, databases and backends as text.
//!
//! PostgreSQL's names are bytes of any kind. Wherever gate shows one (tables,
//! JSON, logs, metrics, configuration) it shows the escaped form, and accepts
//! the same form back: a backslash is doubled, and a byte that is no part of
//! a printable UTF-8 character is `\xNN`.
#![forbid(unsafe_code)]

use std::fmt::{self, Write};

use gate_common::abi::NAME_BYTES_MAX;

/// Shows name bytes in the escaped form.
#[derive(Clone, Copy, Debug)]
pub struct Escaped<'a>(pub &'a [u8]);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            for character in chunk.valid().chars() {
                match character {
                    '\\' => out.write_str("\\\\")?,
                    hidden if is_hidden(hidden) => {
                        write_bytes(out, hidden.encode_utf8(&mut [0; 4]).as_bytes())?;
                    }
                    shown => out.write_char(shown)?,
                }
            }
            write_bytes(out, chunk.invalid())?;
        }
        Ok(())
    }
}

/// The escaped form as a string.
#[must_use]
pub fn escape(name: &[u8]) -> String {
    Escaped(name).to_string()
}

/// Why a text is not a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// A backslash that begins no escape, at a byte offset.
    #[error(
        "the backslash at byte {0} begins no escape: write `\\\\` for a backslash, `\\xNN` for a byte"
    )]
    Escape(usize),
    /// No bytes at all.
    #[error("a name is empty: PostgreSQL has no empty user or database names")]
    Empty,
    /// A NUL byte: it ends a name on the wire.
    #[error("a name cannot contain a NUL byte")]
    Nul,
    /// More bytes than PostgreSQL keeps.
    #[error(
        "a name of {0} bytes: PostgreSQL cuts names to {NAME_BYTES_MAX} bytes, so write its first {NAME_BYTES_MAX}"
    )]
    TooLong(usize),
}

/// The bytes of a name in the escaped form: 1 to 63 bytes, no NUL.
///
/// # Errors
/// What is wrong with the text, see [`NameError`].
pub fn parse(text: &str) -> Result<Vec<u8>, NameError> {
    let name = unescape(text)?;
    match name.len() {
        0 => Err(NameError::Empty),
        _ if name.contains(&0) => Err(NameError::Nul),
        1..=NAME_BYTES_MAX => Ok(name),
        length => Err(NameError::TooLong(length)),
    }
}

fn unescape(text: &str) -> Result<Vec<u8>, NameError> {
    let mut name = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        rest = match (first, after) {
            (b'\\', [b'\\', after @ ..]) => {
                name.push(b'\\');
                after
            }
            (b'\\', [b'x', high, low, after @ ..]) if hex(*high).and(hex(*low)).is_some() => {
                name.push(hex(*high).unwrap_or(0) << 4 | hex(*low).unwrap_or(0));
                after
            }
            (b'\\', _) => return Err(NameError::Escape(text.len() - rest.len())),
            (byte, after) => {
                name.push(byte);
                after
            }
        };
    }
    Ok(name)
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|value| value as u8)
}

fn write_bytes(out: &mut impl Write, bytes: &[u8]) -> fmt::Result {
    bytes
        .iter()
        .try_for_each(|byte| write!(out, "\\x{byte:02x}"))
}

/// Characters that move the cursor, end a line or reorder what is shown: a
/// name must not be able to write a log line or a table row of its own.
fn is_hidden(character: char) -> bool {
    character.is_control()
        || matches!(
            character,
            '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{2069}'
                | '\u{feff}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn e7_hostile_names_are_shown_on_one_line() {
        let table: [(&[u8], &str); 8] = [
            (b"app", "app"),
            ("Zo\u{eb}".as_bytes(), "Zo\u{eb}"),
            (b"a\nb", "a\\x0ab"),
            (b"\xff\xfe", "\\xff\\xfe"),
            (b"back\\slash", "back\\\\slash"),
            (b"%s\"';--", "%s\"';--"),
            ("\u{202e}x".as_bytes(), "\\xe2\\x80\\xaex"),
            (b"cut\xc3", "cut\\xc3"),
        ];
        for (name, shown) in table {
            assert_eq!(escape(name), shown);
            assert_eq!(parse(shown).as_deref(), Ok(name));
        }
    }

    #[test]
    fn what_is_no_name_says_why() {
        assert_eq!(parse(""), Err(NameError::Empty));
        assert_eq!(parse("a\\x00"), Err(NameError::Nul));
        assert_eq!(parse("ab\\n"), Err(NameError::Escape(2)));
        assert_eq!(parse("\\x0"), Err(NameError::Escape(0)));
        assert_eq!(parse("\\xzz"), Err(NameError::Escape(0)));
        assert_eq!(parse(&"x".repeat(64)), Err(NameError::TooLong(64)));
        assert_eq!(parse(&"x".repeat(63)).map(|name| name.len()), Ok(63));
        assert_eq!(parse(&"\\xff".repeat(63)).map(|name| name.len()), Ok(63));
    }

    proptest! {
        #[test]
        fn every_name_comes_back(name in prop::collection::vec(1..=255u8, 1..=63)) {
            let shown = escape(&name);
            prop_assert!(!shown.chars().any(char::is_control));
            prop_assert_eq!(parse(&shown), Ok(name));
        }
    }
}
