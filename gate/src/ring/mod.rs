//! The only module that names io_uring.
//!
//! A worker's ring carries four operations: multishot accept, poll, the
//! admission's setsockopt, and cancel. Only the admission lends memory to the
//! kernel: the ring keeps its request until the completion. Bytes are moved by
//! `recv`, `send` and `splice` when a poll says so, which measured faster than
//! ring reads. What is left to hold is that a descriptor stays open until the
//! last completion of its operations; the worker's teardown does that (cancel,
//! wait, then close).

mod key;
mod requests;

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::time::Duration;

use gate_common::abi::{AdmitRequest, SO_GATE_ADMIT, SOL_GATE};
use gate_common::errno::AdmitErrno;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, cqueue, opcode, squeue};

use crate::worker::{Completion, Event, Key, Kind, Watch, ready};
use requests::Requests;

/// Entries of the submission queue; a full one is submitted on the spot.
const SUBMISSIONS: u32 = 1024;
/// Entries of the completion queue. Past it the kernel keeps completions on a
/// list of its own and ends multishots, which are armed again.
const COMPLETIONS: u32 = 16_384;
/// How often a full queue is submitted before the operation is given up.
const PUSH_TRIES: u32 = 1000;
/// How often a ring that found no memory is tried again, and how long that rests.
const SET_UP_RETRIES: u32 = 20;
const SET_UP_REST: Duration = Duration::from_millis(10);
/// How long the answer to the start-up probe of a ring may take.
const PROBE_PATIENCE: Duration = Duration::from_secs(1);

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
    /// Admissions in flight; none if this kernel's ring has no setsockopt.
    requests: Option<Requests>,
}

impl Ring {
    /// Sets a ring up and checks what the kernel knows.
    ///
    /// # Errors
    /// See [`RingError`].
    pub fn new() -> Result<Self, RingError> {
        let uring = set_up().map_err(diagnose)?;
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
        let mut ring = Self {
            uring,
            requests: None,
        };
        ring.requests = ring.has_setsockopt().then(Requests::default);
        Ok(ring)
    }

    /// Whether the ring can set socket options (SOCKET_URING_OP_SETSOCKOPT,
    /// Linux 6.7): the probe of operations does not tell the commands of one.
    fn has_setsockopt(&mut self) -> bool {
        let on: i32 = 1;
        let Ok(socket) = TcpListener::bind(("127.0.0.1", 0)) else {
            return false;
        };
        let operation = opcode::SetSockOpt::new(
            Fd(socket.as_raw_fd()),
            libc::SOL_SOCKET.cast_unsigned(),
            libc::SO_KEEPALIVE.cast_unsigned(),
            (&raw const on).cast(),
            size_of::<i32>() as u32,
        );
        // SAFETY: `on` outlives the wait below, which takes the completion.
        let pushed = unsafe {
            self.uring
                .submission()
                .push(&operation.build().user_data(key::IGNORED))
        };
        let timespec = Timespec::from(PROBE_PATIENCE);
        let args = SubmitArgs::new().timespec(&timespec);
        if pushed.is_err() || self.uring.submitter().submit_with_args(1, &args).is_err() {
            return false;
        }
        self.uring
            .completion()
            .next()
            .is_some_and(|done| done.result() == 0)
    }

    /// Accepts one connection, or connections until an error ends it.
    ///
    /// # Errors
    /// The queue is full and cannot be submitted.
    pub fn accept(&mut self, listener: BorrowedFd<'_>, watch: Watch, key: Key) -> io::Result<()> {
        let flags = libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC;
        let listener = Fd(listener.as_raw_fd());
        let operation = match watch {
            Watch::Once => opcode::Accept::new(listener, ptr::null_mut(), ptr::null_mut())
                .flags(flags)
                .build(),
            Watch::Changes => opcode::AcceptMulti::new(listener).flags(flags).build(),
        };
        self.push(&operation.user_data(key::encode(key)))
    }

    /// Reports a descriptor's readiness.
    ///
    /// # Errors
    /// The queue is full and cannot be submitted.
    pub fn poll(&mut self, socket: BorrowedFd<'_>, watch: Watch, key: Key) -> io::Result<()> {
        let (interest, multi) = match watch {
            Watch::Once => (ready::READ | ready::PEER_ENDED, false),
            Watch::Changes => (
                ready::READ | ready::WRITE | ready::PEER_ENDED | ready::URGENT,
                true,
            ),
        };
        let operation = opcode::PollAdd::new(Fd(socket.as_raw_fd()), interest).multi(multi);
        self.push(&operation.build().user_data(key::encode(key)))
    }

    /// Asks for a client's slots by setsockopt. Returns false if this kernel's
    /// ring cannot, or too many are in flight: then ask by a plain call.
    ///
    /// # Errors
    /// The queue is full and cannot be submitted.
    pub fn admit(
        &mut self,
        client: BorrowedFd<'_>,
        request: &AdmitRequest,
        key: Key,
    ) -> io::Result<bool> {
        let data = key::encode(key);
        let Some(bytes) = self
            .requests
            .as_mut()
            .and_then(|requests| requests.lend(data, request.to_bytes()))
        else {
            return Ok(false);
        };
        let operation = opcode::SetSockOpt::new(
            Fd(client.as_raw_fd()),
            SOL_GATE.cast_unsigned(),
            SO_GATE_ADMIT.cast_unsigned(),
            bytes.cast(),
            size_of::<AdmitRequest>() as u32,
        );
        let pushed = self.push(&operation.build().user_data(data));
        if pushed.is_err()
            && let Some(requests) = &mut self.requests
        {
            requests.take_back(data);
        }
        pushed.map(|()| true)
    }

    /// Ends an operation; its last completion still comes.
    ///
    /// # Errors
    /// The queue is full and cannot be submitted.
    pub fn cancel(&mut self, key: Key) -> io::Result<()> {
        let operation = opcode::AsyncCancel::new(key::encode(key));
        self.push(&operation.build().user_data(key::IGNORED))
    }

    /// Submits what is queued, waits for a completion or the timeout, and
    /// appends all completions there are.
    ///
    /// # Errors
    /// The ring itself failed; nothing is lost, but nothing more will come.
    pub fn wait<S: From<OwnedFd>>(
        &mut self,
        timeout: Duration,
        out: &mut Vec<Completion<S>>,
    ) -> io::Result<()> {
        let timespec = Timespec::from(timeout);
        let args = SubmitArgs::new().timespec(&timespec);
        let submitted = self.uring.submitter().submit_with_args(1, &args);
        match submitted {
            Ok(_) => {}
            Err(error) if passes(&error) => {}
            Err(error) => return Err(error),
        }
        for entry in self.uring.completion() {
            let Some(completion) = completion(&entry) else {
                continue;
            };
            if completion.key.kind == Kind::Admit
                && let Some(requests) = &mut self.requests
            {
                requests.take_back(entry.user_data());
            }
            out.push(completion);
        }
        Ok(())
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        for _ in 0..PUSH_TRIES {
            // SAFETY: the one operation of this module that points to memory is
            // the admission, whose bytes `requests` keeps in place until its
            // completion. A descriptor that is closed too early makes the kernel
            // answer EBADF, or watch another file, but touches no memory of ours.
            if unsafe { self.uring.submission().push(entry) }.is_ok() {
                return Ok(());
            }
            match self.uring.submit() {
                Err(error) if !passes(&error) => return Err(error),
                _ => {}
            }
        }
        Err(io::Error::from(io::ErrorKind::ResourceBusy))
    }
}

/// Tries again where memory is short for a moment only: the kernel allocates a
/// ring's pages in bulk, and answers ENOMEM where it would have to reclaim some
/// (io_uring/memmap.c, io_region_allocate_pages).
fn set_up() -> io::Result<IoUring> {
    let mut tries = 0;
    loop {
        let built = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_cqsize(COMPLETIONS)
            .build(SUBMISSIONS);
        match built {
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) && tries < SET_UP_RETRIES => {
                tries += 1;
                std::thread::sleep(SET_UP_REST);
            }
            built => return built,
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

fn completion<S: From<OwnedFd>>(entry: &cqueue::Entry) -> Option<Completion<S>> {
    let key = key::decode(entry.user_data())?;
    let result = entry.result();
    let event = match key.kind {
        Kind::Accept => match u32::try_from(result) {
            Ok(_) => {
                // SAFETY: an accept's result is a fresh descriptor, and this
                // is the only place that sees it.
                Event::Accepted(unsafe { OwnedFd::from_raw_fd(result) }.into())
            }
            Err(_) => Event::AcceptFailed(io::Error::from_raw_os_error(-result)),
        },
        Kind::Client | Kind::Backend | Kind::Waker => match u32::try_from(result) {
            Ok(bits) => Event::Ready(bits),
            Err(_) => Event::PollEnded,
        },
        Kind::Admit => Event::Admitted(match result {
            0.. => Ok(()),
            error => Err(AdmitErrno::from_code(-error)),
        }),
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
