//! A server that stops for a moment: an open loop shows it in the latency of
//! everything that was due meanwhile, a closed one in that of what was on its way.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::attempts::{self, Attempts, Goal};
use super::crew::{Crew, Place};
use super::pace::Pace;
use super::requests::{self, Requests};
use super::session;
use super::tally::Tally;
use crate::backend::Backend;

const RATE: f64 = 200.0;
const OPEN: Pace = Pace::Open { per_second: RATE };
const STALL: Duration = Duration::from_millis(300);
/// On both sides of the stall.
const AROUND: Duration = Duration::from_millis(350);
const LONG: Duration = Duration::from_millis(100);
/// What is due in this part of the stall, in seconds, waits longer than [`LONG`].
const LONG_FOR: f64 = 0.2;
/// A thread may begin late on a machine that runs other tests, too. A load that does
/// not ask during the stall misses 30 %.
const TOLERANCE: f64 = 0.15;
/// Before it is measured, for its threads to begin.
const WARM_UP: Duration = Duration::from_millis(50);

/// Passes bytes on to a backend, except while it is stalled.
struct Relay {
    address: SocketAddr,
    stalled: Arc<AtomicBool>,
    _backend: Backend,
}

impl Relay {
    /// Its threads end with their connections; the one that accepts ends with the tests.
    fn start() -> Self {
        let backend = Backend::start(Ipv4Addr::LOCALHOST.into(), &Place::default()).unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let stalled = Arc::new(AtomicBool::new(false));
        let (to, looked_at) = (backend.address, Arc::clone(&stalled));
        thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                let Ok(server) = TcpStream::connect(to) else {
                    continue;
                };
                let _ = (client.set_nodelay(true), server.set_nodelay(true));
                let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
                let looked_at = Arc::clone(&looked_at);
                thread::spawn(move || pass_on(client, server, &looked_at));
                thread::spawn(move || pass_on(back.0, back.1, &AtomicBool::new(false)));
            }
        });
        Self {
            address,
            stalled,
            _backend: backend,
        }
    }

    /// What a load sees of a stall.
    fn stall(&self, start: impl FnOnce() -> Crew) -> Seen {
        let begin = Instant::now();
        let crew = start();
        thread::sleep(WARM_UP);
        let measured = Instant::now();
        crew.phase().measure();
        thread::sleep(AROUND);
        self.stalled.store(true, Ordering::SeqCst);
        thread::sleep(STALL);
        self.stalled.store(false, Ordering::SeqCst);
        thread::sleep(AROUND);
        let measured = measured.elapsed();
        let tally = crew.end().unwrap();
        Seen {
            tally,
            measured,
            alive: begin.elapsed(),
        }
    }
}

/// What a load saw.
struct Seen {
    tally: Tally,
    /// For how long it was measured.
    measured: Duration,
    /// From before it began to after it ended.
    alive: Duration,
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, stalled: &AtomicBool) {
    let mut buffer = [0; 4096];
    while let Ok(bytes @ 1..) = from.read(&mut buffer) {
        while stalled.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        if to.write_all(&buffer[..bytes]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

fn long(tally: &Tally) -> u64 {
    let limit = u64::try_from(LONG.as_nanos()).unwrap();
    tally.latency.len() - tally.latency.count_between(0, limit)
}

fn expect_open(seen: &Seen) {
    let tally = &seen.tally;
    let long = long(tally) as f64;
    let demanded = RATE * LONG_FOR * (1.0 - TOLERANCE);
    assert!(long >= demanded, "{long} of {demanded} were long");
    let asked = (tally.count() + tally.unfinished) as f64;
    let due = RATE * seen.measured.as_secs_f64();
    assert!(
        (asked / due - 1.0).abs() <= TOLERANCE,
        "{asked} seen of {due} due"
    );
    assert_eq!(tally.failed, 0, "{:?}", tally.failure);
}

/// One at a time: however slow the machine is, no more long ones than that fit into its
/// life. A stall that counted for everything due meanwhile would be 40 of them, or 4 s.
fn expect_closed(seen: &Seen) {
    let long = long(&seen.tally);
    assert!(long >= 1, "the stall was not seen");
    let taken = LONG.as_secs_f64() * long as f64;
    assert!(
        taken <= seen.alive.as_secs_f64(),
        "{long} were long within {:?}",
        seen.alive
    );
    assert_eq!(seen.tally.failed, 0, "{:?}", seen.tally.failure);
}

fn requests(relay: &Relay, sessions: usize, pace: Pace) -> Crew {
    let requests = Requests {
        sessions,
        bytes: 64,
        reply_bytes: 64,
        pace,
    };
    requests::start(&Place::default(), relay.address, requests).unwrap()
}

fn attempts(relay: &Relay, at_once: usize, pace: Pace) -> Crew {
    let attempts = Attempts {
        at_once,
        goal: Goal::Ready,
        user: session::USER.to_owned(),
        pace,
    };
    attempts::start(&Place::default(), relay.address, attempts).unwrap()
}

#[test]
fn an_open_loop_of_requests_does_not_hide_a_stall() {
    let relay = Relay::start();
    expect_open(&relay.stall(|| requests(&relay, 4, OPEN)));
}

#[test]
fn an_open_loop_of_attempts_does_not_hide_a_stall() {
    let relay = Relay::start();
    // More are due during the stall than may run at once: they wait, and count.
    expect_open(&relay.stall(|| attempts(&relay, 8, OPEN)));
}

#[test]
fn a_closed_loop_sees_a_stall_once() {
    let relay = Relay::start();
    expect_closed(&relay.stall(|| requests(&relay, 1, Pace::Closed)));
    expect_closed(&relay.stall(|| attempts(&relay, 1, Pace::Closed)));
}
