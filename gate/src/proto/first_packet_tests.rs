//! Every wire fact of the startup phase, as a table.

use proptest::prelude::*;

use super::*;

const NONE: Negotiated = Negotiated {
    ssl: false,
    gssenc: false,
};

fn packet(code: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = (body.len() as u32 + 8).to_be_bytes().to_vec();
    bytes.extend_from_slice(&code.to_be_bytes());
    bytes.extend_from_slice(body);
    bytes
}

fn startup(body: &[u8]) -> FirstPacket {
    parse(&packet(0x0003_0000, body), NONE)
}

fn who(body: &[u8]) -> (Vec<u8>, Option<Vec<u8>>) {
    match startup(body) {
        FirstPacket::Startup { who, .. } => (who.user, who.database),
        other => panic!("{other:?}"),
    }
}

fn named(user: &[u8], database: &[u8]) -> (Vec<u8>, Option<Vec<u8>>) {
    (user.to_vec(), Some(database.to_vec()))
}

fn refused(refusal: Refusal) -> FirstPacket {
    FirstPacket::Invalid(Invalid::Refused(refusal))
}

fn is_silent(packet: &FirstPacket) -> bool {
    matches!(packet, FirstPacket::Invalid(Invalid::Silent(_)))
}

#[test]
fn d1_ssl_and_gssenc_are_each_legal_once_in_either_order() {
    let ssl = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];
    let gss = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x30];
    let after_ssl = Negotiated { ssl: true, ..NONE };
    let after_gss = Negotiated {
        gssenc: true,
        ..NONE
    };
    assert_eq!(parse(&ssl, NONE), FirstPacket::SslRequest { length: 8 });
    assert_eq!(
        parse(&ssl, after_gss),
        FirstPacket::SslRequest { length: 8 }
    );
    assert_eq!(parse(&gss, NONE), FirstPacket::GssencRequest { length: 8 });
    assert_eq!(
        parse(&gss, after_ssl),
        FirstPacket::GssencRequest { length: 8 }
    );
    let second = |minor| refused(Refusal::UnsupportedProtocol { major: 1234, minor });
    assert_eq!(parse(&ssl, after_ssl), second(5679));
    assert_eq!(parse(&gss, after_gss), second(5680));
}

#[test]
fn e1_lengths_8_to_10004_and_nothing_else() {
    for length in [0_u32, 4, 7, 10_005, 0x1603_0100, u32::MAX] {
        let mut bytes = length.to_be_bytes().to_vec();
        assert!(is_silent(&parse(&bytes, NONE)), "{length}");
        bytes.extend_from_slice(&[0; 16]);
        assert!(is_silent(&parse(&bytes, NONE)), "{length}");
    }
    let mut body = b"user\0app\0application_name\0".to_vec();
    body.resize(10_004 - 8 - 2, b'x');
    body.extend_from_slice(&[0, 0]);
    let bytes = packet(0x0003_0000, &body);
    assert_eq!(bytes.len(), PACKET_BYTES_MAX);
    assert!(matches!(
        parse(&bytes, NONE),
        FirstPacket::Startup { length: 10_004, .. }
    ));
}

#[test]
fn e1_any_prefix_of_a_valid_packet_is_incomplete() {
    let bytes = packet(0x0003_0000, b"user\0app\0database\0prod\0\0");
    for length in 0..bytes.len() {
        assert_eq!(parse(&bytes[..length], NONE), FirstPacket::Incomplete);
    }
}

#[test]
fn bytes_behind_the_packet_do_not_belong_to_it() {
    let mut bytes = packet(0x0003_0000, b"user\0app\0\0");
    let length = bytes.len();
    bytes.extend_from_slice(b"Q\0\0\0\x08....");
    assert!(matches!(parse(&bytes, NONE), FirstPacket::Startup { length: l, .. } if l == length));
}

#[test]
fn c5_cancel_requests_with_keys_of_4_to_256_bytes() {
    for key in [4, 32, 256] {
        let bytes = packet(80_877_102, &vec![9; 4 + key]);
        assert_eq!(
            parse(&bytes, NONE),
            FirstPacket::Cancel { length: 12 + key }
        );
    }
    for body in [0, 4, 7, 261] {
        assert!(is_silent(&parse(&packet(80_877_102, &vec![9; body]), NONE)));
    }
}

#[test]
fn a2_names_are_cut_as_postgresql_cuts_them() {
    let long = [b'u'; 70];
    let body = [b"user\0", &long[..], b"\0\0"].concat();
    assert_eq!(who(&body), named(&long[..63], &long[..63]));
}

#[test]
fn e2_identities() {
    assert_eq!(who(b"user\0app\0\0"), named(b"app", b"app"));
    assert_eq!(
        who(b"user\0app\0database\0prod\0\0"),
        named(b"app", b"prod")
    );
    assert_eq!(
        who(b"database\0prod\0user\0app\0\0"),
        named(b"app", b"prod")
    );
    assert_eq!(who(b"user\0app\0database\0\0\0"), named(b"app", b"app"));
    assert_eq!(who(b"user\0a\0user\0b\0\0"), named(b"b", b"b"));
    assert_eq!(who(b"user\0app\0User\0other\0\0"), named(b"app", b"app"));
    assert_eq!(
        who(b"user\0\xff%s\"\n\0\0"),
        named(b"\xff%s\"\n", b"\xff%s\"\n")
    );
    assert_eq!(who(b"options\0\0user\0app\0\0"), named(b"app", b"app"));
}

#[test]
fn e2_replication() {
    let with =
        |value: &[u8]| who(&[b"user\0r\0database\0d\0replication\0", value, b"\0\0"].concat()).1;
    for physical in ["true", "TRUE", "t", "tr", "on", "ON", "yes", "y", "1"] {
        assert_eq!(with(physical.as_bytes()), None, "{physical}");
    }
    for session in [
        "false", "f", "off", "of", "no", "n", "0", "database", "bogus", "o", "",
    ] {
        assert_eq!(with(session.as_bytes()), Some(b"d".to_vec()), "{session}");
    }
}

#[test]
fn e2_bad_layouts() {
    for body in [
        &b"user\0app\0"[..],
        b"user\0app",
        b"user\0",
        b"user",
        b"user\0app\0\0x",
        b"user\0app\0\0\0",
        b"",
    ] {
        assert_eq!(startup(body), refused(Refusal::StartupLayout), "{body:?}");
    }
}

#[test]
fn no_user_is_28000() {
    for body in [&b"\0"[..], b"user\0\0\0", b"database\0d\0\0"] {
        assert_eq!(startup(body), refused(Refusal::NoUserName), "{body:?}");
    }
}

#[test]
fn e3_any_minor_of_major_3_passes_and_no_other_major() {
    for minor in [0, 1, 2, 3999, 9999] {
        let bytes = packet(0x0003_0000 | minor, b"user\0a\0_pq_.x\0y\0\0");
        assert!(matches!(parse(&bytes, NONE), FirstPacket::Startup { .. }));
    }
    for major in [0_u16, 2, 4, 99] {
        let bytes = packet(u32::from(major) << 16, b"user\0a\0\0");
        let expected = refused(Refusal::UnsupportedProtocol { major, minor: 0 });
        assert_eq!(parse(&bytes, NONE), expected);
    }
}

#[test]
fn b2_other_protocols_are_noticed_at_their_first_bytes() {
    for greeting in [
        &b"GET / HTTP/1.1\r\n"[..],
        b"\x16\x03\x01\x02\x00",
        b"\x16",
        b"SSH-2.0-x\r\n",
        b"\x01",
    ] {
        assert!(is_silent(&parse(greeting, NONE)), "{greeting:?}");
    }
}

/// A million random first packets, half of them noise, half of them tokens
/// that matter in any order behind a plausible head.
#[test]
fn no_panic_on_a_million_random_first_packets() {
    const TOKENS: [&[u8]; 8] = [
        b"\0",
        b"\0",
        b"\0",
        b"user\0",
        b"database\0",
        b"replication\0",
        b"true",
        b"x",
    ];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as usize
    };
    let (mut startups, mut refusals) = (0, 0);
    for round in 0..1_000_000 {
        let count = next() % 12;
        let bytes = if round % 2 == 0 {
            let body: Vec<&[u8]> = (0..count).map(|_| TOKENS[next() % 8]).collect();
            packet(0x0003_0000, &body.concat())
        } else {
            (0..count * 4).map(|_| next() as u8).collect()
        };
        match parse(&bytes, NONE) {
            FirstPacket::Startup { .. } => startups += 1,
            FirstPacket::Invalid(Invalid::Refused(_)) => refusals += 1,
            _ => {}
        }
    }
    assert!(
        startups > 1_000 && refusals > 1_000,
        "{startups} {refusals}"
    );
}

proptest! {
    #[test]
    fn a_well_formed_startup_is_read_back(
        user in "[^\0]{1,80}",
        database in "[^\0]{0,80}",
        extra in "[a-z]{1,8}",
    ) {
        prop_assume!(!["user", "database", "replication"].contains(&extra.as_str()));
        let body = format!("{extra}\0v\0user\0{user}\0database\0{database}\0\0");
        let cut = |name: &str| name.as_bytes()[..name.len().min(63)].to_vec();
        let expected = if database.is_empty() { cut(&user) } else { cut(&database) };
        prop_assert_eq!(who(body.as_bytes()), (cut(&user), Some(expected)));
    }

    #[test]
    fn parsing_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), ssl: bool, gssenc: bool) {
        let _ = parse(&bytes, Negotiated { ssl, gssenc });
    }
}
