//! Sessions that stay open.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::wire;

/// Who loads log in as.
pub const USER: &str = "bench";
/// Where they log in to.
pub const DATABASE: &str = "postgres";

/// What is on its way for less when a load ends is no sign of a stall.
pub const LATE: Duration = Duration::from_millis(10);
/// Nothing takes longer while sessions are opened.
const PATIENCE: Duration = Duration::from_secs(10);
const REPLY_BYTES: usize = 100;

/// A session that was let in and has had an answer from the backend, so that no
/// proxy can put its part of the work off.
///
/// # Errors
/// It was not let in, with the target's own words.
pub fn open(target: SocketAddr) -> Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&target, PATIENCE).context("connect")?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(&wire::startup_packet(USER, DATABASE))?;
    until_ready(&mut stream).context("login")?;
    stream.write_all(&wire::request(wire::REQUEST_BYTES_MIN, REPLY_BYTES))?;
    until_ready(&mut stream).context("first answer")?;
    stream.set_nonblocking(true)?;
    Ok(stream)
}

/// Many of them.
///
/// # Errors
/// One of them was not let in.
pub fn open_all(target: SocketAddr, count: usize) -> Result<Vec<TcpStream>> {
    (0..count)
        .map(|index| open(target).with_context(|| format!("session {index} of {count}")))
        .collect()
}

/// Reads to ReadyForQuery.
fn until_ready(stream: &mut TcpStream) -> Result<()> {
    let mut read = Vec::new();
    loop {
        let mut part = [0; 4096];
        match stream.read(&mut part)? {
            0 => bail!("the end, after {} bytes", read.len()),
            bytes => read.extend_from_slice(&part[..bytes]),
        }
        for (kind, body) in wire::messages(&read) {
            match kind {
                b'Z' => return Ok(()),
                b'E' => bail!("{}", text(body)),
                _ => {}
            }
        }
    }
}

/// An ErrorResponse for people.
#[must_use]
pub fn text(error: &[u8]) -> String {
    let fields = error.split(|byte| *byte == 0);
    let fields = fields.filter_map(|field| match field {
        [b'S' | b'C' | b'M', text @ ..] => Some(String::from_utf8_lossy(text)),
        _ => None,
    });
    fields.collect::<Vec<_>>().join(" ")
}
