//! Whose turn it is when a slot comes free, over all workers.
//!
//! Seen from outside: what each client has read of its startup and what it was told, and which
//! slots were asked for with what answer. The queue itself is not looked at.

use std::time::Duration;

use gate::waiting::LOOK_AGAIN;
use gate::worker::Key;

use super::client::Client;
use super::limits;
use super::tcp::GATE;
use super::world::{Role, World};

/// How a client stands with its slots.
#[derive(Debug, Default)]
pub struct Turn {
    /// The round in which the worker had read its whole startup.
    heard: Option<u64>,
    /// The round from which on it waits.
    waits_since: Option<u64>,
    /// It has its slots, or had them.
    admitted: bool,
    /// The ledger has answered, and its worker does not know yet.
    asking: Option<Key>,
    /// How often its slots were asked for.
    asks: u32,
    /// Its last answer, as one who waits, took its time: a wake-up in that time
    /// found it asking.
    asked_slowly: bool,
    /// Its turn has come, and there are slots for it, since then.
    free_since: Option<Duration>,
}

/// A client's slots were asked for.
pub fn asked(world: &mut World, line: usize, key: Key, code: i32, in_flight: bool) {
    let Role::Client(number) = world.lines[line].role else {
        return;
    };
    if code == 0 {
        world.control.slots_changed = true;
        first_come_first_served(world, number);
        let worker = world.lines[line].worker;
        let waited = world.clients[number].turn.waits_since.is_some();
        if waited
            && world
                .control
                .released_by
                .is_some_and(|other| other != worker)
        {
            world.saw("a slot of another worker is got after a wait");
        }
    }
    let turn = &mut world.clients[number].turn;
    turn.admitted |= code == 0;
    turn.asks += 1;
    turn.asked_slowly = in_flight && turn.asks > 1;
    turn.asking = in_flight.then_some(key);
}

/// A client's connection is closed, and its slots come free.
pub fn released(world: &mut World, line: usize) {
    if let Role::Client(number) = world.lines[line].role
        && world.clients[number].turn.admitted
    {
        world.control.released_by = Some(world.lines[line].worker);
    }
    world.control.slots_changed = true;
}

/// Its worker knows the answer.
pub fn answered(world: &mut World, worker: usize, key: Key) {
    for number in 0..world.clients.len() {
        let client = &world.clients[number];
        let of_worker = client
            .line
            .is_some_and(|line| world.lines[line].worker == worker);
        if of_worker && client.turn.asking == Some(key) {
            world.clients[number].turn.asking = None;
            world.control.slots_changed = true;
        }
    }
}

/// Nobody of this client's user has waited since before it was heard.
fn first_come_first_served(world: &World, number: usize) {
    let client = &world.clients[number];
    for other in &world.clients {
        let waited = other.turn.waits_since.filter(|_| waits(world, other));
        if other.number != number
            && other.user == client.user
            && let Some(since) = waited
        {
            let heard = client.turn.heard.unwrap_or(world.round);
            assert!(
                since >= heard,
                "client {number}, heard in round {heard}, is let in before client {}, which waits since round {since}",
                other.number
            );
        }
    }
}

/// Whether it was heard and not answered, and is there.
fn waits(world: &World, client: &Client) -> bool {
    let is_there = client.line.is_some_and(|line| {
        let near = &world.lines[line].tcp.ends[GATE];
        !near.dead && !near.fin_received
    });
    is_there && client.turn.asking.is_none() && !client.turn.admitted && is_undecided(world, client)
}

/// Whether it was heard and not answered, as far as its worker can know.
fn is_undecided(world: &World, client: &Client) -> bool {
    let Some(line) = client.line.filter(|_| client.asks()) else {
        return false;
    };
    let near = &world.lines[line].tcp.ends[GATE];
    (!client.turn.admitted || client.turn.asking.is_some())
        && near.read_total >= client.head()
        && near.written_total <= client.answers()
        && near.fin_sent.is_none()
        && !near.closed
}

/// A worker has done what there was to do.
pub fn after_round(world: &mut World, worker: usize) {
    if !world.plan.asks {
        return;
    }
    for number in 0..world.clients.len() {
        let client = &world.clients[number];
        let Some(line) = client.line else { continue };
        if world.lines[line].worker != worker || client.turn.admitted {
            continue;
        }
        let heard = world.lines[line].tcp.ends[GATE].read_total >= client.head();
        // Who asks again keeps its place.
        let waits = match client.turn.asking {
            Some(_) => client.turn.waits_since.is_some(),
            None => waits(world, client),
        };
        let round = world.round;
        let turn = &mut world.clients[number].turn;
        if heard {
            turn.heard.get_or_insert(round);
        }
        if waits != turn.waits_since.is_some() {
            turn.waits_since = waits.then_some(round);
            turn.free_since = None;
            world.control.slots_changed = true;
        }
    }
}

/// Nobody waits while there are slots for it.
pub fn look(world: &mut World) {
    if std::mem::take(&mut world.control.slots_changed) {
        look_for_slots(world);
    }
    for client in &world.clients {
        if let Some(since) = client.turn.free_since.filter(|_| waits(world, client)) {
            let most = patience(world, client, since);
            assert!(
                world.now <= since + most,
                "client {} waits, and since {since:?} there are slots for it",
                client.number
            );
        }
    }
}

/// How long a slot may lie there.
fn patience(world: &World, client: &Client, since: Duration) -> Duration {
    let by_wake = world.plan.reaction();
    // A look finds what no wake-up tells of.
    let is_told = !client.turn.asked_slowly
        && world.control.set_at.is_none_or(|at| at < since)
        && world.plan.names_max >= 64;
    if is_told {
        by_wake
    } else {
        LOOK_AGAIN * 2 + by_wake * 2
    }
}

fn look_for_slots(world: &mut World) {
    let Some(state) = world.state.clone() else {
        return;
    };
    limits::slots_came_free(world, &state);
    let waits: Vec<usize> = (0..world.clients.len())
        .filter(|number| world.clients[*number].turn.waits_since.is_some())
        .collect();
    if waits.is_empty() || world.control.drains {
        for number in waits {
            world.clients[number].turn.free_since = None;
        }
        return;
    }
    let rows = limits::rows(&state);
    for number in waits.iter().copied() {
        let client = &world.clients[number];
        let since = client.turn.waits_since;
        // Of two that came at the same time either may be the first, and so may
        // one whose answer is under way, or who left without its worker knowing.
        let is_first = world.clients.iter().all(|other| {
            let waits = other.turn.waits_since;
            other.number == number
                || other.user != client.user
                || !is_undecided(world, other)
                || waits.is_some_and(|waits| Some(waits) > since)
        });
        let backend = if client.database == "d2" {
            "other"
        } else {
            "default"
        };
        let needs = [
            ('t', String::new()),
            ('u', client.user.clone()),
            ('d', client.database.clone()),
            ('b', backend.to_owned()),
        ];
        let is_free = is_first
            && needs.iter().all(|key| {
                let row = rows.get(key);
                row.is_some_and(|row| row.limit.allows_one_more(row.used))
            });
        let now = world.now;
        let turn = &mut world.clients[number].turn;
        turn.free_since = is_free.then(|| turn.free_since.unwrap_or(now));
    }
}
