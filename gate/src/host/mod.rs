//! What gate asks of the machine: wake-ups, locks, descriptors, CPUs, queues.

mod accept_queue;
mod fds;
mod lock;
mod nic;
mod waker;

pub use accept_queue::{AcceptQueue, accept_queue};
pub use fds::{
    FDS_PER_SESSION, FdBudget, POLITE_RESERVE, allowed_cpus, count_open_fds, pin_to_cpu,
    prefer_incoming_cpu, raise_fd_limit,
};
pub use lock::{InstanceLock, InstanceLockError, PinsLock, try_lock};
pub use nic::{NicError, Queue, read_queues};
pub use waker::Waker;
