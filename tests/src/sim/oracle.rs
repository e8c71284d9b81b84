//! What must be true of gate, whatever the world does to it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use gate::session::event::{LINGER, OVER_STARTUP};
use gate::session::outcome::{CancelOutcome, CloseReason, Reason, StartupFailure};
use gate::stats::Stats;
use gate::worker::Holdings;

use super::machine::PIPE_BYTES_MAX;
use super::operations::Operations;
use super::tcp::{End, GATE, PEER};
use super::world::{Line, Role, World};
use super::{control, limits};

/// What a worker may hold back of one direction: its buffer, or a pipe.
const HELD_MAX: usize = if PIPE_BYTES_MAX > 64 * 1024 {
    PIPE_BYTES_MAX
} else {
    64 * 1024
};

/// At every step.
pub fn at_step(world: &mut World) {
    for number in 0..world.backends.len() {
        let backend = &world.backends[number];
        let Some(client) = backend.client else {
            continue;
        };
        let near = &world.lines[backend.line].tcp.ends[GATE];
        if near.read_total >= backend.login_bytes() && backend.ready.is_none() {
            world.backends[number].ready = Some(world.now);
        }
        holds_little(world, number, client);
    }
    limits::within_limits(world);
    if let Some(told) = world.stopped {
        let latest = told + LINGER + world.plan.late * 4 + Duration::from_millis(200);
        assert!(world.now <= latest, "told to end at {told:?}");
    }
}

/// Backpressure: what gate has read and not passed on has a bound.
fn holds_little(world: &World, number: usize, client: usize) {
    let near = gate_end(world, Role::Backend(number));
    let far = gate_end(world, Role::Client(client));
    // What is dropped is not held.
    if near.closed || far.closed || near.dead || far.dead || far.fin_sent.is_some() {
        return;
    }
    let up = (far.read_total - world.clients[client].startup_at) - near.written_total;
    let down = near.read_total + world.clients[client].answers() - far.written_total;
    assert!(up <= HELD_MAX + 10_004, "client {client}: {up} bytes held");
    assert!(down <= HELD_MAX, "client {client}: {down} bytes held");
}

/// What the worker itself holds has a bound.
pub fn after_round(world: &World, holdings: &Holdings) {
    let pipes = world.pipes;
    assert!(holdings.pipes <= pipes, "{holdings:?} of {pipes} pipes");
    assert!(holdings.pending <= holdings.connections, "{holdings:?}");
    assert!(
        holdings.held_bytes <= holdings.connections * (2 * HELD_MAX + 10_004),
        "{holdings:?}"
    );
}

/// Nobody is there any more: everything is given back, and each session had one outcome.
pub fn at_rest(world: &mut World) {
    assert!(!world.control.left, "a worker that leaves does not end");
    control::check_listings(world);
    let near = |line: &&Line| line.tcp.ends[GATE].read_total > 0 && !line.tcp.ends[GATE].closed;
    let open: Vec<Role> = world
        .lines
        .iter()
        .filter(near)
        .map(|line| line.role)
        .collect();
    assert_eq!(open, [], "connections are left");
    let on_lines: usize = world.rings.iter().map(Operations::on_lines).sum();
    assert_eq!(on_lines, 0, "operations are left");
    assert_eq!(world.spares, world.plan.workers, "no descriptor to spare");
    assert_eq!(
        world.fds,
        world.spares + 2 * world.pipes,
        "descriptors are left"
    );
    settled(world);
}

/// The workers have ended and are gone.
pub fn at_end(world: &World) {
    // What was accepted but not told dies with the ring.
    let untold: usize = world.rings.iter().map(Operations::untold_accepts).sum();
    assert_eq!(world.fds, untold, "descriptors are left");
    assert_eq!(world.pipes, 0, "pipes are left");
    settled(world);
}

fn settled(world: &World) {
    let Some(state) = &world.state else {
        return;
    };
    for stats in &state.stats {
        assert_eq!(stats.connections(), 0, "connections are left");
    }
    assert!(state.waiting.is_empty(), "clients are left in the queue");
    assert_eq!(state.ledger.admitted(), 0, "slots are left");
    assert_eq!(state.ledger.pending(), 0, "pending connections are left");
    assert_eq!(state.ledger.sockets(0), 0, "sockets are left");
    assert_eq!(
        state.session_fds.load(Ordering::Relaxed),
        0,
        "descriptors of the budget are left"
    );
    assert_eq!(
        state.evicting.load(Ordering::Relaxed),
        0,
        "evictions are left"
    );
    let sum = |count: &dyn Fn(&Stats) -> u64| -> u64 {
        state.stats.iter().map(|stats| count(stats)).sum()
    };
    let rejected = sum(&|stats| {
        let all = Reason::ALL.iter();
        all.map(|reason| stats.rejected_count(0, *reason)).sum()
    });
    let failed = sum(&|stats| {
        let all = StartupFailure::ALL.iter();
        all.map(|failure| stats.startup_failed_count(*failure))
            .sum()
    });
    let cancels = sum(&|stats| {
        let all = CancelOutcome::ALL.iter();
        all.map(|outcome| stats.cancelled_count(*outcome)).sum()
    });
    let closed = sum(&|stats| {
        let all = CloseReason::ALL.iter();
        all.map(|reason| stats.closed_count(*reason)).sum()
    });
    let told = rejected + failed + cancels + closed;
    // At the end a connection is turned away without an outcome.
    let accepted = sum(&Stats::accepted_count);
    // Each slot, each place in a line and each eviction wakes every worker at most,
    // and so does the beginning.
    let wakes: u64 = world.rings.iter().map(|ring| ring.wakes).sum();
    let causes = 1 + world.control.acts + 3 * accepted;
    assert!(
        wakes <= causes * world.rings.len() as u64,
        "{wakes} wake-ups of {} workers for {causes} causes",
        world.rings.len()
    );
    if world.stopped.is_some() {
        assert!(
            told <= accepted,
            "{rejected} {failed} {cancels} {closed} of {accepted}"
        );
    } else {
        assert_eq!(told, accepted, "{rejected} {failed} {cancels} {closed}");
    }
}

fn gate_end(world: &World, role: Role) -> &End {
    let line = match role {
        Role::Client(number) => world.clients[number].line,
        Role::Backend(number) => Some(world.backends[number].line),
    };
    &world.lines[line.expect("it is connected")].tcp.ends[GATE]
}

/// Whether gate may end this client's session on its own account.
pub fn is_excused(world: &World, client: usize) -> bool {
    let timeouts = &world.plan.config.timeouts;
    let login_late = world.clients[client].backend.is_some_and(|number| {
        let backend = &world.backends[number];
        let ready = backend.ready.unwrap_or(world.now);
        ready.saturating_sub(backend.dialled) + Duration::from_millis(50) >= timeouts.auth
    });
    let quiet_ends = !timeouts.idle.is_zero() || !timeouts.half_close.is_zero();
    world.stopped.is_some() || quiet_ends || login_late
}

/// A client read something.
pub fn client_got(world: &mut World, number: usize, bytes: &[u8]) {
    let client = &mut world.clients[number];
    let backend = client.backend.map(|backend| &world.backends[backend]);
    let sent = backend.map_or(0, |backend| {
        world.lines[backend.line].tcp.ends[PEER].written_total
    });
    for byte in bytes {
        let at = client.got;
        client.got += 1;
        let Some(at) = at.checked_sub(client.answers()) else {
            assert_eq!(*byte, b'N', "client {number}: an answer");
            continue;
        };
        client.is_stream &= at < sent && backend.is_some_and(|backend| backend.byte(at) == *byte);
        if client.is_refusal {
            client.refusal.push(*byte);
            client.is_refusal = begins_as_refusal(&client.refusal);
        }
        assert!(
            client.is_stream || client.is_refusal,
            "client {number}: byte {at} is nobody's, of {sent}"
        );
    }
}

fn begins_as_refusal(bytes: &[u8]) -> bool {
    let (head, rest) = bytes.split_at(bytes.len().min(5));
    let fields = b"SFATAL\0VFATAL\0C";
    let count = rest.len().min(fields.len());
    b"E\0\0\0".starts_with(&head[..head.len().min(4)])
        && rest[..count] == fields[..count]
        && bytes.len() <= 256
}

fn is_whole_refusal(bytes: &[u8]) -> bool {
    bytes.len() > 20 && bytes.len() == 1 + usize::from(bytes[4]) && bytes.ends_with(&[0, 0])
}

/// A client saw FIN: it got all that was for it before.
pub fn client_saw_end(world: &World, number: usize) {
    let client = &world.clients[number];
    if client.broke || is_excused(world, number) {
        return;
    }
    let got = client.got.saturating_sub(client.answers());
    if got > 0 && !client.is_stream {
        return assert!(
            is_whole_refusal(&client.refusal),
            "client {number}: half a refusal"
        );
    }
    match client.backend {
        Some(backend) if got > 0 => {
            let near = gate_end(world, Role::Backend(backend));
            assert!(near.fin_received, "client {number}: FIN in place of RST");
            let line = world.backends[backend].line;
            let sent = world.lines[line].tcp.ends[PEER].written_total;
            assert_eq!(got, sent, "client {number}: FIN before the last bytes");
        }
        Some(_) => panic!("client {number}: its session ends without a word"),
        None => assert!(ends_silently(world, number), "client {number}: not a word"),
    }
}

/// A client saw its connection break.
pub fn client_saw_reset(world: &World, number: usize) {
    let client = &world.clients[number];
    let near = gate_end(world, Role::Client(number));
    let backend_broke = client
        .backend
        .is_some_and(|backend| world.backends[backend].broke);
    // It was told why it is not served, and went on speaking where its protocol
    // has it wait: PostgreSQL closes as well.
    let line = client.line.expect("it is connected");
    let spoken = world.lines[line].tcp.ends[PEER].written_total;
    let spoke_on = near.closed && near.written_total > client.answers() && spoken > near.read_total;
    let scarce = world.plan.fds_max < 1000 || world.plan.session_fds_max < 1000;
    let allowed = client.broke
        || client.saw_end
        || backend_broke
        // That it may not overtake the FIN is checked at the close.
        || near.fin_sent.is_some()
        || spoke_on && client.backend.is_none()
        || scarce
        || is_excused(world, number)
        || client.backend.is_none() && ends_silently(world, number);
    assert!(allowed, "client {number}: RST in place of FIN");
}

/// Whether gate may end this client's connection without a word, before it has a session.
fn ends_silently(world: &World, number: usize) -> bool {
    let client = &world.clients[number];
    let startup = world.plan.config.timeouts.startup.min(OVER_STARTUP);
    let line = client.line.expect("it is connected");
    let left = world.lines[line].tcp.ends[PEER].fin_sent.is_some();
    let late = world.now + Duration::from_millis(50) >= client.came + startup;
    let evicted = world.control.may_evict;
    !client.asks() || left || late || evicted || client.asked.is_none()
}

/// gate closed a client's connection: its backend's must be closed before.
pub fn client_closed(world: &World, line: usize) {
    let Role::Client(number) = world.lines[line].role else {
        return;
    };
    if let Some(backend) = world.clients[number].backend {
        let near = gate_end(world, Role::Backend(backend));
        assert!(
            near.closed,
            "client {number}: its slot is given back before its backend"
        );
    }
}

/// gate sends FIN: everything that it read before is sent.
pub fn gate_ends(world: &World, line: usize) {
    let role = world.lines[line].role;
    let client = match role {
        Role::Client(number) => Some(number),
        Role::Backend(number) => world.backends[number].client,
    };
    let Some((number, backend)) = client.and_then(|c| Some((c, world.clients[c].backend?))) else {
        return;
    };
    let client = &world.clients[number];
    let near = gate_end(world, Role::Backend(backend));
    let far = gate_end(world, Role::Client(number));
    if client.broke || near.dead || far.dead || is_excused(world, number) {
        return;
    }
    if role == Role::Client(number) {
        let passed = far.written_total - client.answers();
        assert!(
            near.read_total == 0 || passed == near.read_total,
            "client {number}: FIN after {passed} bytes of {}",
            near.read_total
        );
    } else {
        let read = far.read_total - client.startup_at;
        assert_eq!(
            near.written_total, read,
            "backend {backend}: FIN before the last bytes"
        );
    }
}

/// A backend read something of a client's stream, from its startup packet on.
pub fn backend_got(world: &World, number: usize, before: usize, bytes: &[u8]) {
    let Some(client) = world.backends[number].client else {
        return;
    };
    let client = &world.clients[client];
    let line = client.line.expect("it is connected");
    let sent = world.lines[line].tcp.ends[PEER].written_total;
    for (at, byte) in (before + client.startup_at..).zip(bytes) {
        assert!(at < sent, "backend {number}: byte {at} was never sent");
        assert_eq!(
            *byte,
            client.byte(at),
            "backend {number}: byte {at} of {sent}"
        );
    }
}

/// A backend saw FIN: it got all that was for it before.
pub fn backend_saw_end(world: &World, number: usize) {
    let backend = &world.backends[number];
    let end = &world.lines[backend.line].tcp.ends[PEER];
    let Some(client) = backend.client else {
        return;
    };
    if world.clients[client].broke || end.fin_sent.is_some() || is_excused(world, client) {
        return;
    }
    let client = &world.clients[client];
    let line = client.line.expect("it is connected");
    let sender = &world.lines[line].tcp.ends[PEER];
    assert!(
        sender.fin_sent.is_some(),
        "backend {number}: FIN that nobody sent"
    );
    assert_eq!(
        end.read_total + client.startup_at,
        sender.written_total,
        "backend {number}: FIN before the last bytes"
    );
}
