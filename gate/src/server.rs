//! One gate from its start to its end: host, a predecessor if there is one,
//! kernel plane, ledger, listeners, control plane, workers, in this order.

mod error;

pub use error::RunError;

use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::mpsc;
use std::sync::{Arc, RwLock};
use std::thread::JoinHandle;

use anyhow::Context;
use socket2::Socket;

use crate::budget;
use crate::config::value::LimitValue;
use crate::config::{Config, ConfigError, ConfigSource, KernelMode, Listener};
use crate::control::{self, limits, log};
use crate::host::{self, FdBudget, Waker};
use crate::kernel::{Plane, PlaneOptions};
use crate::ledger::Ledger;
use crate::listeners::{self, Listeners};
use crate::placement::{self, Place};
use crate::ring::{Ring, RingError};
use crate::state::{KernelState, Phase, State};
use crate::stats::Stats;
use crate::succession::{Running, Testament, control_sockets, lock_pins, succeed};
use crate::takeover::{Predecessor, TakeoverError};
use crate::worker::{Linux, Listening, Worker};

/// Descriptors of a listening socket: the worker's, one to look at its queue, and
/// one to be handed over.
const FDS_PER_LISTENER: u64 = 3;
/// Descriptors of a worker beside its listeners: its waker, its ring, its spare,
/// and two to spare.
const FDS_PER_WORKER: u64 = 5;

/// How a gate begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Alone: another gate of the same instance is an error.
    Fresh,
    /// In the place of the running gate, if there is one.
    TakeOver,
}

/// Runs a gate until it has drained, is told to end, or has handed over and
/// lost its last session.
///
/// # Errors
/// See [`RunError`]. Sockets, lock and control socket are gone then; pinned
/// maps and links stay, as after every end.
pub fn run(config: Config, source: ConfigSource, start: Start) -> Result<(), RunError> {
    log::init(config.log_format);
    let fd_limit = host::raise_fd_limit().context("the limit on descriptors cannot be raised")?;
    drop(Ring::new()?);
    if !host::ignores_sigpipe() {
        return Err(RunError::Host(
            "SIGPIPE is not ignored: one client that breaks off would end gate; start it without \
             a wrapper that changes signals"
                .to_owned(),
        ));
    }
    host::check_congestion_controls(&config).map_err(RunError::Host)?;
    let places = placement::places(&config.workers)?;
    placement::log(&config.workers.pin, &places);
    let (lock, mut predecessor) = succeed(&config, start)?;
    Listeners::probe(&config, predecessor.as_ref())?;

    let (mut plane, kernel) = start_plane(&config, predecessor.as_ref())?;
    // Before anything of the configuration is in force.
    let fds = fd_budget(&config, places.len(), fd_limit, predecessor.as_ref())?;
    let config = Arc::new(fit(&config, &fds)?);
    let ledger = Arc::new(match &plane {
        Some(plane) => Ledger::kernel(plane.maps()),
        None => Ledger::local(),
    });
    let pins_lock = match &plane {
        Some(plane) => Some(lock_pins(plane, predecessor.as_mut())?),
        None => None,
    };
    ledger.set_fd_cap(fds.sessions);
    ledger.apply_config(&config)?;
    // Runtime limits may be of a gate that had more descriptors.
    limits::warn_of_excess(&ledger);
    let listeners = Listeners::open(
        &config,
        &places,
        plane.as_ref(),
        &ledger,
        predecessor.as_mut(),
    )?;
    let workers = places.len();
    let kernel_log = plane.as_mut().and_then(Plane::take_logger);
    let (sockets, keeps_control) = control_sockets(&config, predecessor.as_mut())?;
    let mut testament = Testament::new(&config, &listeners, &sockets, predecessor.as_mut())?;
    testament.estate.kernel = plane.is_some();

    let state = make_state(&config, places, ledger, &listeners, kernel, fds)?;
    let state = Arc::new(state);
    let control = control::start_on(sockets, Arc::clone(&state), source, kernel_log)?;
    let (failed, failures) = mpsc::channel();
    let (started, starts) = mpsc::channel();
    let mut threads = Vec::new();
    let per_worker = listeners.into_per_worker(workers);
    for (id, sockets) in per_worker.into_iter().enumerate() {
        let channels = (started.clone(), failed.clone());
        threads.push(spawn_worker(id, &state, sockets, channels)?);
    }
    drop((started, failed));
    // Nobody gives anything up for a gate whose workers cannot work.
    let all_started = threads.iter().all(|_| starts.recv().is_ok());

    state.advance(Phase::Serving);
    let handle = control.handle();
    let watch = std::thread::spawn({
        let handle = handle.clone();
        move || {
            // Ends without a message when every worker has ended in order.
            let failure = failures.recv().ok();
            handle.stop();
            failure
        }
    });
    let mut began = Ok(());
    if all_started {
        match take_charge(&state, plane.as_ref(), predecessor, keeps_control) {
            Ok(()) => {
                control.ready();
                let running = Running {
                    state: Arc::clone(&state),
                    control: handle,
                    plane,
                };
                testament.deposit(lock, pins_lock, running);
            }
            Err(error) => {
                handle.stop();
                began = Err(error);
            }
        }
    }
    let end = control.wait();
    testament.close(state.has_left());
    state.advance(Phase::Stopping);
    for thread in threads {
        let _ = thread.join();
    }
    match (watch.join(), end) {
        (Ok(Some(failure)), _) => Err(failure),
        (_, Err(error)) => Err(error.into()),
        _ => began,
    }
}

/// Steers the listening sockets, and has the predecessor leave them. In this order
/// and after all else: the steering of the running gate is gone with it, and one
/// that fails earlier changes nothing. If this one fails now, the predecessor
/// steers again.
fn take_charge(
    state: &State,
    plane: Option<&Plane>,
    predecessor: Option<Predecessor>,
    keeps_control: bool,
) -> Result<(), RunError> {
    predecessor.as_ref().map_or(Ok(()), Predecessor::waits)?;
    listeners::steer(state, plane)?;
    match predecessor {
        Some(predecessor) => Ok(predecessor.ready(keeps_control)?),
        None => Ok(()),
    }
}

fn start_plane(
    config: &Config,
    predecessor: Option<&Predecessor>,
) -> Result<(Option<Plane>, KernelState), RunError> {
    let counted = predecessor.map(|predecessor| predecessor.kernel);
    match (config.kernel, counted) {
        (KernelMode::Off, Some(true)) => {
            return Err(TakeoverError::Kernel("--kernel off".to_owned()).into());
        }
        (KernelMode::Off, _) => return Ok((None, KernelState::Off)),
        // What waits in the queues was never counted.
        (KernelMode::Required, Some(false)) => {
            return Err(TakeoverError::Refused(
                "it has no kernel plane, and --kernel required cannot begin with connections \
                 that the kernel did not count; stop it first"
                    .to_owned(),
            )
            .into());
        }
        (KernelMode::Auto, Some(false)) => {
            let reason = "the gate that was taken over has none; stop gate and start it anew";
            tracing::warn!("kernel plane inactive: {reason}");
            return Ok((None, KernelState::Inactive(reason.to_owned())));
        }
        _ => {}
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
        Err(error) if counted == Some(true) => Err(TakeoverError::Kernel(error.to_string()).into()),
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
    state.sockets = RwLock::new(sockets);
    state.places = places;
    state.session_fds_max = fds.sessions;
    state.pipes_max = fds.pipes;
    state.fds_max = fds.limit;
    Ok(state)
}

/// What sessions may hold beside all that gate opens until it serves.
fn fd_budget(
    config: &Config,
    workers: usize,
    fd_limit: u64,
    predecessor: Option<&Predecessor>,
) -> Result<FdBudget, RunError> {
    let open = host::count_open_fds().context("/proc/self/fd cannot be read")?;
    // What is adopted counts with the listeners, the rest is closed soon.
    let open = open - predecessor.map_or(0, Predecessor::descriptors) as u64;
    let sockets = |listener: &Listener| {
        let adopted = predecessor.map_or(0, |has| has.sockets(listener.address));
        adopted.max(workers) as u64
    };
    let sockets: u64 = config.listeners.iter().map(sockets).sum();
    let open = open + workers as u64 * FDS_PER_WORKER + sockets * FDS_PER_LISTENER;
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
    let (wanted, has) = (&config.limits, &fitted.limits);
    for (name, lowered, to) in [
        (
            "max_connections",
            has.max_connections != wanted.max_connections,
            has.max_connections,
        ),
        (
            "max_pending",
            has.max_pending != wanted.max_pending,
            has.max_pending,
        ),
    ] {
        if lowered {
            tracing::warn!(
                descriptors = fds.limit,
                to = %LimitValue(to),
                "{name} is lowered from its default to what the descriptors allow; raise \
                 RLIMIT_NOFILE (LimitNOFILE=), or set it"
            );
        }
    }
    Ok(fitted)
}

/// A worker says once that it works, or why it does not, or no longer.
fn spawn_worker(
    id: usize,
    state: &Arc<State>,
    sockets: Vec<Listening<Socket>>,
    (started, failed): (mpsc::Sender<()>, mpsc::Sender<RunError>),
) -> Result<JoinHandle<()>, RunError> {
    let state = Arc::clone(state);
    let cpu = state.places.get(id).and_then(|place| place.cpu);
    let thread = std::thread::Builder::new().name(format!("worker-{id}"));
    let body = move || {
        if let Some(cpu) = cpu {
            match host::pin_to_cpu(cpu) {
                Ok(()) => state.stats[id].pinned(cpu),
                Err(error) => tracing::warn!(
                    %error,
                    worker = id,
                    cpu,
                    "not pinned, runs on any CPU: there is no such CPU, or gate may not run there; \
                     correct workers.pin, or CPUAffinity=, AllowedCPUs= or taskset"
                ),
            }
        }
        // A gate with a worker less would look well and lose a part of its
        // clients: whatever ends one ends gate.
        let ended = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let machine = Linux::new(Arc::clone(&state), id)?;
            let worker = Worker::new(id, state, sockets, machine);
            let _ = started.send(());
            drop(started);
            worker.run().context("the worker's ring failed")
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
