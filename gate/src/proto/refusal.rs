//! The one table of what a client may read from gate itself.

use crate::config::name::Escaped;

/// An ErrorResponse that ends the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A limit that names nobody: total, ceiling, source, backend, names.
    TooManyClients,
    /// The user's limit.
    TooManyForRole(Vec<u8>),
    /// The database's limit.
    TooManyForDatabase(Vec<u8>),
    /// gate is draining.
    ShuttingDown,
    /// The backend cannot be reached.
    NotAccepting,
    /// The StartupMessage has no user.
    NoUserName,
    /// The StartupMessage does not end with its terminator.
    StartupLayout,
    /// Bytes behind an SSLRequest that were not encrypted.
    UnencryptedAfterSsl,
    /// Bytes behind a GSSENCRequest that were not encrypted.
    UnencryptedAfterGssenc,
    /// A protocol that PostgreSQL does not speak.
    UnsupportedProtocol {
        /// Major version.
        major: u16,
        /// Minor version.
        minor: u16,
    },
}

impl Refusal {
    /// The SQLSTATE (`src/backend/utils/errcodes.txt`).
    #[must_use]
    pub const fn sqlstate(&self) -> &'static str {
        match self {
            Self::TooManyClients | Self::TooManyForRole(_) | Self::TooManyForDatabase(_) => "53300",
            Self::ShuttingDown | Self::NotAccepting => "57P03",
            Self::NoUserName => "28000",
            Self::StartupLayout | Self::UnencryptedAfterSsl | Self::UnencryptedAfterGssenc => {
                "08P01"
            }
            Self::UnsupportedProtocol { .. } => "0A000",
        }
    }

    /// PostgreSQL's own wording, valid UTF-8 whatever bytes a name has.
    #[must_use]
    pub fn message(&self) -> String {
        match self {
            Self::TooManyClients => "sorry, too many clients already".to_owned(),
            Self::TooManyForRole(name) => {
                format!("too many connections for role \"{}\"", Escaped(name))
            }
            Self::TooManyForDatabase(name) => {
                format!("too many connections for database \"{}\"", Escaped(name))
            }
            Self::ShuttingDown => "the database system is shutting down".to_owned(),
            Self::NotAccepting => "the database system is not accepting connections".to_owned(),
            Self::NoUserName => "no PostgreSQL user name specified in startup packet".to_owned(),
            Self::StartupLayout => {
                "invalid startup packet layout: expected terminator as last byte".to_owned()
            }
            Self::UnencryptedAfterSsl => "received unencrypted data after SSL request".to_owned(),
            Self::UnencryptedAfterGssenc => {
                "received unencrypted data after GSSAPI encryption request".to_owned()
            }
            Self::UnsupportedProtocol { major, minor } => {
                format!("unsupported frontend protocol {major}.{minor}: server supports 3.0 to 3.2")
            }
        }
    }

    /// The ErrorResponse: `E`, a length that counts itself, the fields S, V, C
    /// and M as PostgreSQL orders them, and the final NUL.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let message = self.message();
        let mut fields = Vec::with_capacity(message.len() + 32);
        for (field, text) in [
            (b'S', "FATAL"),
            (b'V', "FATAL"),
            (b'C', self.sqlstate()),
            (b'M', message.as_str()),
        ] {
            fields.push(field);
            fields.extend_from_slice(text.as_bytes());
            fields.push(0);
        }
        fields.push(0);
        let mut packet = Vec::with_capacity(fields.len() + 5);
        packet.push(b'E');
        packet.extend_from_slice(&(fields.len() as u32 + 4).to_be_bytes());
        packet.append(&mut fields);
        packet
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Recorded from PostgreSQL 15, less the fields behind M.
    #[test]
    fn golden_bytes_of_a_full_server() {
        let expected =
            b"E\x00\x00\x00\x3bSFATAL\0VFATAL\0C53300\0Msorry, too many clients already\0\0";
        assert_eq!(Refusal::TooManyClients.encode(), expected);
    }

    #[test]
    fn golden_bytes_of_a_full_role_and_a_full_database() {
        let role =
            b"E\x00\x00\x00\x3fSFATAL\0VFATAL\0C53300\0Mtoo many connections for role \"app\"\0\0";
        assert_eq!(Refusal::TooManyForRole(b"app".to_vec()).encode(), role);
        let database =
            b"E\x00\x00\x00\x44SFATAL\0VFATAL\0C53300\0Mtoo many connections for database \"prod\"\0\0";
        assert_eq!(
            Refusal::TooManyForDatabase(b"prod".to_vec()).encode(),
            database
        );
    }

    #[test]
    fn e7_a_hostile_name_is_shown_as_valid_utf8() {
        let refusal = Refusal::TooManyForRole(b"a\xff%s\"\n\xc3\xa4".to_vec());
        assert_eq!(
            refusal.message(),
            "too many connections for role \"a\\xff%s\"\\x0a\u{e4}\""
        );
        assert!(std::str::from_utf8(&refusal.encode()[5..]).is_ok());
    }

    #[test]
    fn f1_every_limit_is_53300_and_no_drain_is() {
        assert_eq!(Refusal::TooManyClients.sqlstate(), "53300");
        assert_eq!(Refusal::TooManyForRole(vec![]).sqlstate(), "53300");
        assert_eq!(Refusal::TooManyForDatabase(vec![]).sqlstate(), "53300");
        assert_eq!(Refusal::ShuttingDown.sqlstate(), "57P03");
        assert_eq!(Refusal::NotAccepting.sqlstate(), "57P03");
    }

    #[test]
    fn f2_length_counts_itself_and_the_final_nul_is_there() {
        for refusal in [
            Refusal::TooManyClients,
            Refusal::NoUserName,
            Refusal::StartupLayout,
            Refusal::UnencryptedAfterSsl,
            Refusal::UnsupportedProtocol { major: 2, minor: 0 },
        ] {
            let packet = refusal.encode();
            let length = u32::from_be_bytes(packet[1..5].try_into().unwrap()) as usize;
            assert_eq!(packet.len(), length + 1);
            assert!((8..30_000).contains(&length));
            assert_eq!(packet[packet.len() - 2..], [0, 0]);
        }
    }
}
