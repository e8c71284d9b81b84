//! The few backend messages that gate notices while a client logs in. The
//! bytes pass unchanged; the scanner only looks.

/// `K` + length + process id + key of up to 256 bytes.
const KEY_DATA_BYTES_MAX: usize = 4 + 256;
/// Type and length.
const HEAD_BYTES: usize = 5;

/// What the backend has said so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// AuthenticationOk.
    pub authenticated: bool,
    /// ErrorResponse.
    pub error: bool,
    /// ReadyForQuery: login is over.
    pub ready: bool,
}

/// What names a backend in a CancelRequest: its process id and key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackendKey {
    /// Of protocol 3.0: a key of 4 bytes. Without memory of its own, for every
    /// idle session keeps one.
    Short([u8; 8]),
    /// Of protocol 3.2: up to 256 bytes.
    Long(Box<[u8]>),
}

impl BackendKey {
    /// A CancelRequest for this backend.
    #[must_use]
    pub fn cancel_request(&self) -> Vec<u8> {
        let key: &[u8] = match self {
            Self::Short(key) => key,
            Self::Long(key) => key,
        };
        let mut packet = Vec::with_capacity(key.len() + 8);
        packet.extend_from_slice(&(key.len() as u32 + 8).to_be_bytes());
        packet.extend_from_slice(&(1234_u32 << 16 | 5678).to_be_bytes());
        packet.extend_from_slice(key);
        packet
    }
}

/// Follows the framing of the backend's messages up to ReadyForQuery.
#[derive(Clone, Debug, Default)]
pub struct LoginScanner {
    head: [u8; HEAD_BYTES],
    head_filled: usize,
    body_left: usize,
    body_seen: usize,
    authentication: [u8; 4],
    key_data: Vec<u8>,
    seen: Seen,
    lost: bool,
}

impl LoginScanner {
    /// Looks at the next bytes. Past ReadyForQuery it looks no more.
    pub fn scan(&mut self, mut bytes: &[u8]) -> Seen {
        while !bytes.is_empty() && !self.seen.ready && !self.lost {
            if self.body_left == 0 {
                bytes = self.take_head(bytes);
            } else {
                bytes = self.take_body(bytes);
            }
        }
        self.seen
    }

    /// What it has seen so far.
    #[must_use]
    pub const fn seen(&self) -> Seen {
        self.seen
    }

    /// What names this backend in a CancelRequest, if it said so.
    #[must_use]
    pub fn key(&self) -> Option<BackendKey> {
        match self.key_data.as_slice() {
            short if short.len() < 8 => None,
            key => Some(match key.try_into() {
                Ok(short) => BackendKey::Short(short),
                Err(_) => BackendKey::Long(key.into()),
            }),
        }
    }

    fn take_head<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let count = bytes.len().min(HEAD_BYTES - self.head_filled);
        self.head[self.head_filled..self.head_filled + count].copy_from_slice(&bytes[..count]);
        self.head_filled += count;
        if self.head_filled == HEAD_BYTES {
            let [_, length @ ..] = self.head;
            // A length that cannot be: not PostgreSQL's framing, so there is
            // nothing more to notice.
            match (u32::from_be_bytes(length) as usize).checked_sub(4) {
                Some(0) => self.end_message(),
                Some(body) => self.body_left = body,
                None => self.lost = true,
            }
            self.body_seen = 0;
        }
        &bytes[count..]
    }

    fn take_body<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let count = bytes.len().min(self.body_left);
        let (body, rest) = bytes.split_at(count);
        match self.head[0] {
            b'R' => {
                for (offset, byte) in (self.body_seen..4).zip(body) {
                    self.authentication[offset] = *byte;
                }
            }
            b'K' => {
                if self.body_seen == 0 {
                    self.key_data.clear();
                }
                let room = KEY_DATA_BYTES_MAX - self.key_data.len();
                self.key_data.extend_from_slice(&body[..count.min(room)]);
            }
            _ => {}
        }
        self.body_seen += count;
        self.body_left -= count;
        if self.body_left == 0 {
            self.end_message();
        }
        rest
    }

    fn end_message(&mut self) {
        match self.head[0] {
            b'R' if self.body_seen >= 4 && self.authentication == [0; 4] => {
                self.seen.authenticated = true;
            }
            b'E' => self.seen.error = true,
            b'Z' => self.seen.ready = true,
            _ => {}
        }
        self.head_filled = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u8, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![kind];
        bytes.extend_from_slice(&(body.len() as u32 + 4).to_be_bytes());
        bytes.extend_from_slice(body);
        bytes
    }

    fn login(key: &[u8]) -> Vec<u8> {
        let mut key_data = 77_u32.to_be_bytes().to_vec();
        key_data.extend_from_slice(key);
        [
            message(b'R', &[0, 0, 0, 10, b'S', 0, 0]),
            message(b'R', &[0, 0, 0, 0]),
            message(b'S', b"server_version\x0015\0"),
            message(b'K', &key_data),
            message(b'Z', b"I"),
            message(b'D', b"not looked at"),
        ]
        .concat()
    }

    #[test]
    fn c5_login_is_followed_at_any_segmentation_and_key_length() {
        for key_length in [4, 32, 256] {
            let key = vec![7; key_length];
            let bytes = login(&key);
            for step in [1, 2, 3, 7, bytes.len()] {
                let mut scanner = LoginScanner::default();
                for chunk in bytes.chunks(step) {
                    scanner.scan(chunk);
                }
                let seen = scanner.scan(&[]);
                assert!(seen.authenticated && seen.ready && !seen.error);
                let found = scanner.key().unwrap();
                assert_eq!(matches!(found, BackendKey::Short(_)), key_length == 4);
                let cancel = found.cancel_request();
                assert_eq!(cancel.len(), 12 + key_length);
                assert_eq!(cancel[..4], (12 + key_length as u32).to_be_bytes());
                assert_eq!(cancel[4..8], [0x04, 0xd2, 0x16, 0x2e]);
                assert_eq!(cancel[8..12], 77_u32.to_be_bytes());
                assert_eq!(cancel[12..], key[..]);
            }
        }
    }

    #[test]
    fn a_refused_login_is_an_error_and_never_ready() {
        let mut scanner = LoginScanner::default();
        let seen = scanner.scan(&message(b'E', b"SFATAL\0C53300\0\0"));
        assert!(seen.error && !seen.ready && !seen.authenticated);
        assert_eq!(scanner.key(), None);
    }

    #[test]
    fn bytes_that_are_not_postgresql_are_not_ready() {
        let mut scanner = LoginScanner::default();
        assert_eq!(
            scanner.scan(b"HTTP/1.1 400 Bad Request\r\n\r\nZ"),
            Seen::default()
        );
        let mut scanner = LoginScanner::default();
        assert_eq!(scanner.scan(&[b'Z', 0, 0, 0, 1]), Seen::default());
    }
}
