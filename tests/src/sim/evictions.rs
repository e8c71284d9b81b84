//! Evictions: how many, for whom, and whom they spare.

use std::sync::atomic::Ordering;
use std::time::Duration;

use gate::session::event::OVER_STARTUP;
use gate::session::outcome::Reason;
use gate::state::State;

use super::client::Client;
use super::tcp::{GATE, PEER};
use super::world::{Role, World};

/// How a client stands with the eviction.
#[derive(Debug, Default)]
pub struct Silence {
    /// The round in which it was accepted.
    accepted: Option<u64>,
    /// Its worker ends it, though it has not said what it wants.
    given_up: bool,
}

/// What is known of evictions.
#[derive(Debug)]
pub struct Evictions {
    /// What each worker wants of the others, at most.
    most: Vec<u64>,
    /// What each wanted so far, at most.
    asked: Vec<u64>,
    /// What all want of each other, at most.
    most_in_all: u64,
    /// What each worker wants of the others, at least.
    least: Vec<u64>,
    /// Too many are pending since then, and nobody was accepted.
    over_since: Option<Duration>,
    /// Before the round: pending and not evicted, evicted and accepted by this
    /// worker so far.
    before: [u64; 3],
    /// Evicted connections that were not closed when last looked at.
    evicting: u64,
}

impl Evictions {
    /// None so far.
    pub fn new(workers: usize) -> Self {
        Self {
            most: vec![0; workers],
            asked: vec![0; workers],
            most_in_all: 0,
            least: vec![0; workers],
            over_since: None,
            before: [0; 3],
            evicting: 0,
        }
    }
}

/// Fewer may be pending than before: what had come to nothing may be wanted again.
pub fn limit_changed(world: &mut World) {
    let all = &mut world.evictions;
    all.most.clone_from(&all.asked);
    all.most_in_all = all.asked.iter().sum();
}

/// A worker got this connection.
pub fn accepted(world: &mut World, line: usize) {
    let round = world.round;
    if let Role::Client(number) = world.lines[line].role {
        world.clients[number].silence.accepted = Some(round);
    }
}

/// A worker begins to end this connection: whoever has said what it wants is
/// served.
pub fn given_up(world: &mut World, line: usize) {
    let Role::Client(number) = world.lines[line].role else {
        return;
    };
    let client = &world.clients[number];
    if !is_pending(world, client) {
        return;
    }
    let near = &world.lines[line].tcp.ends[GATE];
    let startup = world.plan.config.timeouts.startup.min(OVER_STARTUP);
    let excused = near.dead
        || near.fin_received
        || world.stopped.is_some()
        || world.plan.fds_max < 1000
        || world.plan.session_fds_max < 1000
        || world.now >= client.came + startup;
    assert!(
        excused || !client.asks() || near.read_total + near.rx.len() < client.head(),
        "client {number} is turned away, and what it wants was not read"
    );
    world.clients[number].silence.given_up = true;
    if let Some(state) = world.state.as_ref().filter(|_| world.control.may_evict) {
        let evicting = state.evicting.load(Ordering::Relaxed);
        let stay = state.ledger.pending().saturating_sub(evicting);
        assert!(
            evicting <= world.evictions.evicting || stay >= state.ledger.max_pending().tokens(),
            "client {number} is evicted, and {stay} stay"
        );
        world.evictions.evicting = evicting;
    }
}

/// Whether it was accepted and has not said what it wants.
fn is_pending(world: &World, client: &Client) -> bool {
    let Some(line) = client.line.filter(|_| client.silence.accepted.is_some()) else {
        return false;
    };
    let near = &world.lines[line].tcp.ends[GATE];
    !client.silence.given_up
        && !near.closed
        && near.fin_sent.is_none()
        && near.read_total < client.head()
        && near.written_total <= client.answers()
}

fn counts(state: &State, worker: usize) -> [u64; 3] {
    let stats = &state.stats[worker];
    let evicting = state.evicting.load(Ordering::Relaxed);
    [
        state.ledger.pending().saturating_sub(evicting),
        stats.rejected_count(0, Reason::MaxPending),
        stats.accepted_count(),
    ]
}

/// A worker's turn begins.
pub fn before_round(world: &mut World, worker: usize) {
    if let Some(state) = world.state.as_ref().filter(|_| world.control.may_evict) {
        world.evictions.before = counts(state, worker);
        world.evictions.evicting = state.evicting.load(Ordering::Relaxed);
    }
}

/// It has done what there was to do.
pub fn after_round(world: &mut World, worker: usize) {
    let Some(state) = world.state.clone().filter(|_| world.control.may_evict) else {
        return;
    };
    let max = state.ledger.max_pending().tokens();
    let [stayed, evicted_before, accepted_before] = world.evictions.before;
    let [stays, evicted, accepted] = counts(&state, worker);
    let (evicted, accepted) = (evicted - evicted_before, accepted - accepted_before);
    let over = stays.saturating_sub(max);
    let newcomers = newcomers(world, worker);
    let all = &world.evictions;
    assert!(
        evicted == 0 || evicted + max <= stayed + accepted,
        "worker {worker} evicts {evicted}, of {stayed} and {accepted} new ones there may be {max}"
    );
    let for_others = evicted.saturating_sub(accepted);
    let others: u64 = (0..all.most.len())
        .filter(|other| *other != worker)
        .map(|other| all.most[other])
        .sum();
    let wanted = others.min(all.most_in_all);
    assert!(
        for_others <= wanted,
        "worker {worker} evicts {evicted} for {accepted} new ones and {wanted} that others want"
    );
    if for_others > 0 {
        world.saw("an eviction for another worker");
    }
    let all = &mut world.evictions;
    all.most_in_all -= for_others;
    if over == 0 || all.most_in_all == 0 {
        all.most.fill(0);
        all.most_in_all = 0;
    }
    if evicted > 0 || over == 0 {
        all.least.fill(0);
    }
    if over == 0 || accepted > 0 || evicted > 0 {
        all.over_since = None;
    }
    if over > 0 {
        // Also for one that left in this very round.
        all.asked[worker] += accepted;
        all.most[worker] += accepted;
        all.most_in_all += accepted;
        all.least[worker] += newcomers.saturating_sub(evicted);
        all.over_since.get_or_insert(world.now);
    }
}

/// Clients that this worker got in this round and has not heard.
fn newcomers(world: &World, worker: usize) -> u64 {
    let new = world.clients.iter().filter(|client| {
        client.silence.accepted == Some(world.round)
            && client
                .line
                .is_some_and(|line| world.lines[line].worker == worker)
            && is_pending(world, client)
    });
    new.count() as u64
}

/// What a worker wants is done soon, if another one has a victim.
pub fn look(world: &World) {
    let all = &world.evictions;
    let Some(since) = all.over_since else { return };
    if world.now <= since + world.plan.reaction() {
        return;
    }
    let victims = |worker: usize| {
        world.clients.iter().any(|client| {
            client.line.is_some_and(|line| {
                let far = &world.lines[line].tcp.ends[PEER];
                world.lines[line].worker != worker && !far.closed
            }) && is_pending(world, client)
        })
    };
    for (worker, wants) in all.least.iter().enumerate() {
        assert!(
            *wants == 0 || !victims(worker),
            "worker {worker} wants {wants} evictions since {since:?}, and nobody is evicted"
        );
    }
}
