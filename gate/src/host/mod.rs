//! What gate asks of the machine: sockets, pipes, wake-ups, locks, descriptors, CPUs,
//! queues, messages to another gate.

mod accept_queue;
mod dial;
mod fds;
mod lock;
pub mod mail;
mod nic;
mod pipe;
mod socket_file;
mod waker;

pub use accept_queue::{AcceptQueue, accept_queue};
pub use dial::{check_congestion_controls, connect, connect_failure, set_client_options, widen};
pub use fds::{
    FDS_PER_SESSION, FdBudget, PIPES_MAX, POLITE_RESERVE, allowed_cpus, count_open_fds, pin_to_cpu,
    prefer_incoming_cpu, raise_fd_limit,
};
pub use lock::{InstanceLock, InstanceLockError, PinsLock, try_lock};
pub use nic::{NicError, Queue, read_queues};
pub use pipe::{Pipe, ignores_sigpipe};
pub use socket_file::SocketFile;
pub use waker::Waker;
