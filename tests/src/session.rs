//! A client that logs in without a password and runs simple queries.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use crate::wire::{self, ErrorResponse, Wire};

/// Why a session could not be opened.
#[derive(Debug)]
pub enum OpenError {
    /// An ErrorResponse, then the end of the stream.
    Refused(ErrorResponse),
    /// The end of the stream without an ErrorResponse.
    Closed,
    /// A reset, a timeout, a refused connection.
    Io(io::Error),
    /// Bytes that are not the protocol.
    Protocol(String),
}

impl OpenError {
    /// SQLSTATE of a refusal, empty otherwise.
    #[must_use]
    pub fn code(&self) -> &str {
        match self {
            Self::Refused(error) => error.code(),
            _ => "",
        }
    }

    /// Text of a refusal, empty otherwise.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::Refused(error) => error.text(),
            _ => "",
        }
    }
}

impl fmt::Display for OpenError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{self:?}")
    }
}

impl std::error::Error for OpenError {}

impl From<io::Error> for OpenError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// An admitted client.
#[derive(Debug)]
pub struct Session {
    /// The connection.
    pub wire: Wire,
    /// BackendKeyData: the process.
    pub process: u32,
    /// BackendKeyData: the key.
    pub key: Vec<u8>,
    /// How many NegotiateProtocolVersion messages came before ReadyForQuery.
    pub negotiations: usize,
}

/// One row of text columns.
pub type Row = Vec<Option<String>>;

impl Session {
    /// Connects, logs in and waits for ReadyForQuery.
    ///
    /// # Errors
    /// How the login ended instead.
    pub fn open(address: SocketAddr, user: &str, database: &str) -> Result<Self, OpenError> {
        let mut wire = Wire::connect(address)?;
        wire.send(&wire::login(user, database))?;
        Self::finish(wire)
    }

    /// Waits for ReadyForQuery after a startup packet that was sent.
    ///
    /// # Errors
    /// How the login ended instead.
    pub fn finish(wire: Wire) -> Result<Self, OpenError> {
        let mut session = Self {
            wire,
            process: 0,
            key: Vec::new(),
            negotiations: 0,
        };
        loop {
            let Some(message) = session.wire.message()? else {
                return Err(OpenError::Closed);
            };
            match message.tag {
                b'Z' => return Ok(session),
                b'K' => {
                    let (process, key) = message.body.split_at_checked(4).unwrap_or_default();
                    session.process = process
                        .iter()
                        .fold(0, |all, byte| all << 8 | u32::from(*byte));
                    session.key = key.to_vec();
                }
                b'v' => session.negotiations += 1,
                b'E' => {
                    let error = ErrorResponse::parse(&message.body).map_err(OpenError::Protocol)?;
                    return Err(OpenError::Refused(error));
                }
                b'R' if message.body != [0; 4] => {
                    return Err(OpenError::Protocol("a password is asked for".into()));
                }
                b'R' | b'S' | b'N' => {}
                tag => return Err(OpenError::Protocol(format!("message {:?}", tag as char))),
            }
        }
    }

    /// Runs a simple query and reads its answer.
    ///
    /// # Errors
    /// The server's error, or how the connection ended.
    pub fn query(&mut self, sql: &str) -> Result<Vec<Row>, OpenError> {
        self.wire.send(&wire::query(sql))?;
        self.answer()
    }

    /// The one column of the one row of a query.
    ///
    /// # Errors
    /// As [`Session::query`], or when there is no such value.
    pub fn value(&mut self, sql: &str) -> Result<String, OpenError> {
        let rows = self.query(sql)?;
        let value = rows
            .into_iter()
            .next()
            .and_then(|row| row.into_iter().next());
        value
            .flatten()
            .ok_or_else(|| OpenError::Protocol(format!("no value from {sql}")))
    }

    /// Reads rows up to ReadyForQuery.
    ///
    /// # Errors
    /// The server's error, or how the connection ended.
    pub fn answer(&mut self) -> Result<Vec<Row>, OpenError> {
        let mut rows = Vec::new();
        let mut failed = None;
        loop {
            let Some(message) = self.wire.message()? else {
                return Err(failed.map_or(OpenError::Closed, OpenError::Refused));
            };
            match message.tag {
                b'D' => rows.push(row(&message.body).map_err(OpenError::Protocol)?),
                b'E' => {
                    let error = ErrorResponse::parse(&message.body).map_err(OpenError::Protocol)?;
                    failed = Some(error);
                }
                b'Z' => return failed.map_or(Ok(rows), |error| Err(OpenError::Refused(error))),
                _ => {}
            }
        }
    }

    /// Says goodbye and waits until the other side has closed.
    ///
    /// # Errors
    /// When it does not close within [`wire::READ_LIMIT`].
    pub fn close(mut self) -> io::Result<()> {
        self.wire.send(&wire::message(b'X', &[]))?;
        self.wire.rest(wire::READ_LIMIT)?;
        Ok(())
    }

    /// The CancelRequest for this session.
    #[must_use]
    pub fn cancel_packet(&self) -> Vec<u8> {
        wire::cancel(self.process, &self.key)
    }
}

/// Reads the columns of a DataRow.
fn row(body: &[u8]) -> Result<Row, String> {
    let (count, mut rest) = body.split_at_checked(2).ok_or("short DataRow")?;
    let count = u16::from_be_bytes([count[0], count[1]]);
    let mut columns = Vec::with_capacity(usize::from(count));
    for _ in 0..count {
        let (length, after) = rest.split_first_chunk().ok_or("short column")?;
        let length = i32::from_be_bytes(*length);
        if length < 0 {
            columns.push(None);
            rest = after;
            continue;
        }
        let (value, after) = after
            .split_at_checked(length as usize)
            .ok_or("short value")?;
        columns.push(Some(String::from_utf8_lossy(value).into_owned()));
        rest = after;
    }
    Ok(columns)
}
