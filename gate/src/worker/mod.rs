//! The shell: one thread, one ring, many sessions.
//!
//! | file | what it does |
//! |---|---|
//! | `mod.rs` | the loop: completions, work left over, deadlines, teardown |
//! | `accept.rs` | new connections, eviction, running out of descriptors |
//! | `actions.rs` | carries out what a session decides |
//! | `relay.rs` | moves bytes |
//! | `connection.rs` | what is held for one connection |
//! | `timers.rs` | deadlines |
//!
//! Nothing here parses bytes or does arithmetic on limits.

mod accept;
mod actions;
mod connection;
mod relay;
mod timers;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use slab::Slab;
use socket2::Socket;

use crate::admission::PendingSet;
use crate::config::Config;
use crate::ledger::NameCache;
use crate::ring::{Completion, Event, Key, Kind, Ring, ready};
use crate::session::event::{Action, Deadlines, Input};
use crate::session::outcome::Reason;
use crate::state::{Phase, State};
use crate::stats::Stats;

use connection::{Connection, Mode, PollState, Side};
use timers::Timers;

/// The one buffer through which a worker reads: a full one costs a few
/// microseconds to move, and it stays in the cache.
const HOT_BYTES: usize = 64 * 1024;
/// The longest wait without a deadline: a bound on how late a lost wake-up
/// would be noticed.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// A listening socket of this worker.
pub struct Listening {
    /// Bound and listening, non-blocking.
    pub socket: Socket,
    /// Place of its listener in the configuration.
    pub place: usize,
    /// Index of its words in the ledger.
    pub index: u32,
    /// Accepting ended and is to be armed again.
    paused: bool,
}

impl Listening {
    /// A listener that is not armed yet.
    #[must_use]
    pub fn new(socket: Socket, place: usize, index: u32) -> Self {
        Self {
            socket,
            place,
            index,
            paused: true,
        }
    }
}

/// See the module.
pub struct Worker {
    id: usize,
    state: Arc<State>,
    stats: Arc<Stats>,
    config: Arc<Config>,
    deadlines: Deadlines,
    phase: Phase,
    ring: Ring,
    /// Several of one listener if a gate with more workers was taken over.
    listeners: Vec<Listening>,
    /// Accepts no more, and ends with the last connection.
    leaving: bool,
    connections: Slab<Connection>,
    generation: u32,
    timers: Timers,
    pending: PendingSet,
    names: NameCache,
    /// Connections with work left over.
    runnable: VecDeque<u32>,
    /// Connections that may be closed.
    finished: Vec<u32>,
    actions: Vec<Action>,
    hot: Box<[u8]>,
    /// When paused listeners are armed again.
    accept_retry: Option<Instant>,
    /// Connections whose backend is dialled again, for want of a descriptor.
    redials: Vec<u32>,
    redial_at: Option<Instant>,
    /// A descriptor to give up when there is no other.
    spare: Option<File>,
    /// A connection lives on the spare descriptor.
    spare_lent: bool,
    /// Connections being refused for want of descriptors.
    on_reserve: u64,
    exhausted: bool,
}

impl Worker {
    /// A worker for `listeners`. Call it on the thread that will run it: the
    /// ring belongs to that thread.
    ///
    /// # Errors
    /// No ring or no descriptor is to be had.
    pub fn new(id: usize, state: Arc<State>, listeners: Vec<Listening>) -> anyhow::Result<Self> {
        let config = state.config();
        Ok(Self {
            id,
            stats: Arc::clone(&state.stats[id]),
            deadlines: deadlines(&config),
            config,
            phase: Phase::Starting,
            ring: Ring::new()?,
            listeners,
            leaving: false,
            connections: Slab::new(),
            generation: 0,
            timers: Timers::default(),
            pending: PendingSet::default(),
            names: NameCache::default(),
            runnable: VecDeque::new(),
            finished: Vec::new(),
            actions: Vec::new(),
            hot: vec![0; HOT_BYTES].into_boxed_slice(),
            accept_retry: None,
            redials: Vec::new(),
            redial_at: None,
            spare: Some(File::open("/dev/null")?),
            spare_lent: false,
            on_reserve: 0,
            exhausted: false,
            state,
        })
    }

    /// Serves until the state says to stop or to leave and every connection is
    /// closed.
    ///
    /// # Errors
    /// The ring failed, or a listener can never accept again.
    pub fn run(mut self) -> io::Result<()> {
        let waker = Key::new(Kind::Waker, 0, 0);
        self.ring
            .poll(self.state.wakers[self.id].as_fd(), ready::READ, waker)?;
        self.refresh(Instant::now())?;
        self.arm_listeners()?;
        let mut completions = Vec::new();
        loop {
            let timeout = self.timeout(Instant::now());
            self.ring.wait(timeout, &mut completions)?;
            let now = Instant::now();
            for completion in completions.drain(..) {
                self.complete(completion, now)?;
            }
            for _ in 0..self.runnable.len() {
                if let Some(id) = self.runnable.pop_front() {
                    self.resume(id, now);
                }
            }
            while let Some(id) = self.timers.pop_expired(now) {
                self.expire(id, now);
            }
            if self.accept_retry.is_some_and(|at| at <= now) {
                self.arm_listeners()?;
            }
            if self.redial_at.is_some_and(|at| at <= now) {
                self.redial(now);
            }
            self.close_finished();
            if self.leaving {
                self.close_listeners(now);
            }
            let ends = self.phase == Phase::Stopping || self.has_left();
            if ends && self.connections.is_empty() {
                return Ok(());
            }
        }
    }

    fn timeout(&self, now: Instant) -> Duration {
        if !self.runnable.is_empty() || !self.finished.is_empty() {
            return Duration::ZERO;
        }
        let next = self
            .timers
            .next()
            .into_iter()
            .chain(self.accept_retry)
            .chain(self.redial_at)
            .min();
        next.map_or(WAIT_MAX, |at| {
            at.saturating_duration_since(now).min(WAIT_MAX)
        })
    }

    fn complete(&mut self, completion: Completion, now: Instant) -> io::Result<()> {
        let Completion { key, event, more } = completion;
        match event {
            Event::Accepted(socket) => {
                self.recovered();
                self.on_accepted(key.index as usize, socket, now);
                if !more {
                    self.listeners[key.index as usize].paused = true;
                    self.arm_listeners()?;
                }
                Ok(())
            }
            Event::AcceptFailed(error) => self.on_accept_failed(key.index as usize, &error, now),
            Event::Ready(_) | Event::PollEnded if key.kind == Kind::Waker => {
                self.state.wakers[self.id].clear();
                if !more {
                    let waker = self.state.wakers[self.id].as_fd();
                    self.ring.poll(waker, ready::READ, key)?;
                }
                self.refresh(now)
            }
            Event::Ready(bits) => self.on_poll(key, bits, !more, now),
            Event::PollEnded => self.on_poll(key, 0, true, now),
        }
    }

    /// A poll spoke, or ended, or both.
    fn on_poll(&mut self, key: Key, bits: u32, ended: bool, now: Instant) -> io::Result<()> {
        let Some(connection) = self.connections.get_mut(key.index as usize) else {
            return Ok(());
        };
        if Key::new(key.kind, key.index, connection.generation) != key {
            return Ok(());
        }
        let side = connection.side(key.kind);
        let Some(open) = side else { return Ok(()) };
        open.note(bits);
        if ended {
            let wanted = open.poll == PollState::Armed;
            open.poll = PollState::Idle;
            if open.retired {
                *side = None;
                self.give_backend_fd(key.index);
            } else if wanted {
                self.arm(key.index, key.kind)?;
            }
        }
        self.advance(key.index, now);
        Ok(())
    }

    /// Arms a socket's poll.
    fn arm(&mut self, id: u32, kind: Kind) -> io::Result<()> {
        let connection = &mut self.connections[id as usize];
        let key = Key::new(kind, id, connection.generation);
        let side = connection.side(kind);
        if let Some(side) = side
            && side.poll == PollState::Idle
        {
            let interest = ready::READ | ready::WRITE | ready::PEER_ENDED;
            self.ring.poll(side.socket.as_fd(), interest, key)?;
            side.poll = PollState::Armed;
        }
        Ok(())
    }

    /// Does whatever can be done now.
    fn advance(&mut self, id: u32, now: Instant) {
        match self.connections[id as usize].mode {
            Mode::Startup => self.read_startup(id, now),
            Mode::Dialing => self.watch_dial(id, now),
            Mode::Relaying => self.relay(id, now),
            Mode::Lingering => self.drop_client_data(id, now),
            Mode::Closing => {
                if self.connections[id as usize].is_quiet() {
                    self.finished.push(id);
                }
            }
        }
    }

    fn resume(&mut self, id: u32, now: Instant) {
        if let Some(connection) = self.connections.get_mut(id as usize) {
            connection.queued = false;
            if connection.mode != Mode::Closing {
                self.advance(id, now);
            }
        }
    }

    /// Has the loop come back to a connection in its next round.
    fn enqueue(&mut self, id: u32) {
        let connection = &mut self.connections[id as usize];
        if !connection.queued {
            connection.queued = true;
            self.runnable.push_back(id);
        }
    }

    fn expire(&mut self, id: u32, now: Instant) {
        let Some(connection) = self.connections.get_mut(id as usize) else {
            return;
        };
        connection.deadline = None;
        if connection.session.is_idle_timed() {
            // A reload may have changed it meanwhile, to never at that.
            let idle = self.deadlines.idle;
            let idle_end = connection.active + idle;
            if idle.is_zero() {
                return;
            }
            if idle_end > now {
                connection.deadline = Some(idle_end);
                self.timers.replace(id, None, Some(idle_end));
                return;
            }
        }
        self.feed(id, Input::DeadlinePassed, now);
    }

    /// Sees what the control plane changed.
    fn refresh(&mut self, now: Instant) -> io::Result<()> {
        self.config = self.state.config();
        self.deadlines = deadlines(&self.config);
        if self.state.has_left() {
            self.leave()?;
        }
        let phase = self.state.phase();
        if phase == self.phase {
            return Ok(());
        }
        self.phase = phase;
        let ids: Vec<u32> = self.connections.iter().map(|(id, _)| id as u32).collect();
        for id in ids {
            match phase {
                Phase::Draining => self.connections[id as usize].session.doom(Reason::Draining),
                Phase::Stopping => self.feed(id, Input::Stop, now),
                Phase::Starting | Phase::Serving => {}
            }
        }
        Ok(())
    }

    /// Closes what has no operation in flight: the backend before the client,
    /// whose close gives the slots back.
    fn close_finished(&mut self) {
        while let Some(id) = self.finished.pop() {
            if !self.connections.contains(id as usize) {
                continue;
            }
            let mut connection = self.connections.remove(id as usize);
            self.stats.holds(self.connections.len());
            // Before the close: between the two it counts once too often, and
            // another worker evicts one too many rather than one too few.
            if connection.evicted {
                self.state.evicting.fetch_sub(1, Ordering::Relaxed);
            }
            drop(connection.backend.take());
            if let Some(Side { socket, .. }) = connection.client.take() {
                if connection.reset_client {
                    actions::reset(&socket);
                }
                drop(socket);
            }
            if let Some(entry) = connection.entry.take() {
                self.state.ledger.closed(entry);
            }
            self.state.give_fds(connection.fds);
            if connection.on_reserve {
                self.on_reserve -= 1;
            }
            if connection.on_spare {
                self.spare_lent = false;
                self.spare = File::open("/dev/null").ok();
            }
        }
    }
}

fn deadlines(config: &Config) -> Deadlines {
    let timeouts = &config.timeouts;
    Deadlines {
        startup: timeouts.startup,
        connect: timeouts.connect,
        auth: timeouts.auth,
        cancel: timeouts.cancel,
        idle: timeouts.idle,
        abandoned: timeouts.abandoned,
    }
}
