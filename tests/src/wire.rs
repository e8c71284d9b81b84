//! The PostgreSQL protocol, byte for byte: first packets as a hostile or
//! unusual client may send them, and a strict reader of what comes back.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use socket2::SockRef;

/// SSLRequest, `NEGOTIATE_SSL_CODE` in `src/include/libpq/pqcomm.h`.
pub const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 0x04, 0xD2, 0x16, 0x2F];
/// GSSENCRequest, `NEGOTIATE_GSS_CODE`.
pub const GSSENC_REQUEST: [u8; 8] = [0, 0, 0, 8, 0x04, 0xD2, 0x16, 0x30];
/// The code of a CancelRequest, `CANCEL_REQUEST_CODE`.
pub const CANCEL_CODE: u32 = 80_877_102;
/// Protocol 3.0.
pub const PROTOCOL_3_0: u32 = 3 << 16;
/// How long a read waits before the test is told that nothing came.
pub const READ_LIMIT: Duration = Duration::from_secs(10);

/// A StartupMessage with the keys and values in this order.
#[must_use]
pub fn startup(protocol: u32, pairs: &[(&[u8], &[u8])]) -> Vec<u8> {
    let mut body = protocol.to_be_bytes().to_vec();
    for (key, value) in pairs {
        body.extend_from_slice(key);
        body.push(0);
        body.extend_from_slice(value);
        body.push(0);
    }
    body.push(0);
    first_packet(&body)
}

/// A StartupMessage of protocol 3.0 as every driver sends it.
#[must_use]
pub fn login(user: &str, database: &str) -> Vec<u8> {
    startup(
        PROTOCOL_3_0,
        &[
            (b"user", user.as_bytes()),
            (b"database", database.as_bytes()),
        ],
    )
}

/// A packet without a type byte: the length, which counts itself, then `body`.
#[must_use]
pub fn first_packet(body: &[u8]) -> Vec<u8> {
    let mut packet = (body.len() as u32 + 4).to_be_bytes().to_vec();
    packet.extend_from_slice(body);
    packet
}

/// A CancelRequest for a backend's process and key.
#[must_use]
pub fn cancel(process: u32, key: &[u8]) -> Vec<u8> {
    let mut body = CANCEL_CODE.to_be_bytes().to_vec();
    body.extend_from_slice(&process.to_be_bytes());
    body.extend_from_slice(key);
    first_packet(&body)
}

/// A message with a type byte.
#[must_use]
pub fn message(tag: u8, body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![tag];
    bytes.extend(first_packet(body));
    bytes
}

/// A simple query.
#[must_use]
pub fn query(sql: &str) -> Vec<u8> {
    let mut body = sql.as_bytes().to_vec();
    body.push(0);
    message(b'Q', &body)
}

/// A message as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The type byte.
    pub tag: u8,
    /// What follows the length.
    pub body: Vec<u8>,
}

/// An ErrorResponse, read strictly.
#[derive(Clone, PartialEq, Eq)]
pub struct ErrorResponse {
    /// Field type and text, in the order they came.
    pub fields: Vec<(u8, String)>,
}

impl ErrorResponse {
    /// Reads the body of an `E` message.
    ///
    /// # Errors
    /// When a field is not ended, the final NUL is missing or not last, or a
    /// text is not UTF-8.
    pub fn parse(body: &[u8]) -> Result<Self, String> {
        let mut fields = Vec::new();
        let mut rest = body;
        loop {
            match rest.split_first() {
                None => return Err("no final NUL".into()),
                Some((0, [])) => return Ok(Self { fields }),
                Some((0, more)) => return Err(format!("{} bytes after the final NUL", more.len())),
                Some((&kind, more)) => {
                    let end = more.iter().position(|byte| *byte == 0);
                    let end = end.ok_or("a field without its NUL")?;
                    let text = std::str::from_utf8(&more[..end])
                        .map_err(|error| format!("field {}: {error}", kind as char))?;
                    fields.push((kind, text.to_owned()));
                    rest = &more[end + 1..];
                }
            }
        }
    }

    /// The text of a field, empty if it is missing.
    #[must_use]
    pub fn field(&self, kind: u8) -> &str {
        let found = self.fields.iter().find(|(found, _)| *found == kind);
        found.map_or("", |(_, text)| text)
    }

    /// SQLSTATE.
    #[must_use]
    pub fn code(&self) -> &str {
        self.field(b'C')
    }

    /// The message text.
    #[must_use]
    pub fn text(&self) -> &str {
        self.field(b'M')
    }
}

impl fmt::Debug for ErrorResponse {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            out,
            "{} {} {:?}",
            self.field(b'S'),
            self.code(),
            self.text()
        )
    }
}

/// One TCP connection, raw.
#[derive(Debug)]
pub struct Wire {
    stream: TcpStream,
}

impl Wire {
    /// Connects.
    ///
    /// # Errors
    /// What connect says, also after a timeout of [`READ_LIMIT`].
    pub fn connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, READ_LIMIT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(READ_LIMIT))?;
        stream.set_write_timeout(Some(READ_LIMIT))?;
        Ok(Self { stream })
    }

    /// The socket.
    #[must_use]
    pub const fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// A second handle, to read and write from two threads.
    ///
    /// # Errors
    /// When no file descriptor is left.
    pub fn try_clone(&self) -> io::Result<Self> {
        let stream = self.stream.try_clone()?;
        Ok(Self { stream })
    }

    /// Sends all bytes.
    ///
    /// # Errors
    /// What send says.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends one byte at a time, each in a segment of its own.
    ///
    /// # Errors
    /// What send says.
    pub fn send_slowly(&mut self, bytes: &[u8], pause: Duration) -> io::Result<()> {
        for byte in bytes {
            self.stream.write_all(&[*byte])?;
            thread::sleep(pause);
        }
        Ok(())
    }

    /// The next message; `None` at the end of the stream.
    ///
    /// # Errors
    /// A timeout, a reset, or a stream that ends inside a message.
    pub fn message(&mut self) -> io::Result<Option<Message>> {
        let mut tag = [0];
        if self.stream.read(&mut tag)? == 0 {
            return Ok(None);
        }
        let mut length = [0; 4];
        self.stream.read_exact(&mut length)?;
        let length = u32::from_be_bytes(length);
        if !(4..=64 << 20).contains(&length) {
            return Err(io::Error::other(format!("message length {length}")));
        }
        let mut body = vec![0; length as usize - 4];
        self.stream.read_exact(&mut body)?;
        Ok(Some(Message { tag: tag[0], body }))
    }

    /// One byte, such as the answer to an SSLRequest.
    ///
    /// # Errors
    /// A timeout, a reset, or the end of the stream.
    pub fn byte(&mut self) -> io::Result<u8> {
        let mut byte = [0];
        self.stream.read_exact(&mut byte)?;
        Ok(byte[0])
    }

    /// Everything up to the end of the stream. A reset counts as an end.
    ///
    /// # Errors
    /// When the peer has not ended within `limit`.
    pub fn rest(&mut self, limit: Duration) -> io::Result<Vec<u8>> {
        let deadline = Instant::now() + limit;
        let mut bytes = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let left = left.max(Duration::from_millis(1));
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => bytes.extend_from_slice(&buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => break,
                Err(error) => return Err(error),
            }
        }
        self.stream.set_read_timeout(Some(READ_LIMIT))?;
        Ok(bytes)
    }

    /// Waits for the end of the stream; true if it came within `limit`.
    pub fn ends_within(&mut self, limit: Duration) -> bool {
        self.rest(limit).is_ok()
    }

    /// Sends FIN and keeps reading.
    ///
    /// # Errors
    /// What shutdown says.
    pub fn half_close(&self) -> io::Result<()> {
        self.stream.shutdown(Shutdown::Write)
    }

    /// Closes with RST.
    ///
    /// # Errors
    /// When the socket option is refused.
    pub fn reset(self) -> io::Result<()> {
        SockRef::from(&self.stream).set_linger(Some(Duration::ZERO))
    }
}
