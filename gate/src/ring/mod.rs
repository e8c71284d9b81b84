//! The only module that names io_uring.
//!
//! A worker's ring carries three operations: multishot accept, multishot poll
//! and cancel. None of them lends memory to the kernel: bytes are moved by
//! `recv` and `send` when a poll says so, which measured faster than ring
//! reads and leaves nothing to keep alive. What is left to hold is that a
//! descriptor stays open until the last completion of its poll; the worker's
//! teardown does that (cancel, wait, then close).

mod key;

pub use key::{Key, Kind};

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, cqueue, opcode, squeue};

/// Entries of the submission queue; a full one is submitted on the spot.
const SUBMISSIONS: u32 = 1024;
/// Entries of the completion queue. Past it the kernel keeps completions on a
/// list of its own and ends multishots, which are armed again.
const COMPLETIONS: u32 = 16_384;

/// Bits of [`Event::Ready`].
pub mod ready {
    /// There may be bytes to read.
    pub const READ: u32 = libc::POLLIN as u32;
    /// There may be room to write.
    pub const WRITE: u32 = libc::POLLOUT as u32;
    /// The peer has ended its side.
    pub const PEER_ENDED: u32 = libc::POLLRDHUP as u32;
    /// Both sides have ended.
    pub const HANG_UP: u32 = libc::POLLHUP as u32;
    /// The socket has an error.
    pub const ERROR: u32 = libc::POLLERR as u32;
}

/// What came of an operation.
#[derive(Debug)]
pub enum Event {
    /// A connection was accepted: non-blocking, closed on exec.
    Accepted(OwnedFd),
    /// Accepting failed.
    AcceptFailed(io::Error),
    /// A descriptor is ready for what the bits of [`ready`] say.
    Ready(u32),
    /// A poll ended, by cancel or by error.
    PollEnded,
}

/// One completion.
#[derive(Debug)]
pub struct Completion {
    /// The operation's key.
    pub key: Key,
    /// What came of it.
    pub event: Event,
    /// Whether the operation goes on. If not, it may be armed again.
    pub more: bool,
}

/// Why a ring cannot be had: cause and cure.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// ENOSYS.
    #[error("this kernel has no io_uring; gate needs Linux 6.1 or newer, with io_uring allowed")]
    Missing,
    /// EPERM.
    #[error(
        "io_uring is forbidden here (sysctl kernel.io_uring_disabled = {sysctl}); set it to 0, or allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile (Docker's default profile forbids them)"
    )]
    Forbidden {
        /// The sysctl's value, or `?`.
        sysctl: String,
    },
    /// ENOMEM.
    #[error("io_uring may not lock enough memory; raise RLIMIT_MEMLOCK (ulimit -l)")]
    Memory,
    /// EINVAL: the set-up flags are unknown.
    #[error("this kernel's io_uring is too old: it lacks {0}; gate needs Linux 6.1 or newer")]
    TooOld(&'static str),
    /// Anything else.
    #[error("io_uring cannot be set up: {0}")]
    Other(#[source] io::Error),
}

/// A worker's ring. Belongs to the thread that made it.
pub struct Ring {
    uring: IoUring,
}

impl Ring {
    /// Sets a ring up and checks what the kernel knows.
    ///
    /// # Errors
    /// See [`RingError`].
    pub fn new() -> Result<Self, RingError> {
        let uring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_cqsize(COMPLETIONS)
            .build(SUBMISSIONS)
            .map_err(diagnose)?;
        let mut probe = Probe::new();
        uring
            .submitter()
            .register_probe(&mut probe)
            .map_err(diagnose)?;
        for (code, name) in [
            (opcode::AcceptMulti::CODE, "IORING_OP_ACCEPT"),
            (opcode::PollAdd::CODE, "IORING_OP_POLL_ADD"),
            (opcode::AsyncCancel::CODE, "IORING_OP_ASYNC_CANCEL"),
        ] {
            if !probe.is_supported(code) {
                return Err(RingError::TooOld(name));
            }
        }
        if !uring.params().is_feature_nodrop() {
            return Err(RingError::TooOld("IORING_FEAT_NODROP"));
        }
        Ok(Self { uring })
    }

    /// Accepts connections until an error ends it.
    ///
    /// # Errors
    /// The queue is full and cannot be submitted.
    pub fn accept(&mut self, listener: BorrowedFd<'_>, key: Key) -> io::Result<()> {
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        let operation = opcode::AcceptMulti::new(Fd(listener.as_raw_fd())).flags(flags);
        self.push(&operation.build().user_data(key.encode()))
    }

    /// Reports each change of readiness until cancelled. Like an
    /// edge-triggered epoll: read and write until the socket would block.
    ///
    /// # Errors
    /// The queue is full and cannot be submitted.
    pub fn poll(&mut self, socket: BorrowedFd<'_>, interest: u32, key: Key) -> io::Result<()> {
        let operation = opcode::PollAdd::new(Fd(socket.as_raw_fd()), interest).multi(true);
        self.push(&operation.build().user_data(key.encode()))
    }

    /// Ends an operation; its last completion still comes.
    ///
    /// # Errors
    /// The queue is full and cannot be submitted.
    pub fn cancel(&mut self, key: Key) -> io::Result<()> {
        let operation = opcode::AsyncCancel::new(key.encode());
        self.push(&operation.build().user_data(key::IGNORED))
    }

    /// Submits what is queued, waits for a completion or the timeout, and
    /// appends all completions there are.
    ///
    /// # Errors
    /// The ring itself failed; nothing is lost, but nothing more will come.
    pub fn wait(&mut self, timeout: Duration, out: &mut Vec<Completion>) -> io::Result<()> {
        let timespec = Timespec::from(timeout);
        let args = SubmitArgs::new().timespec(&timespec);
        let submitted = self.uring.submitter().submit_with_args(1, &args);
        match submitted {
            Ok(_) => {}
            Err(error) if passes(&error) => {}
            Err(error) => return Err(error),
        }
        for entry in self.uring.completion() {
            out.extend(completion(&entry));
        }
        Ok(())
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        loop {
            // SAFETY: the operations of this module point to no memory, and a
            // descriptor that is closed too early makes the kernel answer
            // EBADF, or watch another file, but touches no memory of ours.
            if unsafe { self.uring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            match self.uring.submit() {
                Err(error) if !passes(&error) => return Err(error),
                _ => {}
            }
        }
    }
}

/// Whether entering the ring failed for a reason of the moment: the timeout, a
/// signal, completions to be taken first, no memory just now.
fn passes(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN)
    )
}

fn completion(entry: &cqueue::Entry) -> Option<Completion> {
    let key = Key::decode(entry.user_data())?;
    let result = entry.result();
    let event = match key.kind {
        Kind::Accept => match u32::try_from(result) {
            Ok(_) => {
                // SAFETY: an accept's result is a fresh descriptor, and this
                // is the only place that sees it.
                Event::Accepted(unsafe { OwnedFd::from_raw_fd(result) })
            }
            Err(_) => Event::AcceptFailed(io::Error::from_raw_os_error(-result)),
        },
        Kind::Client | Kind::Backend | Kind::Waker => match u32::try_from(result) {
            Ok(bits) => Event::Ready(bits),
            Err(_) => Event::PollEnded,
        },
    };
    Some(Completion {
        key,
        event,
        more: cqueue::more(entry.flags()),
    })
}

fn diagnose(error: io::Error) -> RingError {
    match error.raw_os_error() {
        Some(libc::ENOSYS) => RingError::Missing,
        Some(libc::EPERM | libc::EACCES) => {
            let sysctl = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
            RingError::Forbidden {
                sysctl: sysctl.map_or_else(|_| "?".to_owned(), |text| text.trim().to_owned()),
            }
        }
        Some(libc::ENOMEM) => RingError::Memory,
        Some(libc::EINVAL) => RingError::TooOld("IORING_SETUP_DEFER_TASKRUN"),
        _ => RingError::Other(error),
    }
}

#[cfg(test)]
mod tests;
