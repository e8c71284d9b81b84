//! Simulated clients.

use std::time::Duration;

use super::control;
use super::evictions::Silence;
use super::oracle;
use super::plan::{DATABASES, Plan};
use super::random::Random;
use super::tcp::PEER;
use super::turns::Turn;
use super::world::{Happening, Role, World};

const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];
const GSSENC_REQUEST: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x30];

/// What a client is up to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Logs in, says what it has to say, reads until the end.
    Orderly,
    /// Ends its side as soon as all is said.
    HalfCloser,
    /// Resets its connection at some time.
    Resetter,
    /// Reads nothing for long.
    NeverReader,
    /// Closes at some time without reading what is there.
    Leaver,
    /// Is gone at some time, without a word.
    Vanisher,
    /// Sends something that is no startup.
    Garbage,
    /// Never sends its whole startup.
    Slow,
    /// Sends a CancelRequest.
    Canceller,
}

const KINDS: [Kind; 14] = [
    Kind::Orderly,
    Kind::Orderly,
    Kind::Orderly,
    Kind::Orderly,
    Kind::HalfCloser,
    Kind::HalfCloser,
    Kind::Resetter,
    Kind::Resetter,
    Kind::NeverReader,
    Kind::Leaver,
    Kind::Vanisher,
    Kind::Garbage,
    Kind::Slow,
    Kind::Canceller,
];

/// See the module.
#[derive(Debug)]
pub struct Client {
    /// What it is up to.
    pub kind: Kind,
    /// Its number.
    pub number: usize,
    /// Its connection.
    pub line: Option<usize>,
    /// Its user's name.
    pub user: String,
    /// Its database's name.
    pub database: String,
    /// Its first packets: each but the last is answered with one byte.
    packets: Vec<Vec<u8>>,
    /// Where the startup packet begins in what it sends.
    pub startup_at: usize,
    /// All that it will send.
    pub total: usize,
    /// What it got that was not the backend's, answers aside.
    pub refusal: Vec<u8>,
    /// What it got can be the backend's stream.
    pub is_stream: bool,
    /// What it got can be a refusal of gate's.
    pub is_refusal: bool,
    /// Bytes that it got.
    pub got: usize,
    /// It saw FIN.
    pub saw_end: bool,
    /// It saw its connection break.
    pub saw_reset: bool,
    /// It broke its connection, or vanished.
    pub broke: bool,
    /// When it connected.
    pub came: Duration,
    /// When its whole startup was sent.
    pub asked: Option<Duration>,
    /// The backend's end of its session.
    pub backend: Option<usize>,
    /// How it stands with its slots.
    pub turn: Turn,
    /// How it stands with the eviction.
    pub silence: Silence,
    acts: usize,
    done: bool,
}

impl Client {
    /// A client that has not come yet.
    pub fn new(number: usize, plan: &Plan, random: &mut Random) -> Self {
        let kind = random.pick(&KINDS);
        let user = format!("u{}", random.below(plan.users));
        let database = format!("d{}", random.below(DATABASES));
        let mut packets = Vec::new();
        if random.one_in(3) {
            packets.push(SSL_REQUEST.to_vec());
        }
        if random.one_in(6) {
            packets.push(GSSENC_REQUEST.to_vec());
        }
        let startup_at = packets.iter().map(Vec::len).sum();
        packets.push(match kind {
            Kind::Garbage => (0..random.up_to(40))
                .map(|_| random.below(256) as u8)
                .collect(),
            // Its key is found when it comes.
            Kind::Canceller => vec![0; 16],
            _ => startup(number, &user, &database),
        });
        let head: usize = packets.iter().map(Vec::len).sum();
        let total = match kind {
            Kind::Garbage => head + random.below(200),
            Kind::Canceller => head,
            Kind::Slow => head - 1 - random.below(packets[packets.len() - 1].len() - 1),
            _ => head + random.below(plan.stream_max),
        };
        Self {
            kind,
            number,
            line: None,
            user,
            database,
            packets,
            startup_at,
            total,
            refusal: Vec::new(),
            is_stream: true,
            is_refusal: true,
            got: 0,
            saw_end: false,
            saw_reset: false,
            broke: false,
            came: Duration::ZERO,
            asked: None,
            backend: None,
            turn: Turn::default(),
            silence: Silence::default(),
            acts: 30 + random.below(60),
            done: false,
        }
    }

    /// Whether it asks for a session as it should.
    pub fn asks(&self) -> bool {
        !matches!(self.kind, Kind::Garbage | Kind::Slow | Kind::Canceller)
    }

    /// Bytes in front of the backend's stream: one for each request that was answered.
    pub fn answers(&self) -> usize {
        self.packets.len() - 1
    }

    /// The bytes of its first packets.
    pub fn head(&self) -> usize {
        self.packets.iter().map(Vec::len).sum()
    }

    /// What it sends at that place.
    pub fn byte(&self, at: usize) -> u8 {
        let mut rest = at;
        for packet in &self.packets {
            if let Some(byte) = packet.get(rest) {
                return *byte;
            }
            rest -= packet.len();
        }
        pattern(self.number, rest)
    }

    /// Up to where it may send now: it waits for each answer.
    fn may_send(&self) -> usize {
        if self.got < self.answers() {
            let asked = &self.packets[..=self.got];
            let bytes: usize = asked.iter().map(Vec::len).sum();
            bytes.min(self.total)
        } else {
            self.total
        }
    }
}

fn startup(number: usize, user: &str, database: &str) -> Vec<u8> {
    let body = format!("user\0{user}\0database\0{database}\0application_name\0{number}\0\0");
    let mut packet = (body.len() as u32 + 8).to_be_bytes().to_vec();
    packet.extend_from_slice(&0x0003_0000_u32.to_be_bytes());
    packet.extend_from_slice(body.as_bytes());
    packet
}

/// A byte of an endless stream of which a byte too much or too few is noticed.
pub fn pattern(stream: usize, at: usize) -> u8 {
    (at.wrapping_mul(131) ^ (at >> 8).wrapping_mul(17) ^ stream.wrapping_mul(59)) as u8
}

/// Connects.
pub fn arrive(world: &mut World, number: usize) {
    let Some(queue) = control::queue(world) else {
        return;
    };
    let line = world.connect(Role::Client(number), world.queues[queue].worker, true);
    let key = world
        .backends
        .get(world.random.below(world.backends.len()))
        .map_or([0; 8], |backend| backend.key());
    let client = &mut world.clients[number];
    if client.kind == Kind::Canceller {
        let mut packet = vec![0, 0, 0, 16, 0x04, 0xd2, 0x16, 0x2e];
        packet.extend_from_slice(&key);
        if let Some(last) = client.packets.last_mut() {
            *last = packet;
        }
    }
    client.line = Some(line);
    client.came = world.now;
    world.queues[queue].backlog.push_back(line);
    let worker = world.queues[queue].worker;
    world.rings[worker].wake_listener(queue);
    again(world, number, Duration::from_millis(3));
}

/// The other gate of a takeover has it: it is not looked at any more.
pub fn served_elsewhere(world: &mut World, number: usize) {
    world.clients[number].done = true;
}

fn again(world: &mut World, number: usize, within: Duration) {
    let delay = world.random.delay(within);
    world.after(delay, Happening::Client(number));
}

/// Does a little of what it is up to.
pub fn act(world: &mut World, number: usize) {
    let Some(line) = world.clients[number].line else {
        return;
    };
    if world.clients[number].done {
        return;
    }
    if leaves(world, number, line) {
        return;
    }
    write(world, number, line);
    let kind = world.clients[number].kind;
    let reads = kind != Kind::NeverReader || world.random.one_in(12);
    if reads && !world.clients[number].saw_reset {
        read(world, number, line);
    }
    world.settle(line);
    let client = &world.clients[number];
    if client.saw_reset || client.saw_end && world.random.one_in(2) {
        return finish(world, number, line, false);
    }
    let pause = match world.random.below(20) {
        0 => Duration::from_secs(3),
        1 => Duration::from_millis(400),
        _ => Duration::from_millis(15),
    };
    again(world, number, pause);
}

/// Whether it goes away now.
fn leaves(world: &mut World, number: usize, line: usize) -> bool {
    let client = &mut world.clients[number];
    client.acts -= 1;
    if client.acts == 0 {
        let reset = world.random.one_in(3);
        finish(world, number, line, reset);
        return true;
    }
    if !world.random.one_in(15) {
        return false;
    }
    match client.kind {
        Kind::Resetter => finish(world, number, line, true),
        Kind::Leaver => finish(world, number, line, false),
        Kind::Vanisher => {
            client.broke = true;
            client.done = true;
            world.vanish(line);
        }
        _ => return false,
    }
    true
}

fn finish(world: &mut World, number: usize, line: usize, reset: bool) {
    let end = &world.lines[line].tcp.ends[PEER];
    let client = &mut world.clients[number];
    client.done = true;
    // What it has not read resets the connection, too, and so does what comes later.
    client.broke |= reset || !end.rx.is_empty() || !client.saw_end;
    world.note(|| format!("client {number} closes, reset {reset}"));
    world.close(line, PEER, reset);
}

fn write(world: &mut World, number: usize, line: usize) {
    let client = &world.clients[number];
    let end = &mut world.lines[line].tcp.ends[PEER];
    let sent = end.written_total;
    let until = client.may_send();
    if sent < until && end.fin_sent.is_none() {
        let most = if world.random.one_in(3) {
            20
        } else {
            client.total
        };
        let count = world.random.up_to(most).min(until - sent);
        let bytes: Vec<u8> = (sent..sent + count).map(|at| client.byte(at)).collect();
        match end.send(&bytes, bytes.len()) {
            Ok(_) | Err(libc::EAGAIN) => {}
            Err(_) => return broken(world, number),
        }
    }
    let all = end.written_total == client.total;
    if end.written_total >= client.head() && client.asked.is_none() {
        world.clients[number].asked = Some(world.now);
    }
    let kind = world.clients[number].kind;
    let ends = match kind {
        Kind::HalfCloser => all,
        Kind::Slow | Kind::Vanisher => false,
        _ => all && world.random.one_in(8),
    };
    if ends {
        world.lines[line].tcp.ends[PEER].end(world.now);
    }
}

fn read(world: &mut World, number: usize, line: usize) {
    let count = world.random.up_to(world.plan.buffer_max);
    let mut buffer = vec![0; count];
    let end = &mut world.lines[line].tcp.ends[PEER];
    match end.receive(&mut buffer) {
        Ok(0) => {
            if !std::mem::replace(&mut world.clients[number].saw_end, true) {
                oracle::client_saw_end(world, number);
            }
        }
        Ok(count) => oracle::client_got(world, number, &buffer[..count]),
        Err(libc::EAGAIN) => {}
        Err(_) => broken(world, number),
    }
}

fn broken(world: &mut World, number: usize) {
    world.clients[number].saw_reset = true;
    oracle::client_saw_reset(world, number);
}
