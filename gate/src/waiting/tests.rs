//! The protocol with threads in the place of workers, over the local ledger.

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::mpsc::sync_channel;
use std::thread::{self, Thread};
use std::time::Instant;

use gate_common::limit::Setting;

use super::*;
use crate::ledger::{Entry, Layer, Ledger, LimitKey, NameCache, Step};

/// A lost wake-up lasts as long as this; a slow machine does not.
const LOST: Duration = Duration::from_secs(20);
const USERS: [&[u8]; 2] = [b"app", b"batch"];

/// Any socket will do: the local form does not look at it.
fn socket() -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    TcpStream::connect(listener.local_addr().unwrap()).unwrap()
}

struct World {
    ledger: Ledger,
    waiting: Waiting,
    socket: TcpStream,
    inside: AtomicU32,
    /// Who joined each user's line, and who was admitted from it, in order.
    joined: Mutex<[Vec<Ticket>; 2]>,
    admitted: Mutex<[Vec<Ticket>; 2]>,
    workers: Mutex<Vec<Option<Thread>>>,
}

impl World {
    fn new(limit: u64, workers: usize) -> Self {
        let ledger = Ledger::local();
        let most = Setting::AtMost(limit);
        ledger
            .set_limit(&LimitKey::MaxConnections, Layer::Config, most)
            .unwrap();
        Self {
            ledger,
            waiting: Waiting::default(),
            socket: socket(),
            inside: AtomicU32::new(0),
            joined: Mutex::default(),
            admitted: Mutex::default(),
            workers: Mutex::new(vec![None; workers]),
        }
    }

    /// The calling thread is this worker from now on.
    fn i_am(&self, worker: usize) {
        self.workers.lock().unwrap()[worker] = Some(thread::current());
    }

    fn wake(&self, worker: u16) {
        // As an eventfd, a token keeps a wake-up that comes before the sleep.
        if let Some(thread) = &self.workers.lock().unwrap()[usize::from(worker)] {
            thread.unpark();
        }
    }

    fn ask(&self, names: &mut NameCache, entry: &Entry, user: usize) -> Result<(), WaitsFor> {
        let who = Applicant {
            user: USERS[user],
            database: Some(b"prod"),
            backend: b"default",
        };
        let Step::Decided(verdict) = self.ledger.admit(names, entry, &who) else {
            panic!("the local ledger asks nobody");
        };
        verdict.map_err(|reason| waits_for(reason, &who).expect("a limit on sessions"))
    }

    /// One session, by the protocol of the module, without the look every
    /// [`LOOK_AGAIN`]: it must be admitted by wake-ups alone.
    fn admit(&self, names: &mut NameCache, ticket: Ticket, user: usize) -> Entry {
        let (entry, _) = self.ledger.accepted(self.socket.as_fd(), 0);
        let limit = match self.waiting.line_of(USERS[user]) {
            Some(limit) => limit,
            None => match self.ask(names, &entry, user) {
                Ok(()) => return entry,
                Err(limit) => limit,
            },
        };
        let joined = {
            let mut order = self.joined.lock().unwrap();
            order[user].push(ticket);
            self.waiting.join(ticket, USERS[user], limit, 100)
        };
        assert_ne!(joined, Join::TooMany);
        let mut may_ask = joined == Join::Head;
        let began = Instant::now();
        loop {
            if may_ask && self.ask(names, &entry, user).is_ok() {
                self.admitted.lock().unwrap()[user].push(ticket);
                assert!(self.waiting.leave(ticket, |worker| self.wake(worker)));
                return entry;
            }
            thread::park_timeout(LOST);
            assert!(began.elapsed() < LOST, "a wake-up was lost");
            may_ask = self.waiting.ready(ticket.worker).contains(&ticket);
        }
    }

    fn end(&self, entry: Entry) {
        self.ledger.closed(entry);
        self.waiting.released(|worker| self.wake(worker));
    }

    fn check_end(&self) {
        assert!(self.waiting.is_empty() && self.waiting.lock().is_empty());
        assert_eq!((self.ledger.admitted(), self.ledger.errors()), (0, 0));
        for user in 0..USERS.len() {
            let (joined, admitted) = (self.joined.lock().unwrap(), self.admitted.lock().unwrap());
            assert_eq!(joined[user], admitted[user], "order of user {user}");
        }
    }
}

fn run(limit: u64, workers: u16, sessions: u32) -> World {
    let world = World::new(limit, usize::from(workers));
    thread::scope(|scope| {
        for worker in 0..workers {
            let world = &world;
            scope.spawn(move || {
                world.i_am(usize::from(worker));
                let mut names = NameCache::default();
                for id in 0..sessions {
                    let ticket = Ticket {
                        worker,
                        id,
                        generation: 0,
                    };
                    let entry = world.admit(&mut names, ticket, usize::from(worker) % 2);
                    let inside = world.inside.fetch_add(1, Ordering::SeqCst);
                    assert!(u64::from(inside) < limit);
                    if id % 8 == 0 {
                        thread::yield_now();
                    }
                    world.inside.fetch_sub(1, Ordering::SeqCst);
                    world.end(entry);
                }
            });
        }
    });
    world.check_end();
    world
}

#[test]
fn k_first_come_first_served_per_user_with_eight_workers_and_one_slot() {
    let world = run(1, 8, 1_000);
    let waited: usize = world.admitted.lock().unwrap().iter().map(Vec::len).sum();
    assert!(
        waited > 100,
        "only {waited} of 8,000 waited: nothing was tested"
    );
}

#[test]
fn k_first_come_first_served_per_user_with_eight_workers_and_three_slots() {
    run(3, 8, 1_000);
}

/// Nobody else's release can make up for one that is lost here.
#[test]
fn a_slot_given_back_while_the_only_waiter_joins_is_not_missed() {
    let world = World::new(1, 1);
    let rounds = 5_000;
    // Not a barrier: a side that fails must not leave the other one waiting.
    let (begin, begun) = sync_channel(0);
    let (end, ended) = sync_channel(0);
    thread::scope(|scope| {
        let world = &world;
        scope.spawn(move || {
            world.i_am(0);
            let mut names = NameCache::default();
            for id in 1..=rounds {
                let ticket = Ticket {
                    worker: 0,
                    id,
                    generation: 0,
                };
                begun.recv().unwrap();
                world.inside.store(id, Ordering::SeqCst);
                let entry = world.admit(&mut names, ticket, 0);
                world.end(entry);
                end.send(()).unwrap();
            }
        });
        let mut names = NameCache::default();
        for round in 1..=rounds {
            let (entry, _) = world.ledger.accepted(world.socket.as_fd(), 0);
            world.ask(&mut names, &entry, 1).unwrap();
            begin.send(()).unwrap();
            // Then anywhere in its way from the first question to its sleep.
            while world.inside.load(Ordering::SeqCst) != round {
                std::hint::spin_loop();
            }
            for _ in 0..round % 512 {
                std::hint::spin_loop();
            }
            world.end(entry);
            ended.recv().unwrap();
        }
    });
    world.check_end();
}

#[test]
fn only_limits_on_sessions_are_waited_for_and_refuse_for_what_they_are() {
    let who = Applicant {
        user: b"app",
        database: Some(b"prod"),
        backend: b"default",
    };
    for reason in Reason::ALL {
        let waited_for = waits_for(*reason, &who);
        let heals = matches!(
            reason,
            Reason::MaxConnections | Reason::User | Reason::Database | Reason::Backend
        );
        assert_eq!(waited_for.is_some(), heals, "{reason:?}");
        if let Some(limit) = waited_for {
            assert_eq!(reason_of(&limit), *reason);
        }
    }
    assert_eq!(
        waits_for(
            Reason::Database,
            &Applicant {
                database: None,
                ..who
            }
        ),
        None
    );
}
