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
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

use crate::config::{Config, ConfigSource};
use crate::kernel::KernelLog;
use crate::state::{KernelState, State};
use limited::Limited;
use socket::ControlSocket;

/// For the control plane's thread to close its sockets.
const LEAVE_PATIENCE: Duration = Duration::from_secs(5);

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
    pub fn is_host(&self) -> bool {
        match self {
            Self::Ring(_) => true,
            Self::Admin { error, .. } | Self::Socket { error, .. } => {
                error.kind() == io::ErrorKind::PermissionDenied
            }
            Self::Answered { .. } | Self::Start(_) | Self::Panicked => false,
        }
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
    /// Whether requests are served: inherited sockets wait for their heir to
    /// be ready.
    pub open: watch::Sender<bool>,
    pub leave: Notify,
    pub leaving: Mutex<Option<Leave>>,
}

/// How the control plane leaves its sockets to another gate.
pub(crate) struct Leave {
    /// Whether the other one listens at the same path.
    pub keeps_control: bool,
    pub done: mpsc::Sender<()>,
}

/// The sockets of the control plane.
#[derive(Debug)]
pub struct Sockets {
    admin: Option<TcpListener>,
    control: ControlSocket,
    inherited: bool,
}

impl Sockets {
    /// Binds the admin address and the control socket, those that were not
    /// inherited from another gate.
    ///
    /// # Errors
    /// See [`ControlError`]; nothing is left behind then.
    pub fn bind(
        config: &Config,
        admin: Option<TcpListener>,
        control: Option<UnixListener>,
    ) -> Result<Self, ControlError> {
        let inherited = admin.is_some() || control.is_some();
        let admin = match (admin, config.admin) {
            (Some(inherited), Some(_)) => Some(inherited),
            (_, None) => None,
            (None, Some(address)) => Some(bind_admin(address)?),
        };
        let control = match control {
            Some(inherited) => ControlSocket::inherit(&config.control, inherited)?,
            None => ControlSocket::bind(&config.control)?,
        };
        Ok(Self {
            admin,
            control,
            inherited,
        })
    }

    /// Another descriptor of the admin address's socket.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn clone_admin(&self) -> io::Result<Option<OwnedFd>> {
        let admin = self.admin.as_ref().map(TcpListener::try_clone);
        Ok(admin.transpose()?.map(OwnedFd::from))
    }

    /// Another descriptor of the control socket.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn clone_control(&self) -> io::Result<OwnedFd> {
        self.control.listener.try_clone().map(OwnedFd::from)
    }
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

    /// Closes the admin address and the control socket and goes on with the
    /// rest. Returns when both are closed.
    pub fn leave(&self, keeps_control: bool) {
        let (done, left) = mpsc::channel();
        let leave = Leave {
            keeps_control,
            done,
        };
        *self
            .shared
            .leaving
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(leave);
        self.shared.leave.notify_one();
        // A control plane that has ended has no socket open.
        let _ = left.recv_timeout(LEAVE_PATIENCE);
    }
}

/// Binds the admin address and the control socket, then as [`start_on`].
///
/// # Errors
/// See [`ControlError`]; nothing is left behind then.
pub fn start(
    state: Arc<State>,
    source: ConfigSource,
    kernel_log: Option<KernelLog>,
) -> Result<Control, ControlError> {
    let sockets = Sockets::bind(&state.config(), None, None)?;
    start_on(sockets, state, source, kernel_log)
}

/// Takes over the signals and starts the thread, which serves at these sockets.
///
/// # Errors
/// See [`ControlError`]; nothing is left behind then.
pub fn start_on(
    sockets: Sockets,
    state: Arc<State>,
    source: ConfigSource,
    kernel_log: Option<KernelLog>,
) -> Result<Control, ControlError> {
    let admin_address = sockets
        .admin
        .as_ref()
        .and_then(|listener| listener.local_addr().ok());
    let shared = Arc::new(Shared {
        state,
        source,
        limited: Arc::default(),
        started: Instant::now(),
        reloading: tokio::sync::Mutex::default(),
        drain: Notify::new(),
        stop: Notify::new(),
        open: watch::Sender::new(!sockets.inherited),
        leave: Notify::new(),
        leaving: Mutex::default(),
    });
    let (started, starting) = mpsc::channel();
    let of_thread = Arc::clone(&shared);
    let thread = std::thread::Builder::new()
        .name("control".to_owned())
        .spawn(move || run::thread(of_thread, sockets, kernel_log, &started))
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
    /// Tells the log and systemd that clients can come, and serves requests.
    pub fn ready(&self) {
        self.shared.open.send_replace(true);
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
