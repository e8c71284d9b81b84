//! What workers and control plane share.

use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use gate_common::abi::slot;
use gate_common::limit::Limit;

use crate::admission::{Ticket, WantedEvictions};
use crate::backends::Backends;
use crate::budget::Beside;
use crate::config::Config;
use crate::host::{AcceptQueue, FdBudget, PIPES_MAX, Waker, accept_queue};
use crate::ledger::Ledger;
use crate::placement::Place;
use crate::session::outcome::Reason;
use crate::sessions::Inbox;
use crate::stats::{Distribution, Latency, Stats};
use crate::waiting::Waiting;

/// Where gate stands in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Phase {
    /// Listeners are not bound yet.
    Starting = 0,
    /// New sessions are accepted.
    Serving = 1,
    /// New sessions are refused with 57P03, old ones may end.
    Draining = 2,
    /// Everything is closed now.
    Stopping = 3,
}

/// Whether the kernel enforces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelState {
    /// The programs are attached and the probe counted.
    Active,
    /// Wanted, but not to be had: the cause and its cure.
    Inactive(String),
    /// `--kernel=off`.
    Off,
}

/// One listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerInfo {
    /// Bound address.
    pub address: SocketAddr,
    /// Index of its words in the ledger.
    pub index: u32,
}

/// Shared by all threads of one gate.
pub struct State {
    config: RwLock<Arc<Config>>,
    /// Limits and counts.
    pub ledger: Arc<Ledger>,
    /// Which addresses of the backends are up.
    pub backends: Backends,
    /// In the order of the configuration.
    pub listeners: Vec<ListenerInfo>,
    /// The listening sockets of each, again: their queues are looked at here.
    pub sockets: RwLock<Vec<Vec<OwnedFd>>>,
    /// One for each worker.
    pub stats: Vec<Arc<Stats>>,
    /// Where each worker is to run; shorter if that is not known.
    pub places: Vec<Place>,
    /// Whether the kernel enforces.
    pub kernel: KernelState,
    /// Wakes each worker.
    pub wakers: Vec<Waker>,
    /// Clients that wait for a slot.
    pub waiting: Waiting,
    /// What each worker is asked; wake it after.
    pub inboxes: Vec<Inbox>,
    /// Connections that any worker evicted and has not closed yet: still pending
    /// by the ledger.
    pub evicting: AtomicU64,
    /// Evictions that a worker had no victim for.
    evictions_wanted: Mutex<WantedEvictions>,
    /// Descriptors that sessions of all workers hold.
    pub session_fds: AtomicU64,
    /// Descriptors that sessions may hold together.
    pub session_fds_max: u64,
    /// Pipes that all workers may have together.
    pub pipes_max: usize,
    /// Descriptors this process may hold.
    pub fds_max: u64,
    phase: AtomicU8,
    /// Beside the phase, not one of its steps: a gate that has left is drained
    /// and stopped like any other.
    left: AtomicBool,
    /// Workers that have listening sockets.
    accepting: AtomicUsize,
}

impl State {
    /// A state in [`Phase::Starting`].
    #[must_use]
    pub fn new(
        config: Arc<Config>,
        ledger: Arc<Ledger>,
        listeners: Vec<ListenerInfo>,
        stats: Vec<Arc<Stats>>,
        kernel: KernelState,
        wakers: Vec<Waker>,
    ) -> Self {
        let inboxes = stats.iter().map(|_| Inbox::default()).collect();
        let accepting = wakers.len();
        Self {
            backends: Backends::new(&config.backends, Instant::now()),
            config: RwLock::new(config),
            ledger,
            listeners,
            sockets: RwLock::default(),
            stats,
            places: Vec::new(),
            kernel,
            wakers,
            waiting: Waiting::default(),
            inboxes,
            evicting: AtomicU64::new(0),
            evictions_wanted: Mutex::default(),
            session_fds: AtomicU64::new(0),
            session_fds_max: u64::MAX,
            pipes_max: PIPES_MAX,
            fds_max: u64::MAX,
            phase: AtomicU8::new(Phase::Starting as u8),
            left: AtomicBool::new(false),
            accepting: AtomicUsize::new(accepting),
        }
    }

    /// The configuration in force.
    #[must_use]
    pub fn config(&self) -> Arc<Config> {
        Arc::clone(&self.config.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Puts another configuration in force; the workers see it at their next
    /// wake-up.
    pub fn set_config(&self, config: Arc<Config>) {
        *self.config.write().unwrap_or_else(PoisonError::into_inner) = config;
        self.wake_workers();
    }

    /// Clients refused for a reason, over all listeners and workers.
    #[must_use]
    pub fn rejected(&self, reason: Reason) -> u64 {
        let listeners = self.listeners.len();
        let of_worker = |stats: &Arc<Stats>| -> u64 {
            (0..listeners)
                .map(|listener| stats.rejected_count(listener, reason))
                .sum()
        };
        self.stats.iter().map(of_worker).sum()
    }

    /// How long something took: at one worker, or over all.
    #[must_use]
    pub fn latency(&self, latency: Latency, worker: Option<usize>) -> Distribution {
        let mut all = Distribution::default();
        for (number, stats) in self.stats.iter().enumerate() {
            if worker.is_none_or(|worker| worker == number) {
                all.add(&stats.latency(latency));
            }
        }
        all
    }

    /// The accept queue of a listener, over all workers; `None` if it cannot be
    /// looked at.
    #[must_use]
    pub fn accept_queue(&self, listener: usize) -> Option<AcceptQueue> {
        let mut all = AcceptQueue::default();
        let sockets = self.sockets.read().unwrap_or_else(PoisonError::into_inner);
        for socket in sockets.get(listener)? {
            let queue = accept_queue(socket.as_fd()).ok()?;
            all.length += queue.length;
            all.limit += queue.limit;
        }
        Some(all)
    }

    /// Takes `count` of the descriptors that sessions may hold, or none.
    /// Returns whether there were so many.
    pub fn take_fds(&self, count: u64) -> bool {
        let held = self.session_fds.fetch_add(count, Ordering::Relaxed);
        let fits = held + count <= self.session_fds_max;
        if !fits {
            self.give_fds(count);
        }
        fits
    }

    /// The descriptors, as limits are held against them.
    #[must_use]
    pub const fn fd_budget(&self) -> FdBudget {
        FdBudget {
            limit: self.fds_max,
            sessions: self.session_fds_max,
            pipes: self.pipes_max,
        }
    }

    /// Gives back what [`State::take_fds`] took.
    pub fn give_fds(&self, count: u64) {
        self.session_fds.fetch_sub(count, Ordering::Relaxed);
    }

    /// How many clients may wait for a slot: as many as leave their descriptors to
    /// the sessions and to those that are pending.
    #[must_use]
    pub fn waiting_room(&self) -> u64 {
        match self.ledger.plain_limit(slot::TOTAL) {
            Limit::Unlimited => u64::MAX,
            total => {
                let beside = Beside {
                    waiting: 0,
                    ..Beside::in_force(&self.ledger)
                };
                let room = beside.room(self.session_fds_max);
                room.saturating_sub(total.tokens())
            }
        }
    }

    /// What workers want of each other.
    pub fn evictions_wanted(&self) -> MutexGuard<'_, WantedEvictions> {
        self.evictions_wanted
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the wait of a client: admitted, out of time, or gone. Returns whether
    /// it waited.
    pub fn end_wait(&self, ticket: Ticket) -> bool {
        self.waiting
            .leave(ticket, |worker| self.wake_worker(worker))
    }

    /// To be called after the close of a session that was admitted.
    pub fn slots_released(&self) {
        self.waiting.released(|worker| self.wake_worker(worker));
    }

    /// Where gate stands.
    #[must_use]
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::Acquire) {
            0 => Phase::Starting,
            1 => Phase::Serving,
            2 => Phase::Draining,
            _ => Phase::Stopping,
        }
    }

    /// Goes on to a later phase, never back, and tells the workers.
    pub fn advance(&self, phase: Phase) {
        self.phase.fetch_max(phase as u8, Ordering::AcqRel);
        self.wake_workers();
    }

    /// Another gate has the listening sockets: the workers stop accepting and end
    /// with their last connection.
    pub fn leave(&self) {
        self.left.store(true, Ordering::Release);
        self.wake_workers();
    }

    /// Whether [`State::leave`] was called.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }

    /// A worker has closed its listening sockets after [`State::leave`].
    pub fn worker_left(&self) {
        if self.accepting.fetch_sub(1, Ordering::AcqRel) == 1 {
            // An address that the other gate does not want is free now.
            self.sockets
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .clear();
        }
    }

    /// Workers that have not closed their listening sockets.
    #[must_use]
    pub fn accepting(&self) -> usize {
        self.accepting.load(Ordering::Acquire)
    }

    fn wake_worker(&self, worker: u16) {
        if let Some(waker) = self.wakers.get(usize::from(worker)) {
            waker.wake();
        }
    }

    /// Makes every worker but one look at what changed.
    pub fn wake_others(&self, worker: usize) {
        for (number, waker) in self.wakers.iter().enumerate() {
            if number != worker {
                waker.wake();
            }
        }
    }

    /// Makes every worker look at what changed.
    pub fn wake_workers(&self) {
        for waker in &self.wakers {
            waker.wake();
        }
    }
}
