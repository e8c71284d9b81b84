//! What gate asks of the machine: wake-ups, locks, descriptors, CPUs, messages
//! to another gate.

mod fds;
mod lock;
pub mod mail;
mod socket_file;
mod waker;

pub use fds::{
    FDS_PER_SESSION, FdBudget, POLITE_RESERVE, allowed_cpus, count_open_fds, pin_to_cpu,
    raise_fd_limit,
};
pub use lock::{InstanceLock, InstanceLockError, PinsLock, try_lock};
pub use socket_file::SocketFile;
pub use waker::Waker;
