//! What gate asks of the machine: wake-ups, locks, descriptors, CPUs.

mod fds;
mod lock;
mod waker;

pub use fds::{
    FDS_PER_SESSION, FdBudget, PIPES_MAX, POLITE_RESERVE, allowed_cpus, count_open_fds, pin_to_cpu,
    raise_fd_limit,
};
pub use lock::{InstanceLock, InstanceLockError, PinsLock, try_lock};
pub use waker::Waker;
