//! What happens to a connection before it is relayed: packets, refusals, the
//! session machine, the set of those who wait.

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use gate::admission::PendingSet;
use gate::proto::backend::LoginScanner;
use gate::proto::first_packet::{Negotiated, parse};
use gate::proto::refusal::Refusal;
use gate::session::Session;
use gate::session::event::{Action, Deadlines, Input};
use gate::session::outcome::Reason;

use crate::common::{CANCEL_REQUEST, SSL_REQUEST, large_login, login, startup};
use crate::{Call, Case};

/// Connections that wait beside the one that is measured.
const WAITING: u32 = 1000;
const SOURCES: u32 = 50;
/// What a worker reads in one go.
const CHUNK_BYTES: usize = 16 * 1024;

const DEADLINES: Deadlines = Deadlines {
    startup: Duration::from_secs(15),
    connect: Duration::from_secs(5),
    auth: Duration::from_secs(60),
    cancel: Duration::from_secs(10),
    idle: Duration::ZERO,
    half_close: Duration::ZERO,
    abandoned: Duration::from_secs(60),
};

/// Names are `module: what`, in the order of a connection's life.
pub const CASES: &[Case] = &[
    Case {
        name: "first packet: SSLRequest",
        prepare: || parsed(SSL_REQUEST.to_vec()),
    },
    Case {
        name: "first packet: startup of psql",
        prepare: || parsed(startup(0)),
    },
    Case {
        name: "first packet: startup of 10 kB",
        prepare: || parsed(startup(9_800)),
    },
    Case {
        name: "first packet: startup, byte by byte",
        prepare: byte_by_byte,
    },
    Case {
        name: "first packet: CancelRequest",
        prepare: || parsed(CANCEL_REQUEST.to_vec()),
    },
    Case {
        name: "refusal: total",
        prepare: || refused(Refusal::TooManyClients),
    },
    Case {
        name: "refusal: user",
        prepare: || refused(Refusal::TooManyForRole(b"app".to_vec())),
    },
    Case {
        name: "login: reply of PostgreSQL 15",
        prepare: || scanned(login()),
    },
    Case {
        name: "login: reply of 256 kB",
        prepare: || scanned(large_login()),
    },
    Case {
        name: "pending: heard and removed beside 1000",
        prepare: pending_heard,
    },
    Case {
        name: "pending: eviction beside 1000",
        prepare: pending_evicted,
    },
    Case {
        name: "session: a whole life",
        prepare: || lived(Ok(())),
    },
    Case {
        name: "session: a refusal",
        prepare: || lived(Err(Reason::User)),
    },
];

fn parsed(packet: Vec<u8>) -> Call {
    Box::new(move || {
        black_box(parse(black_box(&packet), Negotiated::default()));
    })
}

fn byte_by_byte() -> Call {
    let packet = startup(0);
    Box::new(move || {
        for end in 1..=packet.len() {
            black_box(parse(black_box(&packet[..end]), Negotiated::default()));
        }
    })
}

fn refused(refusal: Refusal) -> Call {
    Box::new(move || {
        black_box(black_box(&refusal).encode());
    })
}

fn scanned(reply: Vec<u8>) -> Call {
    Box::new(move || {
        let mut scanner = LoginScanner::default();
        for chunk in reply.chunks(CHUNK_BYTES) {
            scanner.scan(black_box(chunk));
        }
        assert!(black_box(scanner).scan(&[]).ready);
    })
}

fn source(id: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits(0x0a00_0000 + id % SOURCES))
}

/// The set, and the clock of the last one heard.
fn waiting() -> (PendingSet, Instant) {
    let mut pending = PendingSet::default();
    let mut now = Instant::now();
    for id in 0..WAITING {
        now += Duration::from_micros(1);
        pending.heard(id, source(id), now);
    }
    (pending, now)
}

fn pending_heard() -> Call {
    let (mut pending, mut now) = waiting();
    let mut id = WAITING;
    Box::new(move || {
        id += 1;
        now += Duration::from_micros(1);
        pending.heard(black_box(id), source(id), now);
        assert!(pending.remove(black_box(id)));
    })
}

fn pending_evicted() -> Call {
    let (mut pending, mut now) = waiting();
    let mut id = WAITING;
    Box::new(move || {
        id += 1;
        now += Duration::from_micros(1);
        pending.heard(black_box(id), source(id), now);
        let victim = pending.victim(black_box(id));
        assert!(victim.is_some_and(|victim| pending.remove(victim)));
    })
}

/// As psql lives with `sslmode=prefer`, from accept to the end of its backend,
/// or to the refusal that `answer` is.
fn lived(answer: Result<(), Reason>) -> Call {
    let startup = startup(0);
    let reply = login();
    let mut out = Vec::with_capacity(16);
    Box::new(move || {
        let mut session = Session::new(black_box(DEADLINES), None);
        session.start(&mut out);
        let mut closed = false;
        for input in [
            Input::ClientData(&SSL_REQUEST),
            Input::ClientData(&startup),
            Input::Admission(answer),
            Input::Connected,
            Input::BackendData(&reply),
            Input::ClientEnded,
            Input::BackendEnded,
        ] {
            session.handle(black_box(input), &mut out);
            closed |= matches!(out.last(), Some(Action::Close { .. }));
            black_box(&mut out).clear();
        }
        assert!(closed);
    })
}
