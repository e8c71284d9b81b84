//! The simulated ring of a worker: operations in flight and their completions.
//!
//! As io_uring has it: completions of one operation come in order, those of different ones in
//! any; a multishot may end at any report and is then armed again by its owner; an operation that
//! is cancelled ends with one last completion.

use std::collections::BTreeMap;
use std::time::Duration;

use gate::worker::{Key, Kind, Watch, ready};

use super::random::Random;
use super::tcp::GATE;
use super::world::World;

/// What an operation looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// The backlog of a queue.
    Listener(usize),
    /// The wake-ups.
    Waker,
    /// gate's end of a connection.
    Line(usize),
}

/// What is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Report {
    /// This connection was accepted.
    Accepted(usize),
    /// Accepting ended with this error.
    AcceptFailed(i32),
    /// Bits of poll(2).
    Ready(u32),
    /// A poll ended.
    PollEnded,
    /// An admission's errno, or 0.
    Admitted(i32),
}

/// A completion that the worker has not seen.
#[derive(Clone, Copy, Debug)]
pub struct Posted {
    /// Its operation.
    pub key: Key,
    /// What it says.
    pub report: Report,
    /// The operation goes on.
    pub more: bool,
    at: Duration,
}

#[derive(Debug)]
struct Operation {
    target: Target,
    watch: Watch,
    /// Its target changed since the last report.
    woken: bool,
    /// Its last completion is posted.
    ended: bool,
    /// Its completions come in order.
    last_at: Duration,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Operations {
    in_flight: BTreeMap<Key, Operation>,
    posted: Vec<Posted>,
    /// Operations on descriptors that are closed.
    past: Vec<Key>,
    of_line: BTreeMap<usize, Vec<Key>>,
    /// There was a wake-up that the worker has not taken back.
    pub waker_set: bool,
    /// How often it was told of wake-ups.
    pub wakes: u64,
    /// Something may be there to be posted.
    changed: bool,
    /// The ring is gone, and its operations with it.
    pub gone: bool,
}

impl Operations {
    /// Begins an operation.
    pub fn arm(&mut self, key: Key, target: Target, watch: Watch) {
        let operation = Operation {
            target,
            watch,
            woken: true,
            ended: false,
            last_at: Duration::ZERO,
        };
        self.changed = true;
        let other = self.in_flight.insert(key, operation);
        assert!(other.is_none(), "{key:?} is in flight already");
        if let Target::Line(line) = target {
            let keys = self.of_line.entry(line).or_default();
            if !keys.contains(&key) {
                keys.push(key);
            }
        }
    }

    /// A connection changed.
    pub fn wake(&mut self, line: usize) {
        self.wake_target(Target::Line(line));
    }

    fn wake_target(&mut self, target: Target) {
        for operation in self.in_flight.values_mut() {
            operation.woken |= operation.target == target;
        }
        self.changed = true;
    }

    /// The worker is to be woken.
    pub fn wake_waker(&mut self) {
        self.waker_set = true;
        self.wake_target(Target::Waker);
    }

    /// A connection waits in the backlog of a queue.
    pub fn wake_listener(&mut self, queue: usize) {
        self.wake_target(Target::Listener(queue));
    }

    /// A listening socket is closed only when no accept is armed on it.
    pub fn check_listener(&self, queue: usize) {
        let mut targets = self.in_flight.values().map(|operation| operation.target);
        assert!(
            self.gone || targets.all(|target| target != Target::Listener(queue)),
            "queue {queue} is closed under its accept"
        );
    }

    /// A descriptor is closed only when nothing is in flight on it.
    pub fn check_close(&mut self, line: usize) {
        for (key, operation) in &self.in_flight {
            assert!(
                operation.target != Target::Line(line),
                "closed under {key:?}, {operation:?}"
            );
        }
        self.past
            .extend(self.of_line.remove(&line).unwrap_or_default());
    }

    /// Operations that look at connections.
    pub fn on_lines(&self) -> usize {
        let targets = self.in_flight.values().map(|operation| operation.target);
        targets
            .filter(|target| matches!(target, Target::Line(_)))
            .count()
    }

    /// The connection that this operation is about, or was.
    pub fn line_of(&self, key: Key) -> Option<usize> {
        match self.in_flight.get(&key)?.target {
            Target::Line(line) => Some(line),
            Target::Listener(_) | Target::Waker => None,
        }
    }

    /// Connections that were accepted without the worker being told.
    pub fn untold_accepts(&self) -> usize {
        let accepted = |posted: &&Posted| matches!(posted.report, Report::Accepted(_));
        self.posted.iter().filter(accepted).count()
    }

    /// When the next completion is there.
    pub fn next_at(&self) -> Option<Duration> {
        self.posted.iter().map(|posted| posted.at).min()
    }

    pub fn post(&mut self, key: Key, report: Report, more: bool, at: Duration) {
        if let Some(operation) = self.in_flight.get_mut(&key) {
            operation.ended = !more;
            operation.last_at = operation.last_at.max(at);
            let at = operation.last_at;
            self.posted.push(Posted {
                key,
                report,
                more,
                at,
            });
        }
    }

    /// Completions that are there, in an order that io_uring could have.
    pub fn take(&mut self, now: Duration, random: &mut Random) -> Vec<Posted> {
        let mut taken = Vec::new();
        let mut due: Vec<Posted> = self
            .posted
            .extract_if(.., |posted| posted.at <= now)
            .collect();
        let leave = if random.one_in(4) {
            random.below(due.len())
        } else {
            0
        };
        while due.len() > leave {
            let key = due[random.below(due.len())].key;
            let first = due.iter().position(|posted| posted.key == key).unwrap_or(0);
            let posted = due.remove(first);
            if !posted.more {
                self.in_flight.remove(&key);
            }
            taken.push(posted);
        }
        // What is left is older than what was posted later.
        due.append(&mut self.posted);
        self.posted = due;
        taken
    }

    /// A completion for an earlier owner of an index.
    pub fn stale(&self, random: &mut Random) -> Option<Posted> {
        let key = *self.past.get(random.below(self.past.len()))?;
        // A session that dials its next address is the same owner still.
        let of_owner = |other: &Key| (other.index, other.generation) == (key.index, key.generation);
        if self.of_line.values().flatten().any(of_owner) {
            return None;
        }
        let bits = ready::READ | ready::PEER_ENDED | ready::HANG_UP | ready::ERROR;
        Some(Posted {
            key,
            report: random.pick(&[Report::Ready(bits), Report::PollEnded]),
            more: random.one_in(2),
            at: Duration::ZERO,
        })
    }
}

/// Posts what operations of all workers have to report.
pub fn collect(world: &mut World) {
    for worker in 0..world.rings.len() {
        if std::mem::take(&mut world.rings[worker].changed) {
            collect_of(world, worker);
        }
    }
}

fn collect_of(world: &mut World, worker: usize) {
    let woken: Vec<(Key, Target, Watch)> = world.rings[worker]
        .in_flight
        .iter_mut()
        .filter_map(|(key, operation)| {
            let woken = !operation.ended && std::mem::take(&mut operation.woken);
            woken.then_some((*key, operation.target, operation.watch))
        })
        .collect();
    for (key, target, watch) in woken {
        match target {
            Target::Listener(queue) => accept(world, worker, queue, key, watch),
            Target::Waker => {
                if world.rings[worker].waker_set {
                    let at = world.now + world.random.delay(world.plan.wake_late);
                    world.rings[worker].post(key, Report::Ready(ready::READ), false, at);
                }
            }
            Target::Line(line) => poll(world, worker, key, line, watch),
        }
    }
}

fn poll(world: &mut World, worker: usize, key: Key, line: usize, watch: Watch) {
    let tcp = &mut world.lines[line].tcp;
    let established = tcp.established;
    let always = ready::ERROR | ready::HANG_UP | ready::READ | ready::PEER_ENDED;
    let interest = match watch {
        Watch::Once => always,
        Watch::Changes => always | ready::WRITE,
    };
    let bits = tcp.ends[GATE].mask(established) & interest;
    if bits != 0 {
        let more = watch == Watch::Changes && goes_on(world);
        let at = posted_at(world);
        world.rings[worker].post(key, Report::Ready(bits), more, at);
    }
}

fn accept(world: &mut World, worker: usize, queue: usize, key: Key, watch: Watch) {
    while let Some(line) = world.queues[queue].backlog.front().copied() {
        let at = posted_at(world);
        let error = match world.take_fds(1) {
            Ok(()) if world.fault() => {
                world.fds -= 1;
                Some(
                    world
                        .random
                        .pick(&[libc::ECONNABORTED, libc::EPROTO, libc::ENOBUFS]),
                )
            }
            Ok(()) => None,
            Err(error) => Some(error),
        };
        if let Some(error) = error {
            return world.rings[worker].post(key, Report::AcceptFailed(error), false, at);
        }
        world.queues[queue].backlog.pop_front();
        let more = watch == Watch::Changes && goes_on(world);
        world.rings[worker].post(key, Report::Accepted(line), more, at);
        if !more {
            return;
        }
    }
}

/// Answers an admission, sooner or later.
pub fn admit(world: &mut World, worker: usize, key: Key, line: usize, code: i32) {
    let at = posted_at(world);
    let ring = &mut world.rings[worker];
    ring.arm(key, Target::Line(line), Watch::Once);
    ring.post(key, Report::Admitted(code), false, at);
}

/// Ends an operation.
pub fn cancel(world: &mut World, worker: usize, key: Key) {
    let found = world.rings[worker].in_flight.get(&key);
    if found.is_some_and(|operation| !operation.ended) {
        let at = posted_at(world);
        let report = match key.kind {
            Kind::Accept => Report::AcceptFailed(libc::ECANCELED),
            _ => Report::PollEnded,
        };
        world.rings[worker].post(key, report, false, at);
    }
}

fn goes_on(world: &mut World) -> bool {
    let one_in = world.plan.ends_one_in;
    one_in == 0 || !world.random.one_in(one_in)
}

fn posted_at(world: &mut World) -> Duration {
    world.now + world.random.delay(world.plan.late)
}
