//! One gate from its start to its end: host, kernel plane, ledger, listeners,
//! workers, control plane, in this order.

use std::io;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use gate_common::abi::slot;
use socket2::{Domain, Protocol, Socket, Type};

use crate::config::{Config, ConfigSource, KernelMode, Pin};
use crate::control::{self, ControlError, log};
use crate::host::{
    self, FDS_PER_SESSION, FdBudget, InstanceLock, InstanceLockError, PinsLock, Waker,
};
use crate::kernel::{KernelError, Plane, PlaneOptions};
use crate::ledger::{Ledger, NamesError};
use crate::ring::{Ring, RingError};
use crate::state::{KernelState, ListenerInfo, Phase, State};
use crate::stats::Stats;
use crate::worker::{Listening, Worker};

/// Connections the kernel completes before they are accepted; cut by
/// net.core.somaxconn.
const BACKLOG: i32 = 4096;
/// How long an address may stay busy after an earlier gate: the kernel tears a
/// killed process's rings down a little later than the process.
const BIND_PATIENCE: Duration = Duration::from_secs(2);
/// Descriptors that a worker opens once it runs: its ring, its spare.
const FDS_PER_WORKER: u64 = 4;

/// Why gate did not start, or ended badly.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The host refuses what gate needs: exit code 3.
    #[error("{0}")]
    Host(String),
    /// Anything else: exit code 1.
    #[error("{0:#}")]
    Failed(#[from] anyhow::Error),
}

impl From<RingError> for RunError {
    fn from(error: RingError) -> Self {
        Self::Host(error.to_string())
    }
}

impl From<KernelError> for RunError {
    fn from(error: KernelError) -> Self {
        Self::Host(error.to_string())
    }
}

impl From<InstanceLockError> for RunError {
    fn from(error: InstanceLockError) -> Self {
        Self::Failed(error.into())
    }
}

impl From<NamesError> for RunError {
    fn from(error: NamesError) -> Self {
        Self::Failed(error.into())
    }
}

impl From<ControlError> for RunError {
    fn from(error: ControlError) -> Self {
        if error.is_host() {
            Self::Host(error.to_string())
        } else {
            Self::Failed(error.into())
        }
    }
}

/// Runs a gate until it has drained or is told to end.
///
/// # Errors
/// See [`RunError`]. Sockets, lock and control socket are gone then; pinned
/// maps and links stay, as after every end.
pub fn run(config: Config, source: ConfigSource) -> Result<(), RunError> {
    log::init(config.log_format);
    let config = Arc::new(config);
    let fd_limit = host::raise_fd_limit().context("the limit on descriptors cannot be raised")?;
    drop(Ring::new()?);
    let directory = config.control.parent().unwrap_or(Path::new("/"));
    let _lock = InstanceLock::take(directory, &config.instance)?;
    for listener in &config.listeners {
        probe_bind(listener.address)?;
    }

    let (mut plane, kernel) = start_plane(&config)?;
    let ledger = Arc::new(match &plane {
        Some(plane) => Ledger::kernel(plane.maps()),
        None => Ledger::local(),
    });
    let _pins_lock = match &plane {
        Some(plane) => Some(PinsLock::take(plane.maps().directory())?),
        None => None,
    };
    ledger.apply_config(&config)?;
    let listeners = bind_all(&config, plane.as_ref(), &ledger)?;
    let kernel_log = plane.as_mut().and_then(Plane::take_logger);

    let state = Arc::new(make_state(&config, ledger, &listeners, kernel, fd_limit)?);
    let control = control::start(Arc::clone(&state), source, kernel_log)?;
    let (failed, failures) = mpsc::channel();
    let mut threads = Vec::new();
    for (id, sockets) in listeners.into_per_worker().into_iter().enumerate() {
        threads.push(spawn_worker(id, &state, sockets, failed.clone())?);
    }
    drop(failed);

    state.advance(Phase::Serving);
    control.ready();
    let handle = control.handle();
    let watch = std::thread::spawn(move || {
        // Ends without a message when every worker has ended in order.
        let failure = failures.recv().ok();
        handle.stop();
        failure
    });
    let end = control.wait();
    state.advance(Phase::Stopping);
    for thread in threads {
        let _ = thread.join();
    }
    match (watch.join(), end) {
        (Ok(Some(failure)), _) => Err(RunError::Failed(failure)),
        (_, Err(error)) => Err(error.into()),
        _ => Ok(()),
    }
}

/// The listening sockets, by listener and by worker.
struct Listeners {
    infos: Vec<ListenerInfo>,
    /// One row for each listener, one socket for each worker.
    sockets: Vec<Vec<Socket>>,
}

impl Listeners {
    fn into_per_worker(self) -> Vec<Vec<Listening>> {
        let workers = self.sockets.first().map_or(0, Vec::len);
        let mut per_worker: Vec<Vec<Listening>> = (0..workers).map(|_| Vec::new()).collect();
        for (place, (info, row)) in self.infos.iter().zip(self.sockets).enumerate() {
            for (listening, socket) in per_worker.iter_mut().zip(row) {
                listening.push(Listening::new(socket, place, info.index));
            }
        }
        per_worker
    }
}

fn start_plane(config: &Config) -> Result<(Option<Plane>, KernelState), RunError> {
    if config.kernel == KernelMode::Off {
        return Ok((None, KernelState::Off));
    }
    let options = PlaneOptions {
        instance: config.instance.clone(),
        cgroup: None,
    };
    match Plane::start(&options) {
        Ok(plane) => Ok((Some(plane), KernelState::Active)),
        // Pinned maps that cannot be read may hold limits that somebody set: to
        // go on without them would be to ignore those silently.
        Err(error) if config.kernel == KernelMode::Required || !error.is_unavailable() => {
            Err(error.into())
        }
        Err(error) => {
            tracing::warn!("kernel plane inactive: {error}");
            Ok((None, KernelState::Inactive(error.to_string())))
        }
    }
}

fn make_state(
    config: &Arc<Config>,
    ledger: Arc<Ledger>,
    listeners: &Listeners,
    kernel: KernelState,
    fd_limit: u64,
) -> Result<State, RunError> {
    let workers = config.workers.count;
    let wakers: io::Result<Vec<Waker>> = (0..workers).map(|_| Waker::new()).collect();
    let wakers = wakers.context("no descriptor for a wake-up is left")?;
    let open = host::count_open_fds().context("/proc/self/fd cannot be read")?;
    let open = open + workers as u64 * FDS_PER_WORKER;
    let Some(budget) = FdBudget::new(fd_limit, open) else {
        return Err(RunError::Host(format!(
            "RLIMIT_NOFILE is {fd_limit}, and gate itself needs {open} descriptors and a reserve: \
             not one session fits; raise it (ulimit -n, or LimitNOFILE= in the unit)"
        )));
    };
    ledger.set_fd_cap(budget.sessions);
    let sessions_max = budget.sessions / FDS_PER_SESSION;
    if ledger.plain_limit(slot::TOTAL).tokens() > sessions_max {
        tracing::warn!(
            descriptors = fd_limit,
            sessions_max,
            "max_connections is more than the descriptors allow: clients beyond sessions_max are \
             refused with 53300; raise RLIMIT_NOFILE (LimitNOFILE=)"
        );
    }
    let stats = (0..workers)
        .map(|_| Arc::new(Stats::new(config.listeners.len(), config.backends.len())))
        .collect();
    let mut state = State::new(
        Arc::clone(config),
        ledger,
        listeners.infos.clone(),
        stats,
        kernel,
        wakers,
    );
    state.session_fds_max = budget.sessions;
    state.fds_max = budget.limit;
    Ok(state)
}

/// Binds alone, without SO_REUSEPORT: another program of the same user could
/// otherwise share the address without an error.
fn probe_bind(address: SocketAddr) -> Result<(), RunError> {
    let started = Instant::now();
    loop {
        let bound = new_socket(address).and_then(|socket| socket.bind(&address.into()));
        match bound {
            Ok(()) => return Ok(()),
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse
                    && started.elapsed() < BIND_PATIENCE =>
            {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => {
                return Err(anyhow::anyhow!(
                    "{address} cannot be listened on: {error}; stop the program that has it \
                     (ss -ltnp), or choose another address with --listen"
                )
                .into());
            }
        }
    }
}

fn bind_all(
    config: &Config,
    plane: Option<&Plane>,
    ledger: &Ledger,
) -> Result<Listeners, RunError> {
    let mut listeners = Listeners {
        infos: Vec::new(),
        sockets: Vec::new(),
    };
    for listener in &config.listeners {
        let index = ledger.listener_index(&listener.address.to_string())?;
        let mut address = listener.address;
        let mut row = Vec::new();
        for _ in 0..config.workers.count {
            let socket = listen(address, plane, index)?;
            // Port 0: the first socket's port is everybody's.
            let bound = socket.local_addr().context("a socket without an address")?;
            address = bound.as_socket().unwrap_or(address);
            row.push(socket);
        }
        if let (Some(plane), Some(first)) = (plane, row.first()) {
            plane.steer(std::os::fd::AsFd::as_fd(first), index)?;
        }
        listeners.infos.push(ListenerInfo { address, index });
        listeners.sockets.push(row);
    }
    Ok(listeners)
}

/// A socket of a listener's group, tagged before the first connection.
fn listen(address: SocketAddr, plane: Option<&Plane>, index: u32) -> Result<Socket, RunError> {
    let failed = || format!("{address} cannot be listened on");
    let socket = new_socket(address).with_context(failed)?;
    socket.set_reuse_port(true).with_context(failed)?;
    // Accepted sockets inherit it.
    socket.set_tcp_nodelay(true).with_context(failed)?;
    socket.bind(&address.into()).with_context(failed)?;
    if let Some(plane) = plane {
        plane.tag_listener(std::os::fd::AsFd::as_fd(&socket), index)?;
    }
    socket.listen(BACKLOG).with_context(failed)?;
    Ok(socket)
}

fn new_socket(address: SocketAddr) -> io::Result<Socket> {
    let kind = Type::STREAM.nonblocking().cloexec();
    let socket = Socket::new(Domain::for_address(address), kind, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    Ok(socket)
}

fn spawn_worker(
    id: usize,
    state: &Arc<State>,
    sockets: Vec<Listening>,
    failed: mpsc::Sender<anyhow::Error>,
) -> Result<JoinHandle<()>, RunError> {
    let state = Arc::clone(state);
    let cpu = match &state.config().workers.pin {
        Pin::None => None,
        Pin::Cpus => host::allowed_cpus().ok().and_then(|cpus| {
            let count = cpus.len();
            cpus.into_iter().cycle().nth(id).filter(|_| count > 0)
        }),
        Pin::List(cpus) => cpus.get(id).copied(),
    };
    let thread = std::thread::Builder::new().name(format!("worker-{id}"));
    let body = move || {
        if let Some(cpu) = cpu {
            match host::pin_to_cpu(cpu) {
                Ok(()) => state.stats[id].pinned(cpu),
                Err(error) => tracing::warn!(%error, worker = id, cpu, "not pinned"),
            }
        }
        // A gate with a worker less would look well and lose a part of its
        // clients: whatever ends one ends gate.
        let ended = std::panic::catch_unwind(AssertUnwindSafe(|| {
            Worker::new(id, state, sockets)
                .and_then(|worker| worker.run().context("the worker's ring failed"))
        }));
        let ended = ended.unwrap_or_else(|_| Err(anyhow::anyhow!("panicked, see above")));
        if let Err(error) = ended {
            tracing::error!("worker {id}: {error:#}");
            // Nobody listens any more when gate ends anyway.
            let _ = failed.send(error.context(format!("worker {id} ended")));
        }
    };
    Ok(thread.spawn(body).context("a worker cannot be started")?)
}
