//! The control plane: admin HTTP, control socket, signals, reload, drain.
//!
//! One thread with its own tokio-uring runtime, kept out of the data path. It
//! shares [`State`] with the workers and writes nothing there but limits, the
//! configuration and the phase.
//!
//! | module | what it does |
//! |---|---|
//! | [`api`] | the JSON objects, read by `gatectl` too |
//! | [`connections`], [`status`] | reads who is connected and how gate is |
//! | [`limits`] | limits listed, set and unset as text |
//! | [`limited`] | watches which limits are reached, logs and times it |
//! | [`metrics`] | `/metrics` |
//! | `health` | checks the addresses of backends |
//! | [`sessions`] | lists sessions, which only workers know |
//! | [`latency`] | how long things took |
//! | `http`, `socket` | serves all that at the admin address and the control socket |
//! | `reload`, `run` | signals, reload, drain, the end |
//! | [`log`] | how log lines look |

pub mod api;
pub mod connections;
mod health;
mod http;
pub mod latency;
pub mod limited;
pub mod limits;
pub mod log;
pub mod metrics;
mod reload;
mod run;
pub mod sessions;
mod socket;
pub mod status;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Instant;

use tokio::sync::Notify;

use crate::config::ConfigSource;
use crate::kernel::KernelLog;
use crate::state::{KernelState, State};
use limited::Limited;

/// Why the control plane did not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The admin address cannot be bound.
    #[error(
        "the admin address {address} cannot be bound: {error}; choose another with --admin ADDR, or --admin off"
    )]
    Admin {
        /// The address.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// Another gate answers at the control socket.
    #[error(
        "another gate answers at {path}; stop it, or give this one another --instance or --control"
    )]
    Answered {
        /// The socket.
        path: PathBuf,
    },
    /// The control socket cannot be made.
    #[error(
        "the control socket {path} cannot be made: {error}; choose a place that this user may write with --control PATH"
    )]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The host gives the control plane no ring.
    #[error(
        "io_uring is refused: {0}; it must be allowed by kernel.io_uring_disabled and by the container's seccomp profile"
    )]
    Ring(io::Error),
    /// Threads or signal handlers could not be had.
    #[error("the control plane cannot start: {0}")]
    Start(io::Error),
    /// The thread panicked; its message is in the log.
    #[error("the control plane failed")]
    Panicked,
}

impl ControlError {
    /// Whether the host refuses something that gate needs (exit code 3).
    #[must_use]
    pub const fn is_host(&self) -> bool {
        matches!(self, Self::Ring(_))
    }
}

/// Why gate ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Drained: no session is left.
    Drained,
    /// The drain deadline came with so many sessions left.
    DrainDeadline(u64),
    /// SIGINT, or a second SIGTERM.
    Interrupted,
    /// [`Handle::stop`].
    Stopped,
}

/// The running control plane.
#[derive(Debug)]
pub struct Control {
    thread: JoinHandle<End>,
    shared: Arc<Shared>,
    admin: Option<SocketAddr>,
}

/// What all of the control plane shares.
pub(crate) struct Shared {
    pub state: Arc<State>,
    pub source: ConfigSource,
    pub limited: Arc<Limited>,
    pub started: Instant,
    /// Held while the configuration is read and put in force.
    pub reloading: tokio::sync::Mutex<()>,
    pub drain: Notify,
    pub stop: Notify,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Shared")
    }
}

/// Ends the control plane from any thread.
#[derive(Clone, Debug)]
pub struct Handle {
    shared: Arc<Shared>,
}

impl Handle {
    /// [`Control::wait`] returns [`End::Stopped`].
    pub fn stop(&self) {
        self.shared.stop.notify_one();
    }
}

/// Binds the admin address and the control socket, takes over the signals and
/// starts the thread.
///
/// # Errors
/// See [`ControlError`]; nothing is left behind then.
pub fn start(
    state: Arc<State>,
    source: ConfigSource,
    kernel_log: Option<KernelLog>,
) -> Result<Control, ControlError> {
    let config = state.config();
    let admin = config.admin.map(bind_admin).transpose()?;
    let admin_address = admin
        .as_ref()
        .and_then(|listener| listener.local_addr().ok());
    let socket = socket::ControlSocket::bind(&config.control)?;
    let shared = Arc::new(Shared {
        state,
        source,
        limited: Arc::default(),
        started: Instant::now(),
        reloading: tokio::sync::Mutex::default(),
        drain: Notify::new(),
        stop: Notify::new(),
    });
    let (started, starting) = mpsc::channel();
    let of_thread = Arc::clone(&shared);
    let thread = std::thread::Builder::new()
        .name("control".to_owned())
        .spawn(move || run::thread(of_thread, admin, socket, kernel_log, &started))
        .map_err(ControlError::Start)?;
    match starting.recv() {
        Ok(Ok(())) => Ok(Control {
            thread,
            shared,
            admin: admin_address,
        }),
        Ok(Err(error)) => Err(error),
        Err(mpsc::RecvError) => Err(ControlError::Panicked),
    }
}

impl Control {
    /// Tells the log and systemd that clients can come.
    pub fn ready(&self) {
        let state = &self.shared.state;
        let listeners: Vec<String> = state
            .listeners
            .iter()
            .map(|listener| listener.address.to_string())
            .collect();
        let kernel = match &state.kernel {
            KernelState::Active => "active".to_owned(),
            KernelState::Inactive(reason) => format!("inactive: {reason}"),
            KernelState::Off => "off".to_owned(),
        };
        let admin = self
            .admin
            .map_or("off".to_owned(), |address| address.to_string());
        let config = state.config();
        tracing::info!(
            instance = config.instance,
            listeners = listeners.join(", "),
            kernel,
            admin,
            control = %config.control.display(),
            workers = state.stats.len(),
            "ready"
        );
        notify_systemd(sd_notify::NotifyState::Ready);
    }

    /// Where the admin HTTP listens: the real port if the configuration says 0.
    #[must_use]
    pub const fn admin(&self) -> Option<SocketAddr> {
        self.admin
    }

    /// A handle that ends it.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle {
            shared: Arc::clone(&self.shared),
        }
    }

    /// Waits for the end: after a drain, or at once. The admin address and the
    /// control socket are closed when this returns; the workers still run.
    ///
    /// # Errors
    /// [`ControlError::Panicked`].
    pub fn wait(self) -> Result<End, ControlError> {
        self.thread.join().map_err(|_| ControlError::Panicked)
    }
}

fn bind_admin(address: SocketAddr) -> Result<TcpListener, ControlError> {
    let bound = TcpListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    bound.map_err(|error| ControlError::Admin { address, error })
}

/// Without systemd there is nobody to tell.
pub(crate) fn notify_systemd(state: sd_notify::NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::debug!(%error, "systemd was not told");
    }
}

#[cfg(test)]
mod tests;
