//! What must hold for every first packet, however it is cut.

use gate::proto::first_packet::{
    FirstPacket, Identity, Invalid, Negotiated, PACKET_BYTES_MAX, parse,
};

/// NAMEDATALEN - 1 (`src/include/pg_config_manual.h`).
const NAME_BYTES_MAX: usize = 63;

/// The first byte says what was negotiated before; the rest is what the client sends.
pub fn first_packet(data: &[u8]) {
    let (flags, bytes) = data.split_first().map_or((0, data), |(f, rest)| (*f, rest));
    let done = Negotiated {
        ssl: flags & 1 != 0,
        gssenc: flags & 2 != 0,
    };
    let whole = parse(bytes, done);
    every_split_agrees(bytes, done, &whole);
    match &whole {
        FirstPacket::Incomplete => assert!(bytes.len() < PACKET_BYTES_MAX, "it waits for ever"),
        FirstPacket::SslRequest { length } => {
            assert!(!done.ssl, "answered twice");
            in_bounds(bytes, *length);
        }
        FirstPacket::GssencRequest { length } => {
            assert!(!done.gssenc, "answered twice");
            in_bounds(bytes, *length);
        }
        FirstPacket::Cancel { length } => {
            in_bounds(bytes, *length);
            assert!((16..=268).contains(length));
        }
        FirstPacket::Startup { length, who } => {
            in_bounds(bytes, *length);
            assert_eq!(*who, read_naively(&bytes[8..*length]));
        }
        FirstPacket::Invalid(Invalid::Silent(why)) => assert!(!why.is_empty()),
        FirstPacket::Invalid(Invalid::Refused(refusal)) => {
            let packet = refusal.encode();
            let length = u32::from_be_bytes([packet[1], packet[2], packet[3], packet[4]]);
            assert_eq!((packet[0], length as usize), (b'E', packet.len() - 1));
            assert!(packet.ends_with(&[0, 0]));
        }
    }
}

/// A packet that comes byte by byte is the packet that comes at once: as long as it is not
/// decided more bytes are awaited, and once it is decided none of them changes it.
fn every_split_agrees(bytes: &[u8], done: Negotiated, whole: &FirstPacket) {
    let decided = (0..=bytes.len()).find(|count| {
        let so_far = parse(&bytes[..*count], done);
        so_far != FirstPacket::Incomplete
    });
    let Some(decided) = decided else {
        return assert_eq!(*whole, FirstPacket::Incomplete);
    };
    if let FirstPacket::SslRequest { length }
    | FirstPacket::GssencRequest { length }
    | FirstPacket::Cancel { length }
    | FirstPacket::Startup { length, .. } = whole
    {
        assert_eq!(decided, *length, "decided with its last byte");
    }
    for count in (decided..bytes.len()).take(64) {
        assert_eq!(parse(&bytes[..count], done), *whole, "after {count} bytes");
    }
}

fn in_bounds(bytes: &[u8], length: usize) {
    assert!((8..=PACKET_BYTES_MAX).contains(&length));
    assert!(length <= bytes.len());
}

/// The parameters read in another way than gate's: by splitting the whole at its NULs.
fn read_naively(body: &[u8]) -> Identity {
    let body = body.strip_suffix(b"\0").expect("a terminator");
    let body = body.strip_suffix(b"\0").unwrap_or(body);
    let words: Vec<&[u8]> = body.split(|byte| *byte == 0).collect();
    let last = |wanted: &[u8]| {
        let pairs = words.chunks_exact(2);
        pairs
            .filter(|pair| pair[0] == wanted)
            .map(|pair| pair[1])
            .next_back()
    };
    let user = last(b"user").expect("a user");
    assert!(!user.is_empty());
    let database = last(b"database")
        .filter(|name| !name.is_empty())
        .unwrap_or(user);
    let walsender = last(b"replication").is_some_and(|value| {
        let value = String::from_utf8_lossy(value).to_lowercase();
        let yes = ["t", "tr", "tru", "true", "y", "ye", "yes", "on", "1"];
        yes.contains(&value.as_str())
    });
    let cut = |name: &[u8]| name[..name.len().min(NAME_BYTES_MAX)].to_vec();
    Identity {
        user: cut(user),
        database: (!walsender).then(|| cut(database)),
    }
}
