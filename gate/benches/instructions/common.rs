//! Packets as clients and servers send them.

/// SSLRequest.
pub const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];

/// CancelRequest with a key of four bytes.
pub const CANCEL_REQUEST: [u8; 16] = [
    0, 0, 0, 16, 0x04, 0xd2, 0x16, 0x2e, 0, 0, 0x12, 0x67, 0, 0, 0, 42,
];

/// A StartupMessage as psql sends it, with `extra` bytes of options.
pub fn startup(extra: usize) -> Vec<u8> {
    let mut body = 0x0003_0000_u32.to_be_bytes().to_vec();
    let options = "x".repeat(extra);
    let mut parameters = vec![
        ("user", "app"),
        ("database", "production"),
        ("application_name", "psql"),
        ("client_encoding", "UTF8"),
    ];
    if extra > 0 {
        parameters.push(("options", &options));
    }
    for (name, value) in parameters {
        for text in [name, value] {
            body.extend_from_slice(text.as_bytes());
            body.push(0);
        }
    }
    body.push(0);
    let mut packet = (body.len() as u32 + 4).to_be_bytes().to_vec();
    packet.append(&mut body);
    packet
}

/// What PostgreSQL 15 sends from AuthenticationOk to ReadyForQuery.
pub fn login() -> Vec<u8> {
    let parameters = [
        ("application_name", "psql"),
        ("client_encoding", "UTF8"),
        ("DateStyle", "ISO, MDY"),
        ("default_transaction_read_only", "off"),
        ("in_hot_standby", "off"),
        ("integer_datetimes", "on"),
        ("IntervalStyle", "postgres"),
        ("is_superuser", "off"),
        ("server_encoding", "UTF8"),
        ("server_version", "15.14 (Debian 15.14-0+deb12u1)"),
        ("session_authorization", "app"),
        ("standard_conforming_strings", "on"),
        ("TimeZone", "Etc/UTC"),
    ];
    let mut reply = message(b'R', &[0; 4]);
    for (name, value) in parameters {
        reply.append(&mut parameter(name, value));
    }
    reply.append(&mut message(b'K', &[0, 0, 0x12, 0x67, 0, 0, 0, 42]));
    reply.append(&mut message(b'Z', b"I"));
    reply
}

/// The same behind 256 kB of notices, as a login trigger can raise them.
pub fn large_login() -> Vec<u8> {
    let notice = [&b"SNOTICE\0C00000\0M"[..], &[b'x'; 1007], b"\0\0"].concat();
    let mut reply = message(b'N', &notice).repeat(256);
    reply.append(&mut login());
    reply
}

fn parameter(name: &str, value: &str) -> Vec<u8> {
    message(b'S', format!("{name}\0{value}\0").as_bytes())
}

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![kind];
    bytes.extend_from_slice(&(body.len() as u32 + 4).to_be_bytes());
    bytes.extend_from_slice(body);
    bytes
}
