//! The sockets that it listens on.

use std::fs::{self, Permissions};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::load::session;

const BACKLOG: i32 = 4096;

/// One of several at an address: each thread has its own.
///
/// # Errors
/// The address cannot be had.
pub fn tcp(address: SocketAddr) -> io::Result<Socket> {
    let kind = Type::STREAM.nonblocking().cloexec();
    let domain = Domain::for_address(address);
    let socket = session::like_ethernet(Socket::new(domain, kind, Some(Protocol::TCP))?)?;
    socket.set_reuse_port(true)?;
    // Accepted sockets inherit it.
    socket.set_tcp_nodelay(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}

/// The only one at its path: all threads accept from it.
///
/// # Errors
/// There is something of that name, or the path is too long.
pub fn unix(path: &Path) -> io::Result<Socket> {
    let kind = Type::STREAM.nonblocking().cloexec();
    let socket = Socket::new(Domain::UNIX, kind, None)?;
    socket.bind(&SockAddr::unix(path)?)?;
    // As PostgreSQL's own (`unix_socket_permissions`); PgBouncer is another user.
    fs::set_permissions(path, Permissions::from_mode(0o777))?;
    socket.listen(BACKLOG)?;
    Ok(socket)
}
