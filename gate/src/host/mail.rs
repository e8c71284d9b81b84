//! Messages with descriptors, between two processes of one host.
#![forbid(unsafe_code)]

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::io::retry_on_intr;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    accept_with, bind, connect, listen, recvmsg, sendmsg, socket_with,
};

/// Descriptors that one message carries at most; the kernel's own bound is 253
/// (include/net/scm.h, SCM_MAX_FD).
pub const FDS_PER_MESSAGE: usize = 200;
/// Bytes of a message.
const BYTES_MAX: usize = 64 * 1024;
/// Those who wait for their turn.
const BACKLOG: i32 = 4;

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its process.
    pub pid: u32,
    /// Its effective user when it connected.
    pub uid: u32,
}

/// One end of a connection that keeps messages whole.
#[derive(Debug)]
pub struct Mailbox {
    socket: OwnedFd,
}

/// Binds a listener at a path where nothing is.
///
/// # Errors
/// The path cannot be had.
pub fn listen_at(path: &Path) -> io::Result<OwnedFd> {
    let socket = new_socket()?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

impl Mailbox {
    /// Connects to a listener.
    ///
    /// # Errors
    /// Nobody listens, or this user may not connect.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let socket = new_socket()?;
        let address = SocketAddrUnix::new(path)?;
        retry_on_intr(|| connect(&socket, &address))?;
        Ok(Self { socket })
    }

    /// Waits for the next connection.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn accept(listener: BorrowedFd<'_>) -> io::Result<Self> {
        let socket = retry_on_intr(|| accept_with(listener, SocketFlags::CLOEXEC))?;
        Ok(Self { socket })
    }

    /// Who is at the other end.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn peer(&self) -> io::Result<Peer> {
        let found = sockopt::socket_peercred(&self.socket)?;
        Ok(Peer {
            pid: found.pid.as_raw_nonzero().get().cast_unsigned(),
            uid: found.uid.as_raw(),
        })
    }

    /// Sends one message with at most [`FDS_PER_MESSAGE`] descriptors.
    ///
    /// # Errors
    /// The other end is gone or does not read within `patience`.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>], patience: Duration) -> io::Result<()> {
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_MESSAGE))];
        let mut ancillary = SendAncillaryBuffer::new(&mut room);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::other("too many descriptors for one message"));
        }
        sockopt::set_socket_timeout(&self.socket, Timeout::Send, Some(patience))?;
        let parts = [IoSlice::new(bytes)];
        retry_on_intr(|| sendmsg(&self.socket, &parts, &mut ancillary, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    /// Receives one message whole.
    ///
    /// # Errors
    /// `UnexpectedEof`: the other end is gone. `WouldBlock`: nothing came
    /// within `patience`.
    pub fn receive(&self, patience: Duration) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        sockopt::set_socket_timeout(&self.socket, Timeout::Recv, Some(patience))?;
        let mut bytes = vec![0; BYTES_MAX];
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_MESSAGE))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut room);
        // A ring that this thread has closed interrupts calls for a while.
        let received = retry_on_intr(|| {
            recvmsg(
                &self.socket,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            )
        })?;
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = message {
                fds.extend(passed);
            }
        }
        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // CTRUNC: no descriptor was left for some of those that came.
        if received
            .flags
            .intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC)
        {
            return Err(io::Error::other("a message arrived cut"));
        }
        bytes.truncate(received.bytes);
        Ok((bytes, fds))
    }
}

impl AsFd for Mailbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use super::*;

    const SOON: Duration = Duration::from_secs(5);

    #[test]
    fn messages_arrive_whole_with_their_descriptors() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("mail");
        let listener = listen_at(&path).expect("bound");
        let one = Mailbox::connect(&path).expect("connected");
        let other = Mailbox::accept(listener.as_fd()).expect("accepted");
        assert_eq!(other.peer().expect("known").pid, std::process::id());

        let file = directory.path().join("file");
        std::fs::write(&file, "what is in it").expect("written");
        let file = File::open(file).expect("opened");
        one.send(b"first", &[file.as_fd(), listener.as_fd()], SOON)
            .expect("sent");
        one.send(b"second", &[], SOON).expect("sent");
        let (bytes, fds) = other.receive(SOON).expect("received");
        assert_eq!((&bytes[..], fds.len()), (&b"first"[..], 2));
        let mut text = String::new();
        let mut passed = File::from(fds.into_iter().next().expect("a file"));
        passed.read_to_string(&mut text).expect("read");
        assert_eq!(text, "what is in it");
        assert_eq!(other.receive(SOON).expect("received").0, b"second");

        let quiet = other.receive(Duration::from_millis(10));
        let quiet = quiet.expect_err("nothing was sent").kind();
        assert_eq!(quiet, io::ErrorKind::WouldBlock);
        drop(one);
        let gone = other.receive(SOON).expect_err("the other end is gone");
        assert_eq!(gone.kind(), io::ErrorKind::UnexpectedEof);
    }
}
