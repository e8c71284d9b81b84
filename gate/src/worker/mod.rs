//! The shell: one thread, one ring, many sessions.
//!
//! | file | what it does |
//! |---|---|
//! | `mod.rs` | the loop: completions, work left over, deadlines |
//! | `machine.rs` | what it needs of the machine: sockets, ring, pipes, clock |
//! | `linux.rs` | the real machine |
//! | `accept.rs` | new connections, running out of descriptors |
//! | `evict.rs` | turns silent clients away when too many are |
//! | `actions.rs` | carries out what a session decides |
//! | `admit.rs` | asks the ledger |
//! | `dial.rs` | connects to backends |
//! | `relay.rs`, `flow.rs` | move bytes |
//! | `close.rs` | ends connections and gives back what they held |
//! | `connection.rs` | what is held for one connection |
//! | `inspect.rs` | tells the control plane of the sessions |
//! | `timers.rs` | deadlines |
//!
//! Nothing here parses bytes or does arithmetic on limits.

mod accept;
mod actions;
mod admit;
mod close;
mod connection;
mod dial;
mod evict;
mod flow;
mod inspect;
mod linux;
mod machine;
mod relay;
mod timers;

pub use accept::Listening;
pub use linux::Linux;
pub use machine::{Completion, Event, Key, Kind, Machine, Submitted, Watch, ready};

use std::collections::{HashSet, VecDeque};
use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use slab::Slab;

use crate::admission::PendingSet;
use crate::config::Config;
use crate::ledger::NameCache;
use crate::proto::first_packet::Identity;
use crate::session::event::{Action, Deadlines, Input};
use crate::session::outcome::Reason;
use crate::state::{Phase, State};
use crate::stats::Stats;

use accept::Accepting;
use admit::Waiters;
use connection::{Connection, Mode, PollState};
use dial::Dialing;
use flow::Pipes;
use inspect::Listing;
use timers::Timers;

/// The one buffer through which a worker reads: a full one costs a few
/// microseconds to move, and it stays in the cache.
const HOT_BYTES: usize = 64 * 1024;
/// What a pipe for bulk holds, and the most that one move carries.
pub const PIPE_BYTES: usize = 1 << 20;
/// The longest wait without a deadline: a bound on how late a lost wake-up
/// would be noticed.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// See the module.
pub struct Worker<M: Machine> {
    id: usize,
    machine: M,
    state: Arc<State>,
    stats: Arc<Stats>,
    config: Arc<Config>,
    deadlines: Arc<Deadlines>,
    phase: Phase,
    accepting: Accepting<M::Listener>,
    dialing: Dialing,
    waiters: Waiters,
    turns: Turns,
    connections: Slab<Connection<M>>,
    completions: Vec<Completion<M::Socket>>,
    pipes: Pipes<M::Pipe>,
    generation: u32,
    timers: Timers,
    pending: PendingSet,
    names: NameCache,
    /// Identities of sessions, to be shared.
    identities: HashSet<Arc<Identity>>,
    actions: Vec<Action>,
    hot: Box<[u8]>,
    /// When the last round of the loop ended.
    asleep: Instant,
    /// What the control plane asked, oldest first.
    listings: VecDeque<Listing>,
}

/// Whose turn comes in the next round of the loop.
#[derive(Debug, Default)]
struct Turns {
    /// Connections with work left over.
    runnable: VecDeque<u32>,
    /// Those that have bulk to move.
    bulk: VecDeque<u32>,
    /// Connections that may be closed.
    finished: Vec<u32>,
}

/// What a worker holds at a moment. All zero once every connection is closed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Connections.
    pub connections: usize,
    /// Those that have not spoken and may be evicted.
    pub pending: usize,
    /// Deadlines.
    pub deadlines: usize,
    /// Pipes that flows have.
    pub pipes: usize,
    /// Bytes held back for slow receivers, those in pipes included.
    pub held_bytes: usize,
}

impl<M: Machine> Worker<M> {
    /// A worker for `listeners`.
    pub fn new(
        id: usize,
        state: Arc<State>,
        listeners: Vec<Listening<M::Listener>>,
        machine: M,
    ) -> Self {
        let config = state.config();
        let now = machine.now();
        Self {
            id,
            stats: Arc::clone(&state.stats[id]),
            deadlines: Arc::new(deadlines(&config)),
            config,
            phase: Phase::Starting,
            accepting: Accepting::new(listeners),
            dialing: Dialing::default(),
            waiters: Waiters::default(),
            turns: Turns::default(),
            connections: Slab::new(),
            completions: Vec::new(),
            pipes: Pipes::new(state.pipes_max / state.stats.len()),
            generation: 0,
            timers: Timers::new(now),
            pending: PendingSet::default(),
            names: NameCache::default(),
            identities: HashSet::new(),
            actions: Vec::new(),
            hot: vec![0; HOT_BYTES].into_boxed_slice(),
            asleep: now,
            machine,
            listings: VecDeque::new(),
            state,
        }
    }

    /// Serves until the state says to stop or to leave and every connection is
    /// closed.
    ///
    /// # Errors
    /// The ring failed, or a listener can never accept again.
    pub fn run(mut self) -> io::Result<()> {
        self.begin()?;
        while self.round()?.is_continue() {}
        Ok(())
    }

    /// Begins to accept.
    ///
    /// # Errors
    /// As [`Worker::run`].
    pub fn begin(&mut self) -> io::Result<()> {
        self.machine.poll_waker(Key::new(Kind::Waker, 0, 0))?;
        self.refresh(self.machine.now())?;
        self.arm_listeners()
    }

    /// Waits once, and does all there is to do then.
    ///
    /// # Errors
    /// As [`Worker::run`].
    pub fn round(&mut self) -> io::Result<ControlFlow<()>> {
        let timeout = self.timeout();
        let mut completions = std::mem::take(&mut self.completions);
        self.machine.wait(timeout, &mut completions)?;
        let now = self.machine.now();
        for completion in completions.drain(..) {
            self.complete(completion, now)?;
        }
        self.completions = completions;
        self.begin_fresh(now);
        for _ in 0..self.turns.runnable.len() {
            if let Some(id) = self.turns.runnable.pop_front() {
                self.resume(id, now);
            }
        }
        // One in a round: whoever has a small message waits for one turn of bulk
        // at most, however many sessions have bulk.
        if let Some(id) = self.turns.bulk.pop_front() {
            self.resume(id, now);
        }
        while let Some(id) = self.timers.pop_expired(now) {
            self.expire(id, now);
        }
        self.settle_newcomers(now - evict::NEW);
        if self.accepting.retry_at.is_some_and(|at| at <= now) {
            self.arm_listeners()?;
        }
        if self.dialing.again_at.is_some_and(|at| at <= now) {
            self.redial(now);
        }
        if self.waiters.count > 0 && self.waiters.look_at.is_none_or(|at| at <= now) {
            self.offer_turns(now);
        }
        self.answer_inquiries(now);
        self.close_finished();
        self.send_cancels(now);
        if self.accepting.leaving {
            self.close_listeners(now);
        }
        let ends = self.phase == Phase::Stopping || self.has_left();
        if ends && self.connections.is_empty() {
            return Ok(ControlFlow::Break(()));
        }
        self.asleep = self.machine.now();
        self.stats
            .round_took(self.asleep.saturating_duration_since(now));
        Ok(ControlFlow::Continue(()))
    }

    /// What it holds now.
    #[must_use]
    pub fn holdings(&self) -> Holdings {
        let held = |(_, connection): (usize, &Connection<M>)| {
            connection.up.held() + connection.down.held()
        };
        Holdings {
            connections: self.connections.len(),
            pending: self.pending.len(),
            deadlines: self.timers.len(),
            pipes: self.pipes.lent(),
            held_bytes: self.connections.iter().map(held).sum(),
        }
    }

    /// The machine it runs on.
    pub const fn machine(&mut self) -> &mut M {
        &mut self.machine
    }

    /// How long its next round waits at most, from the end of its last one on.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        let is_idle = self.turns.runnable.is_empty()
            && self.turns.bulk.is_empty()
            && self.turns.finished.is_empty()
            && self.listings.is_empty();
        if !is_idle {
            return Duration::ZERO;
        }
        let next = self
            .timers
            .next()
            .into_iter()
            .chain(self.accepting.retry_at)
            .chain(self.dialing.again_at)
            .chain(self.waiters.look_at)
            .min();
        next.map_or(WAIT_MAX, |at| {
            at.saturating_duration_since(self.asleep).min(WAIT_MAX)
        })
    }

    fn complete(&mut self, completion: Completion<M::Socket>, now: Instant) -> io::Result<()> {
        let Completion { key, event, more } = completion;
        match event {
            Event::Accepted(socket) => {
                self.recovered();
                self.on_accepted(key.index as usize, socket, now);
                if !more {
                    self.on_accept_ended(key.index as usize)?;
                }
            }
            Event::AcceptFailed(error) => {
                self.on_accept_failed(key.index as usize, &error, now)?;
            }
            Event::Ready(_) | Event::PollEnded if key.kind == Kind::Waker => {
                self.machine.clear_waker();
                self.waiters.look_at = None;
                if !more {
                    self.machine.poll_waker(key)?;
                }
                self.refresh(now)?;
            }
            Event::Ready(bits) => self.on_poll(key, bits, !more, now),
            Event::PollEnded => self.on_poll(key, 0, true, now),
            Event::Admitted(answer) => self.on_admitted(key, answer, now),
        }
        Ok(())
    }

    /// A poll spoke, or ended, or both.
    fn on_poll(&mut self, key: Key, bits: u32, ended: bool, now: Instant) {
        let Some(connection) = self.connections.get_mut(key.index as usize) else {
            return;
        };
        if Key::new(key.kind, key.index, connection.generation) != key {
            return;
        }
        let side = connection.side(key.kind);
        let Some(open) = side else { return };
        open.note(bits);
        if ended {
            open.poll = PollState::Idle;
            if open.retired {
                self.backend_retired(key.index, now);
            }
        }
        self.advance(key.index, now);
        if ended {
            self.watch(key.index, key.kind);
        }
    }

    /// Does whatever can be done now.
    fn advance(&mut self, id: u32, now: Instant) {
        let connection = &self.connections[id as usize];
        match connection.mode {
            Mode::Startup => self.read_startup(id, now),
            // Its answer comes with a completion.
            Mode::Admitting => {}
            Mode::Waiting => self.watch_client(id, now),
            Mode::Dialing => self.watch_dial(id, now),
            Mode::Relaying if connection.is_bulk() => self.enqueue(id),
            Mode::Relaying => self.relay(id, now),
            Mode::Lingering => self.drop_client_data(id, now),
            Mode::Closing => {
                if self.connections[id as usize].is_quiet() {
                    self.turns.finished.push(id);
                }
            }
        }
    }

    fn resume(&mut self, id: u32, now: Instant) {
        if let Some(connection) = self.connections.get_mut(id as usize) {
            connection.queued = false;
            match connection.mode {
                Mode::Closing => {}
                Mode::Relaying => self.relay(id, now),
                _ => self.advance(id, now),
            }
        }
    }

    /// Has the loop come back to a connection in its next round.
    fn enqueue(&mut self, id: u32) {
        let connection = &mut self.connections[id as usize];
        if !connection.queued {
            connection.queued = true;
            if connection.mode == Mode::Relaying && connection.is_bulk() {
                self.turns.bulk.push_back(id);
            } else {
                self.turns.runnable.push_back(id);
            }
        }
    }

    fn expire(&mut self, id: u32, now: Instant) {
        let Some(connection) = self.connections.get_mut(id as usize) else {
            return;
        };
        connection.deadline = None;
        // A reload may have changed it meanwhile, to never at that.
        if let Some(quiet) = connection.session.quiet_time(&self.deadlines) {
            let end = connection.active + quiet;
            if quiet.is_zero() {
                return;
            }
            if end > now {
                connection.deadline = Some(end);
                self.timers.replace(id, None, Some(end));
                return;
            }
        }
        if connection.session.is_dialing() {
            return self.dial_failed(id, self.overdue(id), now);
        }
        self.feed(id, Input::DeadlinePassed, now);
    }

    /// Sees what the control plane changed.
    fn refresh(&mut self, now: Instant) -> io::Result<()> {
        self.take_inquiries();
        self.evict_for_others(now);
        let config = self.state.config();
        // Most wake-ups are of those that wait, and sessions share the deadlines.
        if !Arc::ptr_eq(&config, &self.config) {
            self.config = config;
            self.deadlines = Arc::new(deadlines(&self.config));
        }
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
                Phase::Draining => {
                    self.connections[id as usize].session.doom(Reason::Draining);
                    self.feed(id, Input::Turn, now);
                }
                Phase::Stopping => self.feed(id, Input::Stop, now),
                Phase::Starting | Phase::Serving => {}
            }
        }
        Ok(())
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
        half_close: timeouts.half_close,
        abandoned: timeouts.abandoned,
    }
}
