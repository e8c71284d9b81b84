//! The client's first packets, as PostgreSQL reads them
//! (`ProcessStartupPacket` in `src/backend/postmaster/postmaster.c`, since
//! PostgreSQL 17 `src/backend/tcop/backend_startup.c`).

use gate_common::abi::NAME_BYTES_MAX;

use super::refusal::Refusal;

/// Longest first packet, its length word included:
/// MAX_STARTUP_PACKET_LENGTH (`src/include/libpq/pqcomm.h`) + 4.
pub const PACKET_BYTES_MAX: usize = 10_004;

const PACKET_BYTES_MIN: usize = 8;
/// CANCEL_REQUEST_CODE (`src/include/libpq/pqcomm.h`).
const CANCEL_REQUEST: u32 = 1234 << 16 | 5678;
/// NEGOTIATE_SSL_CODE.
const SSL_REQUEST: u32 = 1234 << 16 | 5679;
/// NEGOTIATE_GSS_CODE.
const GSSENC_REQUEST: u32 = 1234 << 16 | 5680;
/// The one major version that PostgreSQL still speaks.
const MAJOR: u32 = 3;
/// A CancelRequest's bytes before its key.
const CANCEL_HEAD_BYTES: usize = 12;
/// Shortest and longest cancel key: 4 bytes up to protocol 3.0, at most
/// MAX_CANCEL_KEY_LENGTH (`src/include/libpq/pqcomm.h`) from 3.2 on.
const CANCEL_KEY_BYTES: std::ops::RangeInclusive<usize> = 4..=256;

/// Which requests were answered on this connection already: each is legal
/// once, in either order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Negotiated {
    /// SSLRequest.
    pub ssl: bool,
    /// GSSENCRequest.
    pub gssenc: bool,
}

/// What the bytes so far amount to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FirstPacket {
    /// Not enough bytes to say.
    Incomplete,
    /// SSLRequest; `length` bytes.
    SslRequest {
        /// Bytes of the packet.
        length: usize,
    },
    /// GSSENCRequest; `length` bytes.
    GssencRequest {
        /// Bytes of the packet.
        length: usize,
    },
    /// CancelRequest; `length` bytes, to be forwarded unchanged.
    Cancel {
        /// Bytes of the packet.
        length: usize,
    },
    /// A StartupMessage; `length` bytes, to be forwarded unchanged.
    Startup {
        /// Bytes of the packet.
        length: usize,
        /// Who it says it is.
        who: Identity,
    },
    /// Not a start that PostgreSQL accepts.
    Invalid(Invalid),
}

/// How PostgreSQL ends a connection whose first packet it does not accept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Invalid {
    /// Closed without a word.
    Silent(&'static str),
    /// Closed with an ErrorResponse.
    Refused(Refusal),
}

/// Whom a StartupMessage names, as PostgreSQL would take it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Cut to 63 bytes.
    pub user: Vec<u8>,
    /// Cut to 63 bytes; `None` for a physical walsender, which has none.
    pub database: Option<Vec<u8>>,
}

/// Reads the first packet in `bytes`, which begin at a packet's first byte.
#[must_use]
pub fn parse(bytes: &[u8], done: Negotiated) -> FirstPacket {
    // PostgreSQL 17 and newer take a TLS ClientHello here; until gate speaks
    // TLS it does as PostgreSQL 15 does with any bad length.
    let Some((length, rest)) = bytes.split_first_chunk::<4>() else {
        return first_bytes(bytes);
    };
    let length = u32::from_be_bytes(*length) as usize;
    if !(PACKET_BYTES_MIN..=PACKET_BYTES_MAX).contains(&length) {
        return FirstPacket::Invalid(Invalid::Silent("invalid length of startup packet"));
    }
    if bytes.len() < length {
        return FirstPacket::Incomplete;
    }
    let Some((code, _)) = rest.split_first_chunk::<4>() else {
        return FirstPacket::Incomplete;
    };
    match u32::from_be_bytes(*code) {
        CANCEL_REQUEST => cancel(length),
        SSL_REQUEST if !done.ssl => FirstPacket::SslRequest { length },
        GSSENC_REQUEST if !done.gssenc => FirstPacket::GssencRequest { length },
        version if version >> 16 == MAJOR => match identity(&bytes[8..length]) {
            Ok(who) => FirstPacket::Startup { length, who },
            Err(refusal) => FirstPacket::Invalid(Invalid::Refused(refusal)),
        },
        version => FirstPacket::Invalid(Invalid::Refused(Refusal::UnsupportedProtocol {
            major: (version >> 16) as u16,
            minor: (version & 0xffff) as u16,
        })),
    }
}

/// Fewer than four bytes: a length above the bound shows in the first two.
fn first_bytes(bytes: &[u8]) -> FirstPacket {
    let too_long = match bytes {
        [0] | [0, 0, ..] | [] => false,
        [..] => true,
    };
    if too_long {
        FirstPacket::Invalid(Invalid::Silent("invalid length of startup packet"))
    } else {
        FirstPacket::Incomplete
    }
}

fn cancel(length: usize) -> FirstPacket {
    match length.checked_sub(CANCEL_HEAD_BYTES) {
        Some(key) if CANCEL_KEY_BYTES.contains(&key) => FirstPacket::Cancel { length },
        _ => FirstPacket::Invalid(Invalid::Silent("invalid length of cancel request")),
    }
}

/// Reads the parameters behind the version.
fn identity(parameters: &[u8]) -> Result<Identity, Refusal> {
    let mut user: &[u8] = b"";
    let mut database: &[u8] = b"";
    let mut walsender = false;
    let mut rest = parameters;
    loop {
        if matches!(rest, [] | [0, ..]) {
            break;
        }
        let (name, after_name) = c_string(rest);
        // PostgreSQL complains of a missing value as of a missing terminator.
        if after_name.is_empty() {
            return Err(Refusal::StartupLayout);
        }
        let (value, after_value) = c_string(after_name);
        match name {
            b"user" => user = value,
            b"database" => database = value,
            // A value that is no boolean is for the server to refuse.
            b"replication" => walsender = value != b"database" && parse_bool(value) == Some(true),
            _ => {}
        }
        rest = after_value;
    }
    if rest.len() != 1 {
        return Err(Refusal::StartupLayout);
    }
    if user.is_empty() {
        return Err(Refusal::NoUserName);
    }
    let database = if database.is_empty() { user } else { database };
    Ok(Identity {
        user: cut(user),
        database: (!walsender).then(|| cut(database)),
    })
}

/// Splits at the first NUL; without one, everything is the string.
fn c_string(bytes: &[u8]) -> (&[u8], &[u8]) {
    match bytes.iter().position(|byte| *byte == 0) {
        Some(end) => (&bytes[..end], &bytes[end + 1..]),
        None => (bytes, b""),
    }
}

fn cut(name: &[u8]) -> Vec<u8> {
    name[..name.len().min(NAME_BYTES_MAX)].to_vec()
}

/// `parse_bool_with_len` (`src/backend/utils/adt/bool.c`): any case, and any
/// prefix that is not ambiguous.
fn parse_bool(value: &[u8]) -> Option<bool> {
    let value = value.to_ascii_lowercase();
    let is_prefix_of = |word: &[u8], least: usize| value.len() >= least && word.starts_with(&value);
    if is_prefix_of(b"true", 1) || is_prefix_of(b"yes", 1) || value == b"on" || value == b"1" {
        Some(true)
    } else if is_prefix_of(b"false", 1)
        || is_prefix_of(b"no", 1)
        || is_prefix_of(b"off", 2)
        || value == b"0"
    {
        Some(false)
    } else {
        None
    }
}

#[cfg(test)]
#[path = "first_packet_tests.rs"]
mod tests;
