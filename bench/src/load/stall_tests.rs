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
/// What is due in this part of the stall waits longer than [`LONG`].
const LONG_FOR: f64 = 0.2;
/// A machine that runs other tests, too, may stop by itself now and then.
const LONG_IN_CLOSED_MAX: u64 = 4;

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

    /// What a load saw of a stall, and for how long it ran.
    fn stall(&self, crew: Crew) -> (Tally, Duration) {
        let begin = Instant::now();
        crew.phase().measure();
        thread::sleep(AROUND);
        self.stalled.store(true, Ordering::SeqCst);
        thread::sleep(STALL);
        self.stalled.store(false, Ordering::SeqCst);
        thread::sleep(AROUND);
        let tally = crew.end().unwrap();
        (tally, begin.elapsed())
    }
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

fn expect_open(tally: &Tally, elapsed: Duration) {
    let (long, demanded) = (long(tally), RATE * LONG_FOR);
    assert!(long as f64 >= demanded, "{long} of {demanded} were long");
    let (seen, due) = (
        (tally.count() + tally.unfinished) as f64,
        RATE * elapsed.as_secs_f64(),
    );
    // A load that does not ask during the stall misses 30 %; a thread that begins
    // late, or what was due at the last moment, is less.
    assert!(
        (due * 0.85..=due + 1.0).contains(&seen),
        "{seen} seen of {due} due"
    );
    assert_eq!(tally.failed, 0, "{:?}", tally.failure);
}

fn expect_closed(tally: &Tally) {
    let long = long(tally);
    assert!((1..=LONG_IN_CLOSED_MAX).contains(&long), "{long} were long");
    assert_eq!(tally.failed, 0, "{:?}", tally.failure);
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
    let (tally, elapsed) = relay.stall(requests(&relay, 4, OPEN));
    expect_open(&tally, elapsed);
}

#[test]
fn an_open_loop_of_attempts_does_not_hide_a_stall() {
    let relay = Relay::start();
    // More are due during the stall than may run at once: they wait, and count.
    let (tally, elapsed) = relay.stall(attempts(&relay, 8, OPEN));
    expect_open(&tally, elapsed);
}

#[test]
fn a_closed_loop_sees_a_stall_once() {
    let relay = Relay::start();
    let (tally, _) = relay.stall(requests(&relay, 1, Pace::Closed));
    expect_closed(&tally);
    let (tally, _) = relay.stall(attempts(&relay, 1, Pace::Closed));
    expect_closed(&tally);
}
