//! Simulated PostgreSQL servers, one per connection.

use std::time::Duration;

use super::client::pattern;
use super::oracle;
use super::random::Random;
use super::tcp::PEER;
use super::world::{Happening, Role, World};

/// What a server is up to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Answers, says what it has to say, ends after its client.
    Orderly,
    /// Ends as soon as all is said.
    EndsFirst,
    /// Refuses the login.
    LoginError,
    /// Resets at some time.
    Resetter,
    /// Ends before it says anything.
    Shy,
    /// Says nothing for long.
    Silent,
    /// Reads nothing for long.
    NeverReader,
}

const KINDS: [Kind; 12] = [
    Kind::Orderly,
    Kind::Orderly,
    Kind::Orderly,
    Kind::Orderly,
    Kind::Orderly,
    Kind::EndsFirst,
    Kind::EndsFirst,
    Kind::LoginError,
    Kind::Resetter,
    Kind::Shy,
    Kind::Silent,
    Kind::NeverReader,
];

/// See the module.
#[derive(Debug)]
pub struct Backend {
    kind: Kind,
    number: usize,
    /// Its name in gate's configuration.
    pub name: String,
    /// Its connection.
    pub line: usize,
    /// The first packet so far.
    first: Vec<u8>,
    /// Whose session it is.
    pub client: Option<usize>,
    /// It got a CancelRequest.
    pub cancels: bool,
    /// The login, which stands in front of its stream.
    login: Vec<u8>,
    /// All that it will send.
    total: usize,
    /// It resets its connection.
    pub broke: bool,
    /// It saw FIN.
    pub saw_end: bool,
    /// When it was dialled.
    pub dialled: Duration,
    /// When gate had read its whole login.
    pub ready: Option<Duration>,
    acts: usize,
    done: bool,
}

impl Backend {
    fn new(number: usize, name: &str, line: usize, now: Duration, world: &mut World) -> Self {
        let random = &mut world.random;
        let kind = random.pick(&KINDS);
        let mut backend = Self {
            kind,
            number,
            name: name.to_owned(),
            line,
            first: Vec::new(),
            client: None,
            cancels: false,
            login: Vec::new(),
            total: 0,
            broke: false,
            saw_end: false,
            dialled: now,
            ready: None,
            acts: 30 + random.below(80),
            done: false,
        };
        if kind == Kind::LoginError {
            backend.login = b"E\0\0\0\x19SFATAL\0C28P01\0Msim\0\0".to_vec();
            backend.total = backend.login.len();
        } else {
            backend.login = b"R\0\0\0\x08\0\0\0\0K\0\0\0\x0c".to_vec();
            backend.login.extend_from_slice(&backend.key());
            backend.login.extend_from_slice(b"Z\0\0\0\x05I");
            backend.total = backend.login.len() + random.below(world.plan.stream_max);
        }
        backend
    }

    /// Its cancel key.
    pub fn key(&self) -> [u8; 8] {
        (0x5157_0000_0000_0000 + self.number as u64).to_be_bytes()
    }

    /// What it sends at that place.
    pub fn byte(&self, at: usize) -> u8 {
        match self.login.get(at) {
            Some(byte) => *byte,
            None => pattern(self.number + 1000, at),
        }
    }

    /// The length of its login; without end if it refuses.
    pub fn login_bytes(&self) -> usize {
        match self.kind {
            Kind::LoginError => usize::MAX,
            _ => self.login.len(),
        }
    }

    /// Whether it answers logins with what gate need not wait for.
    fn talks(&self) -> bool {
        !matches!(self.kind, Kind::Shy | Kind::Silent) && self.client.is_some()
    }
}

/// gate dials. Returns the line, or why there is none.
pub fn dial(world: &mut World, worker: usize, name: &str) -> Result<usize, i32> {
    let full = world.plan.full_after;
    if name == "default" && full.is_some_and(|after| world.now >= after) {
        return Err(libc::EAGAIN);
    }
    if world.random.one_in(25) {
        return Err(world.random.pick(&[
            libc::ENETUNREACH,
            libc::EADDRNOTAVAIL,
            libc::ECONNREFUSED,
        ]));
    }
    world.take_fds(1)?;
    let number = world.backends.len();
    let line = world.connect(Role::Backend(number), worker, false);
    let now = world.now;
    let backend = Backend::new(number, name, line, now, world);
    world.backends.push(backend);
    let delay = world.random.delay(world.plan.latency);
    match world.random.below(20) {
        0 => world.after(delay, Happening::Break(line, 0, libc::ECONNREFUSED)),
        // It hangs.
        1 => {}
        _ => {
            world.after(delay, Happening::Connected(line));
            let begins = delay + world.random.delay(Duration::from_millis(5));
            world.after(begins, Happening::Backend(number));
        }
    }
    Ok(line)
}

/// Does a little of what it is up to.
pub fn act(world: &mut World, number: usize) {
    let line = world.backends[number].line;
    if world.backends[number].done {
        return;
    }
    let backend = &mut world.backends[number];
    backend.acts -= 1;
    let over = backend.acts == 0;
    let resets = backend.kind == Kind::Resetter && world.random.one_in(12);
    if over || resets {
        return finish(world, number, line, resets);
    }
    let kind = world.backends[number].kind;
    if kind != Kind::NeverReader || world.random.one_in(10) {
        read(world, number, line);
    }
    write(world, number, line);
    world.settle(line);
    let backend = &world.backends[number];
    let end = &world.lines[line].tcp.ends[PEER];
    let said_all = end.written_total == backend.total || end.dead || !backend.talks();
    let ends = match kind {
        Kind::EndsFirst => backend.client.is_some() && said_all,
        Kind::Shy => world.random.one_in(3),
        Kind::LoginError => backend.client.is_some() && said_all,
        Kind::Silent => false,
        _ => backend.saw_end && said_all,
    } || (backend.cancels && world.random.one_in(2));
    if ends {
        // A server exits: what it has not read resets the connection.
        if end.rx.is_empty() || world.random.one_in(20) {
            return finish(world, number, line, false);
        }
    }
    let pause = match (kind, world.random.below(20)) {
        (Kind::Silent, _) => Duration::from_secs(4),
        (_, 0) => Duration::from_secs(3),
        (_, 1) => Duration::from_millis(400),
        _ => Duration::from_millis(15),
    };
    let delay = world.random.delay(pause);
    world.after(delay, Happening::Backend(number));
}

fn finish(world: &mut World, number: usize, line: usize, reset: bool) {
    let end = &world.lines[line].tcp.ends[PEER];
    let backend = &mut world.backends[number];
    backend.done = true;
    // What it has not read resets the connection, too, and so does what comes later.
    backend.broke |= reset || !end.rx.is_empty() || !backend.saw_end;
    world.note(|| format!("backend {number} closes, reset {reset}"));
    world.close(line, PEER, reset);
}

fn read(world: &mut World, number: usize, line: usize) {
    let count = world.random.up_to(world.plan.buffer_max);
    let mut buffer = vec![0; count];
    let end = &mut world.lines[line].tcp.ends[PEER];
    let before = end.read_total;
    match end.receive(&mut buffer) {
        Ok(0) => {
            if !std::mem::replace(&mut world.backends[number].saw_end, true) {
                oracle::backend_saw_end(world, number);
            }
        }
        Ok(count) => got(world, number, before, &buffer[..count]),
        // gate closed in earnest.
        Err(libc::EAGAIN) => {}
        Err(_) => world.backends[number].saw_end = true,
    }
}

fn got(world: &mut World, number: usize, before: usize, bytes: &[u8]) {
    let backend = &mut world.backends[number];
    assert!(!backend.cancels, "more than a CancelRequest");
    if backend.client.is_some() {
        return oracle::backend_got(world, number, before, bytes);
    }
    backend.first.extend_from_slice(bytes);
    begin(world, number);
    let backend = &mut world.backends[number];
    if backend.client.is_some() {
        let first = std::mem::take(&mut backend.first);
        oracle::backend_got(world, number, 0, &first);
    }
}

/// Reads the first packet, once it is there.
fn begin(world: &mut World, number: usize) {
    let backend = &mut world.backends[number];
    let Some(head) = backend.first.first_chunk::<8>() else {
        return;
    };
    let length = u32::from_be_bytes([head[0], head[1], head[2], head[3]]) as usize;
    if backend.first.len() < length {
        return;
    }
    if head[4..] == 80_877_102_u32.to_be_bytes() {
        assert_eq!((backend.first.len(), length), (16, 16));
        backend.cancels = true;
        return;
    }
    let text = String::from_utf8_lossy(&backend.first[8..length]).into_owned();
    let words: Vec<&str> = text.split('\0').collect();
    let of = |name: &str| {
        let at = words.iter().position(|word| *word == name);
        at.map_or("", |at| words[at + 1])
    };
    let client: usize = of("application_name").parse().expect("a client's number");
    let wanted = if of("database") == "d2" {
        "other"
    } else {
        "default"
    };
    assert_eq!(world.backends[number].name, wanted, "the wrong backend");
    let earlier = world.clients[client].backend.replace(number);
    assert_eq!(earlier, None, "client {client} has two sessions");
    world.backends[number].client = Some(client);
}

fn write(world: &mut World, number: usize, line: usize) {
    let backend = &world.backends[number];
    let end = &mut world.lines[line].tcp.ends[PEER];
    let sent = end.written_total;
    if !backend.talks() || sent == backend.total || end.fin_sent.is_some() {
        return;
    }
    let random: &mut Random = &mut world.random;
    let most = if random.one_in(3) { 20 } else { backend.total };
    let count = random.up_to(most).min(backend.total - sent);
    let bytes: Vec<u8> = (sent..sent + count).map(|at| backend.byte(at)).collect();
    // An error is told by the next read.
    let _ = end.send(&bytes, bytes.len());
}
