//! One connection of a storm, and the few bytes of the protocol it needs.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result};

/// Nothing takes longer, or it is an answer that counts as none.
const PATIENCE: Duration = Duration::from_secs(5);
/// A refusal is shorter (about 100 bytes); more is not a refusal.
const ANSWER_BYTES_MAX: u64 = 8192;
/// Protocol 3.0 (`PG_PROTOCOL(3, 0)`, src/include/libpq/pqcomm.h).
const PROTOCOL: u32 = 3 << 16;
/// `ERRCODE_TOO_MANY_CONNECTIONS`, src/backend/utils/errcodes.txt.
const TOO_MANY_CONNECTIONS: &[u8] = b"53300";

/// What the target answered.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// FATAL 53300, then the end.
    Refused,
    /// Anything else.
    Other(String),
}

/// The startup packet of a user.
#[must_use]
pub fn startup_packet(user: &str, database: &str) -> Vec<u8> {
    let mut body = PROTOCOL.to_be_bytes().to_vec();
    for text in ["user", user, "database", database] {
        body.extend_from_slice(text.as_bytes());
        body.push(0);
    }
    body.push(0);
    // The length counts itself.
    let length = u32::try_from(body.len() + 4).unwrap_or(u32::MAX);
    let mut packet = length.to_be_bytes().to_vec();
    packet.append(&mut body);
    packet
}

/// Connects, sends the packet, and reads until the other side ends.
///
/// # Errors
/// No connection, a reset, or no end in time.
pub fn refused_once(target: SocketAddr, packet: &[u8]) -> Result<Answer> {
    let mut stream = TcpStream::connect_timeout(&target, PATIENCE).context("connect")?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(packet).context("send")?;
    let mut answer = Vec::with_capacity(256);
    let mut reader = Read::by_ref(&mut stream).take(ANSWER_BYTES_MAX);
    // A server that admits does not end, but its first message says so.
    while answer.first().is_none_or(|kind| *kind == b'E') {
        let mut part = [0; 512];
        match reader.read(&mut part).context("receive")? {
            0 => break,
            read => answer.extend_from_slice(&part[..read]),
        }
    }
    Ok(judge(&answer))
}

fn judge(answer: &[u8]) -> Answer {
    if answer.is_empty() {
        return Answer::Other("the end, without a word".into());
    }
    match sqlstate(answer) {
        Some(TOO_MANY_CONNECTIONS) => Answer::Refused,
        Some(state) => Answer::Other(format!("SQLSTATE {}", state.escape_ascii())),
        None => {
            let first = &answer[..answer.len().min(64)];
            Answer::Other(format!("no ErrorResponse: \"{}\"", first.escape_ascii()))
        }
    }
}

/// The `C` field of an ErrorResponse that is complete and the only message.
fn sqlstate(answer: &[u8]) -> Option<&[u8]> {
    let (kind, rest) = answer.split_first()?;
    let (length, fields) = rest.split_first_chunk()?;
    if *kind != b'E' || u32::from_be_bytes(*length) as usize != rest.len() {
        return None;
    }
    let fields = fields.strip_suffix(&[0, 0])?;
    let mut fields = fields.split(|byte| *byte == 0);
    fields.find_map(|field| field.strip_prefix(b"C"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(code: &str) -> Vec<u8> {
        let fields = format!("SFATAL\0VFATAL\0C{code}\0Msorry, too many clients already\0\0");
        let mut message = vec![b'E'];
        message.extend_from_slice(&(fields.len() as u32 + 4).to_be_bytes());
        message.extend_from_slice(fields.as_bytes());
        message
    }

    #[test]
    fn only_a_whole_53300_is_a_refusal() {
        assert_eq!(judge(&refusal("53300")), Answer::Refused);
        let other = Answer::Other("SQLSTATE 57P03".into());
        assert_eq!(judge(&refusal("57P03")), other);
        let whole = refusal("53300");
        for length in 0..whole.len() {
            assert_ne!(judge(&whole[..length]), Answer::Refused, "{length} bytes");
        }
        let mut longer = whole;
        longer.push(b'E');
        assert_ne!(judge(&longer), Answer::Refused);
        assert_ne!(judge(b"R\0\0\0\x08\0\0\0\0"), Answer::Refused);
    }

    #[test]
    fn the_startup_packet_counts_itself() {
        let packet = startup_packet("app", "prod");
        assert_eq!(packet[..4], (packet.len() as u32).to_be_bytes());
        assert_eq!(packet[4..8], [0, 3, 0, 0]);
        assert_eq!(&packet[8..], b"user\0app\0database\0prod\0\0");
    }
}
