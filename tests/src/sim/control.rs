//! What the control plane does to gate, and the other gate of a takeover.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gate::config::Config;
use gate::ledger::{Layer, LimitKey};
use gate::sessions::{Answer, Inquiry};
use gate::state::{Phase, State};
use gate_common::limit::Setting;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use super::client;
use super::evictions;
use super::limits::{self, Key};
use super::plan::{self, Plan};
use super::world::{Happening, Role, World};

/// What it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Control {
    /// No new sessions from now on.
    Drain,
    /// Everything ends.
    Stop,
    /// Another gate has taken over.
    Leave,
    /// Other limits are put in force by the configuration.
    Reload,
    /// `gatectl` sets or unsets a limit, which wakes nobody.
    Set,
    /// `gatectl` lists the sessions.
    List,
}

/// What it did so far.
#[derive(Debug)]
pub struct Done {
    /// The configuration in force.
    pub config: Config,
    /// Whether there ever was a limit on pending connections.
    pub may_evict: bool,
    /// Another gate has the listening sockets, too.
    pub left: bool,
    /// No new sessions.
    pub drains: bool,
    /// Limits that `gatectl` set.
    pub runtime: BTreeMap<Key, Setting>,
    /// Sessions that were admitted before their limit fell.
    pub over: BTreeMap<Key, u64>,
    /// Slots may have come free, or limits have changed.
    pub slots_changed: bool,
    /// When `gatectl` last set a limit.
    pub set_at: Option<Duration>,
    /// The worker that gave slots back last.
    pub released_by: Option<usize>,
    /// How often it did something.
    pub acts: u64,
    listings: Vec<UnboundedReceiver<Answer>>,
}

impl Done {
    /// Nothing yet.
    pub fn new(plan: &Plan) -> Self {
        Self {
            config: plan.config.clone(),
            may_evict: plan.config.limits.max_pending != Setting::Unlimited,
            left: false,
            drains: false,
            runtime: BTreeMap::new(),
            over: BTreeMap::new(),
            slots_changed: true,
            set_at: None,
            released_by: None,
            acts: 0,
            listings: Vec::new(),
        }
    }
}

/// The control plane does something.
pub fn act(world: &mut World, what: Control) {
    world.note(|| format!("{what:?}"));
    let Some(state) = world.state.clone() else {
        return;
    };
    world.control.acts += 1;
    if !state.waiting.is_empty() {
        match what {
            Control::Reload => world.saw("clients wait at a reload"),
            Control::Set => world.saw("clients wait when gatectl sets a limit"),
            Control::Leave => world.saw("clients wait at a takeover"),
            _ => {}
        }
    }
    world.control.slots_changed = true;
    match what {
        Control::Drain => {
            world.control.drains = true;
            state.advance(Phase::Draining);
        }
        Control::Stop => {
            world.control.drains = true;
            world.stopped.get_or_insert(world.now);
            state.advance(Phase::Stopping);
        }
        Control::Leave => {
            world.control.left = true;
            state.leave();
        }
        Control::Reload => {
            let mut config = world.control.config.clone();
            plan::limits(&mut config, world.plan.crowded, &mut world.random);
            state.ledger.apply_config(&config).expect("no new names");
            world.control.may_evict |= config.limits.max_pending != Setting::Unlimited;
            world.control.config = config.clone();
            limits::limits_fell(world, &state);
            evictions::limit_changed(world);
            state.set_config(Arc::new(config));
        }
        Control::Set => set(world, &state),
        Control::List => {
            let (answers, heard) = unbounded_channel();
            for inbox in &state.inboxes {
                inbox.put(Inquiry {
                    filter: Arc::default(),
                    answers: answers.clone(),
                });
            }
            world.control.listings.push(heard);
            state.wake_workers();
        }
    }
    world.take_wakes();
}

fn set(world: &mut World, state: &State) {
    let bytes = |name: &str| name.as_bytes().to_vec();
    let (key, limit) = match world.random.below(4) {
        0 => (('t', ""), LimitKey::MaxConnections),
        1 => (('u', "u0"), LimitKey::User(bytes("u0"))),
        2 => (('d', "d0"), LimitKey::Database(bytes("d0"))),
        _ => (('b', "default"), LimitKey::Backend(bytes("default"))),
    };
    let few = Setting::AtMost(world.random.up_to(4) as u64);
    let setting = world
        .random
        .pick(&[few, few, Setting::Unlimited, Setting::Inherit]);
    world.note(|| format!("{limit:?} {setting:?}"));
    state
        .ledger
        .set_limit(&limit, Layer::Runtime, setting)
        .expect("no new name");
    let key = (key.0, key.1.to_owned());
    world.control.runtime.insert(key, setting);
    world.control.set_at = Some(world.now);
    limits::limits_fell(world, state);
}

/// The queue that a client comes to; `None` if the other gate serves it.
pub fn queue(world: &mut World) -> Option<usize> {
    let queues = world.queues.len();
    let first = world.plan.lopsided && world.random.one_in(2);
    let queue = if first { 0 } else { world.random.below(queues) };
    if !world.control.left {
        return Some(queue);
    }
    // Both gates accept from it; who was woken takes one.
    if !world.queues[queue].open || world.random.one_in(2) {
        return None;
    }
    if world.random.one_in(2) {
        let delay = world.random.delay(Duration::from_millis(20));
        world.after(delay, Happening::Accepted(queue));
    }
    Some(queue)
}

/// The other gate accepts what is there.
pub fn accepted_elsewhere(world: &mut World, queue: usize) {
    while let Some(line) = world.queues[queue].backlog.pop_front() {
        if let Role::Client(number) = world.lines[line].role {
            client::served_elsewhere(world, number);
        }
    }
}

/// A worker closed its end of a listening socket.
pub fn listener_closed(world: &mut World, queue: usize) {
    let Some(worker) = world.queues.get(queue).map(|queue| queue.worker) else {
        return;
    };
    world.queues[queue].open = false;
    world.rings[worker].check_listener(queue);
    if world.rings[worker].gone || world.stopped.is_some() {
        return;
    }
    assert!(world.control.left, "queue {queue} is closed");
    // Accepts wait exclusively: who was woken may have been this gate.
    let scarce = world.plan.fds_max < 1000;
    assert!(
        scarce || world.queues[queue].backlog.is_empty(),
        "queue {queue}: clients are left to nobody"
    );
    accepted_elsewhere(world, queue);
}

/// Everybody who was asked for the sessions has answered.
pub fn check_listings(world: &mut World) {
    let workers = world.plan.workers;
    for listing in &mut world.control.listings {
        let answers = std::iter::from_fn(|| listing.try_recv().ok());
        let mut done = vec![0; workers];
        for answer in answers {
            if let Answer::Done(worker) = answer {
                done[worker] += 1;
            }
        }
        assert_eq!(done, vec![1; workers], "a listing is not answered");
    }
}
