//! The control plane's thread: signals, drain, the end.
#![forbid(unsafe_code)]

use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Sender;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use axum::Router;
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior};

use super::limited::{PERIOD, Watch};
use super::socket::ControlSocket;
use super::{ControlError, End, Shared, Sockets, health, http, notify_systemd, reload};
use crate::host::SocketFile;
use crate::kernel::{KernelLog, forward_log};
use crate::state::{Phase, State};

/// Entries of the thread's ring: it serves few requests, and each is small.
const RING_ENTRIES: u32 = 64;
/// After the last session of a drain: for the last bytes of answers to
/// clients that hold no slot.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// Runs until gate ends. Says through `started` whether it could begin.
pub(super) fn thread(
    shared: Arc<Shared>,
    sockets: Sockets,
    kernel_log: Option<KernelLog>,
    started: &Sender<Result<(), ControlError>>,
) -> End {
    let mut builder = tokio_uring::builder();
    builder.entries(RING_ENTRIES);
    let runtime = match tokio_uring::Runtime::new(&builder) {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = started.send(Err(ControlError::Ring(error)));
            return End::Stopped;
        }
    };
    runtime.block_on(async {
        let begun = begin(&shared, sockets);
        match begun.map_err(ControlError::Start) {
            Ok((signals, served)) => {
                if let Some(log) = kernel_log {
                    tokio_uring::spawn(follow(log));
                }
                let _ = started.send(Ok(()));
                let mut served = Some(served);
                let end = until_end(&shared, signals, &mut served).await;
                if let Some(served) = &mut served
                    && *shared.open.borrow()
                {
                    served.file.own();
                }
                end
            }
            Err(error) => {
                let _ = started.send(Err(error));
                End::Stopped
            }
        }
    })
}

/// Passes the kernel programs' log lines on.
async fn follow(log: KernelLog) {
    if let Err(error) = forward_log(log).await {
        tracing::warn!(%error, "the kernel programs' log cannot be read any more");
    }
}

struct Signals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

/// The sockets that are served.
struct Served {
    tasks: Vec<JoinHandle<()>>,
    file: SocketFile,
}

impl Served {
    /// Closes them; requests under way are answered.
    async fn leave(mut self, keeps_control: bool) {
        for task in self.tasks.drain(..) {
            task.abort();
            // Ended when this returns, and its listener closed.
            let _ = task.await;
        }
        if keeps_control {
            self.file.keep();
        }
    }
}

fn begin(shared: &Arc<Shared>, sockets: Sockets) -> io::Result<(Signals, Served)> {
    let signals = Signals {
        hangup: signal(SignalKind::hangup())?,
        terminate: signal(SignalKind::terminate())?,
        interrupt: signal(SignalKind::interrupt())?,
    };
    let mut tasks = Vec::new();
    if let Some(admin) = sockets.admin {
        let listener = tokio::net::TcpListener::from_std(admin)?;
        let routes = http::admin_routes(Arc::clone(shared));
        tasks.push(tokio_uring::spawn(serve(shared, listener, routes)));
    }
    health::start(&shared.state);
    let ControlSocket { listener, file } = sockets.control;
    let listener = tokio::net::UnixListener::from_std(listener)?;
    let routes = http::control_routes(Arc::clone(shared));
    tasks.push(tokio_uring::spawn(serve(shared, listener, routes)));
    Ok((signals, Served { tasks, file }))
}

/// Serves once gate answers for the socket.
fn serve<L: http::Accept>(
    shared: &Shared,
    listener: L,
    routes: Router,
) -> impl Future<Output = ()> + use<L> {
    let mut open = shared.open.subscribe();
    async move {
        if open.wait_for(|open| *open).await.is_ok() {
            http::serve(listener, routes).await;
        }
    }
}

async fn until_end(shared: &Arc<Shared>, mut signals: Signals, served: &mut Option<Served>) -> End {
    let mut watch = Watch::default();
    let mut drain: Option<Drain> = None;
    // A drain that was asked for otherwise is no first SIGTERM.
    let mut terminated = false;
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut looked = Instant::now();
    loop {
        tokio::select! {
            _ = signals.interrupt.recv() => {
                tracing::warn!("SIGINT: ends now");
                return End::Interrupted;
            }
            _ = signals.terminate.recv() => {
                if std::mem::replace(&mut terminated, true) {
                    tracing::warn!("second SIGTERM: ends now");
                    return End::Interrupted;
                }
                drain.get_or_insert_with(|| Drain::begin(&shared.state));
            }
            () = shared.drain.notified() => {
                drain.get_or_insert_with(|| Drain::begin(&shared.state));
            }
            () = shared.stop.notified() => return End::Stopped,
            () = shared.leave.notified() => {
                let leave = shared.leaving.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let (Some(leave), Some(served)) = (leave, served.take()) {
                    served.leave(leave.keeps_control).await;
                    let _ = leave.done.send(());
                }
            }
            _ = signals.hangup.recv() => {
                if served.is_none() {
                    tracing::info!("SIGHUP: not reloaded, another gate has taken over");
                    continue;
                }
                // The signal may come while a slow name server is asked: the
                // loop goes on meanwhile.
                let shared = Arc::clone(shared);
                tokio_uring::spawn(async move {
                    let _ = reload::reload(&shared).await;
                });
            }
            _ = ticks.tick() => {
                // Once it has taken over, the limits are the other gate's to watch.
                if served.is_some() {
                    watch.look(&shared.state, &shared.limited, looked.elapsed());
                }
                looked = Instant::now();
            }
            () = deadline_of(drain.as_ref()) => {}
        }
        if let Some(end) = drain.as_mut().and_then(|drain| drain.end(&shared.state)) {
            return end;
        }
    }
}

/// Ends with a drain's deadline, which falls between two ticks.
async fn deadline_of(drain: Option<&Drain>) {
    match drain {
        Some(drain) => tokio::time::sleep_until(drain.deadline).await,
        None => std::future::pending().await,
    }
}

/// A drain under way.
struct Drain {
    deadline: Instant,
    /// When the last session ended.
    empty: Option<Instant>,
}

impl Drain {
    fn begin(state: &State) -> Self {
        state.advance(Phase::Draining);
        let patience = state.config().timeouts.drain;
        tracing::info!(
            sessions = state.ledger.admitted(),
            deadline_s = patience.as_secs_f64(),
            "draining: new sessions are refused, sessions may end"
        );
        if !state.has_left() {
            notify_systemd(NotifyState::Stopping);
        }
        Self {
            deadline: Instant::now() + patience,
            empty: None,
        }
    }

    /// Whether it is over.
    fn end(&mut self, state: &State) -> Option<End> {
        let sessions = state.ledger.admitted();
        if sessions == 0 {
            let empty = *self.empty.get_or_insert_with(Instant::now);
            let quiet = state.session_fds.load(Ordering::Relaxed) == 0;
            if quiet || empty.elapsed() >= LAST_ANSWERS {
                tracing::info!("drained");
                return Some(End::Drained);
            }
        } else {
            self.empty = None;
        }
        if Instant::now() >= self.deadline {
            tracing::warn!(
                sessions,
                "the drain deadline: ends the sessions that are left"
            );
            return Some(End::DrainDeadline(sessions));
        }
        None
    }
}
