//! A pipe whose both ends are ours: the place through which splice(2) moves
//! bytes between two sockets without a copy.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

/// A pipe for [`Pipe::fill`] and [`Pipe::drain`].
#[derive(Debug)]
pub struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
}

impl Pipe {
    /// A pipe that holds `bytes`.
    ///
    /// # Errors
    /// No descriptor is left, or the kernel makes the pipe so small that
    /// copying is cheaper: past `fs.pipe-user-pages-soft` a user without
    /// CAP_SYS_RESOURCE gets pipes of a page or two (fs/pipe.c).
    pub fn new(bytes: usize) -> io::Result<Self> {
        let mut ends = [0; 2];
        // SAFETY: the kernel writes two descriptors into `ends`.
        if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: two fresh descriptors that nobody else knows.
        let (read, write) =
            unsafe { (OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])) };
        let wanted = i32::try_from(bytes).unwrap_or(i32::MAX);
        // SAFETY: a call on a descriptor that lives.
        let got = unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETPIPE_SZ, wanted) };
        if got < wanted {
            return Err(if got < 0 {
                io::Error::last_os_error()
            } else {
                io::Error::other(format!("a pipe of {got} bytes only"))
            });
        }
        Ok(Self { read, write })
    }

    /// Moves up to `bytes` from a socket into the pipe; 0 is the peer's end.
    ///
    /// # Errors
    /// As splice(2). EAGAIN: nothing to read, or no room in a pipe that is not
    /// empty.
    pub fn fill(&self, source: BorrowedFd<'_>, bytes: usize) -> io::Result<usize> {
        splice(source.as_raw_fd(), self.write.as_raw_fd(), bytes)
    }

    /// Moves up to `bytes` from the pipe to a socket.
    ///
    /// # Errors
    /// As splice(2). EPIPE comes without a signal only because Rust's runtime
    /// ignores SIGPIPE.
    pub fn drain(&self, sink: BorrowedFd<'_>, bytes: usize) -> io::Result<usize> {
        splice(self.read.as_raw_fd(), sink.as_raw_fd(), bytes)
    }
}

/// Whether a write to a broken pipe or socket is an error, not the end of the
/// process: splice(2) has no flag for that.
#[must_use]
pub fn ignores_sigpipe() -> bool {
    // SAFETY: all zero is a sigaction, and the kernel fills it.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: no new action is given; `action` is writable.
    let result = unsafe { libc::sigaction(libc::SIGPIPE, ptr::null(), &raw mut action) };
    result == 0 && action.sa_sigaction == libc::SIG_IGN
}

fn splice(from: i32, to: i32, bytes: usize) -> io::Result<usize> {
    let flags = libc::SPLICE_F_MOVE | libc::SPLICE_F_NONBLOCK;
    // SAFETY: no memory of ours is involved; null offsets are right for pipes
    // and sockets.
    let moved = unsafe { libc::splice(from, ptr::null_mut(), to, ptr::null_mut(), bytes, flags) };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn bytes_go_through_and_the_end_is_seen() {
        let pipe = Pipe::new(1 << 16).unwrap();
        let (mut client, source) = UnixStream::pair().unwrap();
        let (sink, mut server) = UnixStream::pair().unwrap();
        source.set_nonblocking(true).unwrap();
        let empty = pipe.fill(source.as_fd(), 100).unwrap_err();
        assert_eq!(empty.kind(), io::ErrorKind::WouldBlock);
        client.write_all(b"bulk").unwrap();
        drop(client);
        assert_eq!(pipe.fill(source.as_fd(), 100).unwrap(), 4);
        assert_eq!(pipe.drain(sink.as_fd(), 3).unwrap(), 3);
        assert_eq!(pipe.drain(sink.as_fd(), 100).unwrap(), 1);
        assert_eq!(pipe.fill(source.as_fd(), 100).unwrap(), 0);
        drop(sink);
        let mut text = String::new();
        server.read_to_string(&mut text).unwrap();
        assert_eq!(text, "bulk");
    }

    #[test]
    fn k8_sigpipe_is_ignored() {
        assert!(ignores_sigpipe());
    }

    #[test]
    fn k8_a_broken_sink_is_an_error_and_no_signal() {
        let pipe = Pipe::new(1 << 16).unwrap();
        let (mut client, source) = UnixStream::pair().unwrap();
        let (sink, server) = UnixStream::pair().unwrap();
        client.write_all(b"bulk").unwrap();
        pipe.fill(source.as_fd(), 100).unwrap();
        drop(server);
        let error = pipe.drain(sink.as_fd(), 100).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
