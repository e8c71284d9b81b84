//! Ports for the servers of tests, of which no two get the same.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Mutex, PoisonError};

use socket2::{Domain, Socket, Type};

/// The first of all ports.
const FIRST: u16 = 20_000;
/// They end below 32768, where the kernel begins to pick outgoing ports.
const COUNT: u16 = 12_000;
/// From the first port that one process looks at to that of the next: runs
/// side by side seldom meet.
const STRIDE: u32 = 397;

/// Ports that were given, held until this process ends.
static HELD: Mutex<Vec<Socket>> = Mutex::new(Vec::new());

/// A TCP port on 127.0.0.1 that nobody has, and that no other caller of this
/// gets while this process lives, in whichever process.
///
/// # Panics
/// When all ports are taken.
#[must_use]
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let begin = std::process::id().wrapping_mul(STRIDE) % u32::from(COUNT);
    for _ in 0..COUNT {
        let step = u32::from(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = FIRST + ((begin + step) % u32::from(COUNT)) as u16;
        if let Ok(socket) = hold(port) {
            let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
            held.push(socket);
            return port;
        }
    }
    panic!("no free port from {FIRST} on");
}

/// Binds a port to hold it. The bind fails while anybody else is bound to it;
/// afterwards whoever sets SO_REUSEADDR, as every server does, may bind it too and
/// listen: this socket never does.
fn hold(port: u16) -> io::Result<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    let address: SocketAddr = (Ipv4Addr::LOCALHOST, port).into();
    socket.bind(&address.into())?;
    socket.set_reuse_address(true)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_port_that_was_given_is_held_and_a_server_can_listen_there() {
        let port = free_port();
        let again = hold(port).expect_err("it is given").kind();
        assert_eq!(again, io::ErrorKind::AddrInUse);
        let at = (Ipv4Addr::LOCALHOST, port);
        let refused = TcpStream::connect(at).expect_err("nobody listens").kind();
        assert_eq!(refused, io::ErrorKind::ConnectionRefused);
        // As gate does: a bind alone first, then a group.
        let group = || {
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.set_reuse_address(true)?;
            socket.set_reuse_port(true)?;
            socket.bind(&SocketAddr::from(at).into())?;
            socket.listen(1)?;
            io::Result::Ok(socket)
        };
        drop(TcpListener::bind(at).expect("alone"));
        let _group = [group().expect("the first"), group().expect("the second")];
        TcpStream::connect(at).expect("a server listens");
        assert!(hold(port).is_err(), "given while the server listens");
    }

    #[test]
    fn every_port_is_another() {
        let mut ports: Vec<u16> = std::thread::scope(|scope| {
            let ask = || (0..50).map(|_| free_port()).collect::<Vec<_>>();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().expect("no panic"))
                .collect()
        });
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 200);
    }
}
