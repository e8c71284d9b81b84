//! As much of the PostgreSQL protocol as a refusal takes.

/// src/include/libpq/pqcomm.h: MAX_STARTUP_PACKET_LENGTH.
const LENGTH_MAX: usize = 10_000;
/// src/include/libpq/pqcomm.h: NEGOTIATE_SSL_CODE and NEGOTIATE_GSS_CODE.
const ENCRYPTION_REQUESTS: [u32; 2] = [80_877_103, 80_877_104];
/// src/include/libpq/pqcomm.h: CANCEL_REQUEST_CODE.
const CANCEL_REQUEST: u32 = 80_877_102;

/// The answer to an encryption request: no.
pub const NOT_SUPPORTED: &[u8] = b"N";
/// An ErrorResponse: what gate says to whom it has no room for.
pub const REFUSAL: &[u8] =
    b"E\0\0\0\x3bSFATAL\0VFATAL\0C53300\0Msorry, too many clients already\0\0";

/// What the first bytes of a client amount to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum First {
    /// There is more to come.
    Incomplete,
    /// A request for encryption of this length; it may be followed by another packet.
    Encryption(usize),
    /// A startup packet: to be refused.
    Startup,
    /// Nothing that is answered.
    Silent,
}

/// Reads a first packet.
pub fn parse(bytes: &[u8]) -> First {
    let word = |at: usize| {
        let word = bytes.get(at..at + 4)?;
        Some(u32::from_be_bytes(word.try_into().ok()?))
    };
    let Some(length) = word(0) else {
        return First::Incomplete;
    };
    let length = length as usize;
    if !(8..=LENGTH_MAX).contains(&length) {
        return First::Silent;
    }
    match word(4) {
        Some(code) if bytes.len() >= length => match code {
            code if ENCRYPTION_REQUESTS.contains(&code) => First::Encryption(length),
            CANCEL_REQUEST => First::Silent,
            _ => First::Startup,
        },
        _ => First::Incomplete,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];
    const CANCEL: [u8; 16] = [0, 0, 0, 16, 4, 210, 22, 46, 0, 0, 0, 1, 0, 0, 0, 2];

    #[test]
    fn first_packets_are_told_apart_at_every_length() {
        let startup = b"\0\0\0\x10\0\x03\0\0user\0a\0\0";
        for (packet, expected) in [
            (&SSL_REQUEST[..], First::Encryption(8)),
            (&CANCEL, First::Silent),
            (startup, First::Startup),
        ] {
            assert_eq!(parse(packet), expected);
            for end in 0..packet.len() {
                assert_eq!(parse(&packet[..end]), First::Incomplete, "{end}");
            }
        }
        let behind = [&SSL_REQUEST[..], startup].concat();
        assert_eq!(parse(&behind), First::Encryption(8));
        assert_eq!(parse(b"GET / HTTP/1.1"), First::Silent);
        assert_eq!(parse(&[0, 0, 0, 7, 0, 0, 0]), First::Silent);
    }

    #[test]
    fn the_refusal_has_the_length_that_it_says() {
        let length = u32::from_be_bytes(REFUSAL[1..5].try_into().unwrap());
        assert_eq!(length as usize, REFUSAL.len() - 1);
    }
}
