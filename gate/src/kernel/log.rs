//! The programs' own log records.

use std::fmt;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use aya::Ebpf;
use aya_log::EbpfLogger;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// What the programs log: rare events, such as a socket that got no record.
pub struct KernelLog {
    // The logger is generic over a crate that nothing else here names.
    flush: Box<dyn FnMut() + Send>,
    /// The ring that `flush` reads, to wait on.
    ring: OwnedFd,
}

impl fmt::Debug for KernelLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelLog")
            .field("ring", &self.ring)
            .finish()
    }
}

impl KernelLog {
    /// Takes the log of a loaded object.
    pub(super) fn new(object: &mut Ebpf) -> Option<Self> {
        let mut logger = EbpfLogger::init(object).ok()?;
        let ring = logger.as_fd().try_clone_to_owned().ok()?;
        Some(Self {
            flush: Box::new(move || logger.flush()),
            ring,
        })
    }
}

/// Forwards the programs' records to the log for ever. Runs on any tokio
/// runtime with I/O enabled. Records reach `tracing` through the `log` facade,
/// so the subscriber must be installed before [`super::Plane::start`].
///
/// # Errors
/// The runtime cannot watch the descriptor.
pub async fn forward_log(mut log: KernelLog) -> io::Result<()> {
    // SAFETY: the descriptor is owned by the AsyncFd, and nobody else knows it.
    let watch = unsafe { AsyncFd::register_with_interest(log.ring, Interest::READABLE) }?;
    loop {
        let mut ready = watch.readable().await?;
        (log.flush)();
        ready.clear_ready();
    }
}
