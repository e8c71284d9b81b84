//! Sessions that stay open.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use socket2::{Domain, Protocol, Socket, Type};

use crate::wire;

/// Who loads log in as.
pub const USER: &str = "bench";
/// Where they log in to.
pub const DATABASE: &str = "postgres";

/// What is on its way for less when a load ends is no sign of a stall.
pub const LATE: Duration = Duration::from_millis(10);
/// What is on its way for longer when a load ends, and not by a schedule, hangs.
pub const HUNG: Duration = Duration::from_secs(1);
/// Nothing takes longer while sessions are opened.
const PATIENCE: Duration = Duration::from_secs(10);
const REPLY_BYTES: usize = 100;
/// 1500 bytes without the headers of IPv4 and TCP.
const ETHERNET_MSS: u32 = 1460;

/// A session that was let in and has had an answer from the backend, so that no
/// proxy can put its part of the work off.
///
/// # Errors
/// It was not let in, with the target's own words.
pub fn open(target: SocketAddr) -> Result<TcpStream> {
    let socket = like_ethernet(Socket::new(
        Domain::for_address(target),
        Type::STREAM.cloexec(),
        Some(Protocol::TCP),
    )?)?;
    socket
        .connect_timeout(&target.into(), PATIENCE)
        .context("connect")?;
    let mut stream = TcpStream::from(socket);
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

/// Has both ends of a socket's connections send segments as over Ethernet; the
/// kernel still moves many of them at once (segmentation offload).
///
/// Loopback's own segments of 64 KiB are more than a receive window often has room
/// for. Who reads by small buffers opens it little by little, and the sender waits
/// for more (silly window avoidance, RFC 9293 3.8.6.2.1), at last for its timer of
/// 200 ms: a stall that no network has.
///
/// # Errors
/// Never, for a TCP socket that is not connected.
pub fn like_ethernet(socket: Socket) -> io::Result<Socket> {
    socket.set_tcp_mss(ETHERNET_MSS)?;
    Ok(socket)
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
        match stream.read(&mut part) {
            Ok(0) => bail!("the end, after {} bytes", read.len()),
            Ok(bytes) => read.extend_from_slice(&part[..bytes]),
            // What a socket with a time limit says when it has passed (socket(7)).
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                bail!("no answer within {PATIENCE:?}")
            }
            Err(error) => return Err(error.into()),
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
