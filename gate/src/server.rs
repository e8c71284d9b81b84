//! One gate from its start to its end: host, kernel plane, ledger, listeners,
//! workers, control plane, in this order.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use gate_common::abi::slot;
use gate_common::limit::Limit;
use socket2::{Domain, Protocol, Socket, Type};

use crate::budget;
use crate::config::{Config, ConfigError, ConfigSource, KernelMode, Pin, TcpOptions};
use crate::control::{self, ControlError, log};
use crate::host::{self, FdBudget, InstanceLock, InstanceLockError, PinsLock, Waker};
use crate::kernel::{Choice, Group, KernelError, Plane, PlaneOptions, WorkerLoads};
use crate::ledger::{Ledger, NamesError};
use crate::placement::{self, Place, PlacementError};
use crate::ring::{Ring, RingError};
use crate::state::{KernelState, ListenerInfo, Phase, State};
use crate::stats::Stats;
use crate::worker::{Linux, Listening, Worker};

/// Connections the kernel completes before they are accepted; cut by
/// net.core.somaxconn.
const BACKLOG: i32 = 4096;
/// How long an address may stay busy after an earlier gate: the kernel tears a
/// killed process's rings down a little later than the process.
const BIND_PATIENCE: Duration = Duration::from_secs(2);
/// Descriptors of a worker beside its listeners: its waker, its ring, its spare,
/// and two to spare.
const FDS_PER_WORKER: u64 = 5;

/// Why gate did not start, or ended badly.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The host refuses what gate needs: exit code 3.
    #[error("{0}")]
    Host(String),
    /// This host cannot run the configuration: exit code 2.
    #[error("{0}")]
    Config(#[from] ConfigError),
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

impl From<PlacementError> for RunError {
    fn from(error: PlacementError) -> Self {
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
    let fd_limit = host::raise_fd_limit().context("the limit on descriptors cannot be raised")?;
    drop(Ring::new()?);
    host::check_congestion_controls(&config).map_err(RunError::Host)?;
    let places = placement::places(&config.workers)?;
    placement::log(&config.workers.pin, &places);
    let directory = config.control.parent().unwrap_or(Path::new("/"));
    let _lock = InstanceLock::take(directory, &config.instance)?;
    for listener in &config.listeners {
        probe_bind(listener.address)?;
    }

    let (mut plane, kernel) = start_plane(&config)?;
    // Before anything of the configuration is in force.
    let fds = fd_budget(&config, places.len(), fd_limit)?;
    let config = Arc::new(fit(&config, &fds)?);
    let ledger = Arc::new(match &plane {
        Some(plane) => Ledger::kernel(plane.maps()),
        None => Ledger::local(),
    });
    let _pins_lock = match &plane {
        Some(plane) => Some(PinsLock::take(plane.maps().directory())?),
        None => None,
    };
    ledger.set_fd_cap(fds.sessions);
    ledger.apply_config(&config)?;
    warn_of_runtime_limit(&ledger, &fds);
    let listeners = bind_all(&config, &places, plane.as_ref(), &ledger)?;
    let loads = match &plane {
        Some(plane) => steer(&config, plane, &listeners)?,
        None => None,
    };
    let kernel_log = plane.as_mut().and_then(Plane::take_logger);

    let state = make_state(&config, places, ledger, &listeners, kernel, fds)?;
    for (worker, stats) in state.stats.iter().enumerate() {
        if let Some(loads) = &loads {
            stats.publish(Arc::clone(loads), worker);
        }
    }
    let state = Arc::new(state);
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
        (Ok(Some(failure)), _) => Err(failure),
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
    /// Second descriptors of all sockets.
    fn again(&self) -> io::Result<Vec<Vec<OwnedFd>>> {
        let again = |socket: &Socket| socket.as_fd().try_clone_to_owned();
        self.sockets
            .iter()
            .map(|row| row.iter().map(again).collect())
            .collect()
    }

    fn into_per_worker(self) -> Vec<Vec<Listening<Socket>>> {
        let workers = self.sockets.first().map_or(0, Vec::len);
        let mut per_worker: Vec<Vec<Listening<Socket>>> =
            (0..workers).map(|_| Vec::new()).collect();
        for (info, row) in self.infos.iter().zip(self.sockets) {
            for (listening, socket) in per_worker.iter_mut().zip(row) {
                listening.push(Listening::new(socket, info.index));
            }
        }
        per_worker
    }
}

/// Tells the kernel who chooses the worker of a new connection.
fn steer(
    config: &Config,
    plane: &Plane,
    listeners: &Listeners,
) -> Result<Option<Arc<WorkerLoads>>, KernelError> {
    // Only the CPU that a packet comes in at knows the worker of its queue.
    let choice = match &config.workers.pin {
        Pin::Nic(_) => Choice::Kernel,
        Pin::None | Pin::Cpus | Pin::List(_) => Choice::LessLoaded,
    };
    let rows = listeners.infos.iter().zip(&listeners.sockets);
    let groups: Vec<Group<'_>> = rows
        .map(|(info, row)| Group {
            listener: info.index,
            sockets: row.iter().map(Socket::as_fd).collect(),
        })
        .collect();
    plane.steer(&groups, choice)
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
    places: Vec<Place>,
    ledger: Arc<Ledger>,
    listeners: &Listeners,
    kernel: KernelState,
    fds: FdBudget,
) -> Result<State, RunError> {
    let workers = places.len();
    let sockets = listeners
        .again()
        .context("no descriptor for a listener is left")?;
    let wakers: io::Result<Vec<Waker>> = (0..workers).map(|_| Waker::new()).collect();
    let wakers = wakers.context("no descriptor for a wake-up is left")?;
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
    state.sockets = sockets;
    state.places = places;
    state.session_fds_max = fds.sessions;
    state.pipes_max = fds.pipes;
    state.fds_max = fds.limit;
    Ok(state)
}

/// What sessions may hold beside all that gate opens until it serves.
fn fd_budget(config: &Config, workers: usize, fd_limit: u64) -> Result<FdBudget, RunError> {
    let open = host::count_open_fds().context("/proc/self/fd cannot be read")?;
    let per_worker = FDS_PER_WORKER + config.listeners.len() as u64 * FDS_PER_LISTENER;
    let open = open + workers as u64 * per_worker;
    FdBudget::new(fd_limit, open).ok_or_else(|| {
        RunError::Host(format!(
            "RLIMIT_NOFILE is {fd_limit}, and gate itself needs {open} descriptors and a reserve: \
             not one session fits; raise it (ulimit -n, or LimitNOFILE= in the unit)"
        ))
    })
}

/// The configuration with limits that this host can keep.
fn fit(config: &Config, fds: &FdBudget) -> Result<Config, ConfigError> {
    let fitted = budget::fit(config, fds)?;
    if fitted.limits.max_connections != config.limits.max_connections {
        tracing::warn!(
            descriptors = fds.limit,
            max_connections = fds.sessions_max(),
            "max_connections is lowered from its default to what the descriptors allow; raise \
             RLIMIT_NOFILE (LimitNOFILE=), or set it"
        );
    }
    Ok(fitted)
}

/// `gatectl` set it for a gate that had more descriptors.
fn warn_of_runtime_limit(ledger: &Ledger, fds: &FdBudget) {
    if let Limit::AtMost(max_connections) = ledger.plain_limit(slot::TOTAL)
        && max_connections > fds.sessions_max()
    {
        tracing::warn!(
            max_connections,
            sessions_max = fds.sessions_max(),
            "max_connections, set at runtime, is more than the descriptors allow: clients beyond \
             sessions_max are refused with 53300; unset it, or raise RLIMIT_NOFILE (LimitNOFILE=)"
        );
    }
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
    places: &[Place],
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
        for place in places {
            let socket = listen(address, &listener.tcp, plane, index)?;
            if let (Pin::Nic(_), Some(cpu)) = (&config.workers.pin, place.cpu) {
                host::prefer_incoming_cpu(socket.as_fd(), cpu)
                    .context("SO_INCOMING_CPU is refused")?;
            }
            // Port 0: the first socket's port is everybody's.
            let bound = socket.local_addr().context("a socket without an address")?;
            address = bound.as_socket().unwrap_or(address);
            row.push(socket);
        }
        listeners.infos.push(ListenerInfo { address, index });
        listeners.sockets.push(row);
    }
    Ok(listeners)
}

/// A socket of a listener's group, tagged before the first connection.
fn listen(
    address: SocketAddr,
    tcp: &TcpOptions,
    plane: Option<&Plane>,
    index: u32,
) -> Result<Socket, RunError> {
    let failed = || format!("{address} cannot be listened on");
    let socket = new_socket(address).with_context(failed)?;
    socket.set_reuse_port(true).with_context(failed)?;
    host::set_client_options(&socket, tcp).with_context(failed)?;
    socket.bind(&address.into()).with_context(failed)?;
    if let Some(plane) = plane {
        plane.tag_listener(socket.as_fd(), index)?;
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
    sockets: Vec<Listening<Socket>>,
    failed: mpsc::Sender<RunError>,
) -> Result<JoinHandle<()>, RunError> {
    let state = Arc::clone(state);
    let cpu = state.places.get(id).and_then(|place| place.cpu);
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
            let machine = Linux::new(Arc::clone(&state), id)?;
            Worker::new(id, state, sockets, machine)
                .run()
                .context("the worker's ring failed")
        }));
        let ended = ended.unwrap_or_else(|_| Err(anyhow::anyhow!("panicked, see above")));
        if let Err(error) = ended {
            tracing::error!("worker {id}: {error:#}");
            // Nobody listens any more when gate ends anyway.
            let _ = failed.send(worker_ended(id, error));
        }
    };
    Ok(thread.spawn(body).context("a worker cannot be started")?)
}

/// The first ring of gate was a trial: a host may refuse the others, and is to be
/// named for it as it is at the start.
fn worker_ended(id: usize, error: anyhow::Error) -> RunError {
    let refused = error.downcast_ref::<RingError>().is_some();
    let error = error.context(format!("worker {id} ended"));
    if refused {
        RunError::Host(format!("{error:#}"))
    } else {
        RunError::Failed(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_without_a_ring_is_the_hosts_fault_and_another_failure_is_not() {
        let refused = worker_ended(3, anyhow::Error::from(RingError::Memory).context("no ring"));
        assert!(matches!(&refused, RunError::Host(_)), "{refused}");
        let text = refused.to_string();
        assert!(
            text.contains("worker 3") && text.contains("RLIMIT_MEMLOCK"),
            "{text}"
        );
        let failed = worker_ended(0, anyhow::anyhow!("panicked"));
        assert!(matches!(failed, RunError::Failed(_)));
    }
}
