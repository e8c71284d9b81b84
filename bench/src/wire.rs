//! The little of the PostgreSQL protocol (version 3, "Message Formats") that loads
//! and the backend speak with each other, and that every proxy understands.

/// Protocol 3.0 (`PG_PROTOCOL(3, 0)`, src/include/libpq/pqcomm.h).
const PROTOCOL: u32 = 3 << 16;
/// `ERRCODE_TOO_MANY_CONNECTIONS`, src/backend/utils/errcodes.txt.
pub const TOO_MANY_CONNECTIONS: &str = "53300";

/// Kind and length that begin a message.
pub const HEADER_BYTES: usize = 5;
/// A command begins with a word and a number of fixed width: `reply 0000200 `.
pub const COMMAND_BYTES: usize = 14;
/// The shortest request: header, command, NUL.
pub const REQUEST_BYTES_MIN: usize = HEADER_BYTES + COMMAND_BYTES + 1;
/// The shortest reply: DataRow with an empty field, CommandComplete, ReadyForQuery.
pub const REPLY_BYTES_MIN: usize = 11 + 14 + 6;

/// Terminate.
pub const TERMINATE: [u8; 5] = [b'X', 0, 0, 0, 4];
/// Asks the backend for an endless result.
pub const DOWNLOAD: &str = "download      ";
/// Tells the backend that an endless CopyData follows.
pub const UPLOAD: &str = "upload        ";

/// The body of each CopyData of a stream. A proxy that parses messages, such as
/// PgBouncer, has its work per message.
const COPY_DATA_BYTES: usize = 8192;

/// A message: its kind, the length that counts itself, its body.
#[must_use]
pub fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut message = vec![kind];
    message.extend(length(body.len() + 4));
    message.extend(body);
    message
}

/// StartupMessage of a user.
#[must_use]
pub fn startup_packet(user: &str, database: &str) -> Vec<u8> {
    let mut body = PROTOCOL.to_be_bytes().to_vec();
    for text in ["user", user, "database", database] {
        body.extend(text.as_bytes());
        body.push(0);
    }
    body.push(0);
    let mut packet = length(body.len() + 4).to_vec();
    packet.append(&mut body);
    packet
}

/// A Query of `bytes` in all that the backend answers with `reply_bytes` in all.
#[must_use]
pub fn request(bytes: usize, reply_bytes: usize) -> Vec<u8> {
    debug_assert!(bytes >= REQUEST_BYTES_MIN && reply_bytes >= REPLY_BYTES_MIN);
    let text = format!("reply {reply_bytes:07} ");
    let mut body = text.into_bytes();
    body.resize(bytes - HEADER_BYTES - 1, b'-');
    body.push(0);
    message(b'Q', &body)
}

/// A Query with a command.
#[must_use]
pub fn query(command: &str) -> Vec<u8> {
    let mut body = command.as_bytes().to_vec();
    body.push(0);
    message(b'Q', &body)
}

/// How long a reply a command asks for.
#[must_use]
pub fn reply_bytes(command: &[u8]) -> Option<usize> {
    let digits = command.strip_prefix(b"reply ")?.get(..7)?;
    let bytes: usize = std::str::from_utf8(digits).ok()?.parse().ok()?;
    (bytes >= REPLY_BYTES_MIN).then_some(bytes)
}

/// A result of one row, of `bytes` in all, that ends in ReadyForQuery.
#[must_use]
pub fn reply(bytes: usize) -> Vec<u8> {
    let field = vec![b'-'; bytes.saturating_sub(REPLY_BYTES_MIN)];
    let mut row = 1_u16.to_be_bytes().to_vec();
    row.extend(length(field.len()));
    row.extend(field);
    let mut reply = message(b'D', &row);
    reply.extend(done());
    reply
}

/// CommandComplete and ReadyForQuery.
#[must_use]
pub fn done() -> Vec<u8> {
    let mut done = message(b'C', b"SELECT 1\0");
    done.extend(message(b'Z', b"I"));
    done
}

/// What a server says when it has let a client in: AuthenticationOk, what drivers
/// ask for of parameters, BackendKeyData, ReadyForQuery.
#[must_use]
pub fn welcome() -> Vec<u8> {
    let mut welcome = message(b'R', &[0; 4]);
    for parameter in [
        "server_version\x0015.0\0",
        "server_encoding\0UTF8\0",
        "client_encoding\0UTF8\0",
        "DateStyle\0ISO, MDY\0",
        "TimeZone\0UTC\0",
        "integer_datetimes\0on\0",
        "standard_conforming_strings\0on\0",
    ] {
        welcome.extend(message(b'S', parameter.as_bytes()));
    }
    welcome.extend(message(b'K', &[0, 0, 0, 7, 0, 0, 0, 9]));
    welcome.extend(message(b'Z', b"I"));
    welcome
}

/// CopyOutResponse or CopyInResponse: text, no columns named.
#[must_use]
pub fn copy_begins(kind: u8) -> Vec<u8> {
    message(kind, &[0, 0, 0])
}

/// Whole CopyData messages, at least `bytes` in all.
#[must_use]
pub fn copy_data(bytes: usize) -> Vec<u8> {
    let one = message(b'd', &[b'-'; COPY_DATA_BYTES]);
    one.repeat(bytes.div_ceil(one.len()))
}

/// The whole messages at the beginning of `bytes`: kind and body.
pub fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    std::iter::from_fn(move || {
        let (header, _) = bytes.split_first_chunk::<HEADER_BYTES>()?;
        let end = message_bytes(header)?;
        let body = bytes.get(HEADER_BYTES..end)?;
        bytes = &bytes[end..];
        Some((header[0], body))
    })
}

/// Length of a message in all; `None` for one that would end before its header.
#[must_use]
pub fn message_bytes(header: &[u8; HEADER_BYTES]) -> Option<usize> {
    let [_, length @ ..] = *header;
    let length = usize::try_from(u32::from_be_bytes(length)).ok()?;
    (length >= 4).then_some(length + 1)
}

/// The SQLSTATE of an ErrorResponse's body.
#[must_use]
pub fn sqlstate(body: &[u8]) -> Option<&str> {
    let field = body.split(|byte| *byte == 0);
    let field = field
        .into_iter()
        .find(|field| field.first() == Some(&b'C'))?;
    std::str::from_utf8(&field[1..]).ok()
}

fn length(bytes: usize) -> [u8; 4] {
    u32::try_from(bytes).unwrap_or(u32::MAX).to_be_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_asked_for() {
        for bytes in [REQUEST_BYTES_MIN, 64, 65536] {
            let request = request(bytes, 200);
            assert_eq!(request.len(), bytes);
            let [(b'Q', body)] = messages(&request).collect::<Vec<_>>()[..] else {
                panic!("not one query");
            };
            assert_eq!(reply_bytes(body), Some(200));
        }
        for bytes in [REPLY_BYTES_MIN, 200, 65536] {
            let reply = reply(bytes);
            assert_eq!(reply.len(), bytes);
            let kinds: Vec<u8> = messages(&reply).map(|(kind, _)| kind).collect();
            assert_eq!(kinds, *b"DCZ");
        }
        assert_eq!(DOWNLOAD.len(), COMMAND_BYTES);
        assert_eq!(UPLOAD.len(), COMMAND_BYTES);
    }

    #[test]
    fn a_part_of_a_message_is_none() {
        let whole = welcome();
        let last = whole.len() - 1;
        assert_eq!(messages(&whole).last().unwrap().0, b'Z');
        assert_eq!(messages(&whole[..last]).last().unwrap().0, b'K');
        assert_eq!(messages(b"Z\0\0\0\x03I").count(), 0);
        assert_eq!(reply_bytes(b"reply 0000001 "), None);
        assert_eq!(reply_bytes(b"reply"), None);
    }

    #[test]
    fn the_sqlstate_is_found() {
        assert_eq!(sqlstate(b"SFATAL\0VFATAL\0C53300\0Mx\0\0"), Some("53300"));
        assert_eq!(sqlstate(b"SFATAL\0\0"), None);
    }
}
