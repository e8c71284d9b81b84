//! What gate asks of the machine: sockets, pipes, wake-ups, locks, descriptors, CPUs.

mod dial;
mod fds;
mod lock;
mod pipe;
mod waker;

pub use dial::{check_congestion_controls, connect, connect_failure, set_client_options};
pub use fds::{
    FDS_PER_SESSION, FdBudget, PIPES_MAX, POLITE_RESERVE, allowed_cpus, count_open_fds, pin_to_cpu,
    raise_fd_limit,
};
pub use lock::{InstanceLock, InstanceLockError, PinsLock, try_lock};
pub use pipe::Pipe;
pub use waker::Waker;
