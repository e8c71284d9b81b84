//! How many connections wait in a listening socket to be accepted.

use std::io;
use std::mem::{MaybeUninit, offset_of, size_of};
use std::os::fd::{AsRawFd as _, BorrowedFd};

/// Connections that the kernel has completed and nobody has accepted yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AcceptQueue {
    /// How many there are.
    pub length: u64,
    /// At how many new ones are dropped.
    pub limit: u64,
}

/// The accept queue of a listening TCP socket.
///
/// # Errors
/// It is no such socket.
pub fn accept_queue(socket: BorrowedFd<'_>) -> io::Result<AcceptQueue> {
    let mut info = MaybeUninit::<libc::tcp_info>::zeroed();
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: a zeroed tcp_info, of which the kernel fills as many bytes as
    // `length` says at most.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: plain numbers, zeroed before the kernel filled them.
    let info = unsafe { info.assume_init() };
    // Any kernel has these fields; LISTEN is 10 (include/net/tcp_states.h).
    if (length as usize) < offset_of!(libc::tcp_info, tcpi_lost) || info.tcpi_state != 10 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // Of a listening socket these two mean something else (tcp_get_info in
    // net/ipv4/tcp.c).
    Ok(AcceptQueue {
        length: u64::from(info.tcpi_unacked),
        limit: u64::from(info.tcpi_sacked),
    })
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn connections_that_wait_are_counted() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let queue = || accept_queue(listener.as_fd()).unwrap();
        assert_eq!(queue().length, 0);
        assert!(queue().limit >= 1);
        let address = listener.local_addr().unwrap();
        let clients: Vec<_> = (0..3)
            .map(|_| TcpStream::connect(address).unwrap())
            .collect();
        assert_eq!(queue().length, 3);
        drop(listener.accept().unwrap());
        assert_eq!(queue().length, 2);
        assert!(accept_queue(clients[0].as_fd()).is_err());
    }
}
