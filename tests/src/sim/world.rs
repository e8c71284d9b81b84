//! The world around the workers: time, the network, and who is in it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use gate::session::event::LINGER;
use gate::state::State;

use super::backend::Backend;
use super::client::Client;
use super::control::{self, Control};
use super::evictions::{self, Evictions};
use super::operations::Operations;
use super::plan::Plan;
use super::random::Random;
use super::tcp::{GATE, PEER, Rst, Tcp};
use super::{backend, client, oracle, turns};

/// A vanished peer is noticed by keepalive or TCP_USER_TIMEOUT after so long.
const VANISHED: Duration = Duration::from_secs(110);

/// What happens at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Happening {
    /// The network brings something of an end of a connection.
    Deliver(usize, usize),
    /// An end of a connection breaks with an error.
    Break(usize, usize, i32),
    /// A handshake with a backend is over.
    Connected(usize),
    /// A client connects.
    Arrive(usize),
    /// A client does something.
    Client(usize),
    /// A backend does something.
    Backend(usize),
    /// Somebody else takes so many descriptors of the process.
    Hog(usize),
    /// The other gate of a takeover accepts from that queue.
    Accepted(usize),
    /// The control plane does something.
    Control(Control),
}

/// Whose connection it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A client's, by its number.
    Client(usize),
    /// To a backend, by its number.
    Backend(usize),
}

/// A connection in the world.
#[derive(Debug)]
pub struct Line {
    /// The connection.
    pub tcp: Tcp,
    /// Whose it is.
    pub role: Role,
    /// Whose ring looks at gate's end.
    pub worker: usize,
    /// Something of this end is on its way.
    under_way: [bool; 2],
}

/// A listening socket.
#[derive(Debug)]
pub struct Queue {
    /// The worker that accepts from it.
    pub worker: usize,
    /// Clients' connections that wait for accept.
    pub backlog: VecDeque<usize>,
    /// This gate's worker has it still.
    pub open: bool,
}

/// See the module.
pub struct World {
    /// What kind of world it is.
    pub plan: Plan,
    /// Chance.
    pub random: Random,
    /// Since the beginning.
    pub now: Duration,
    /// All connections there ever were.
    pub lines: Vec<Line>,
    /// The listening sockets, all of one address.
    pub queues: Vec<Queue>,
    /// All clients there ever were.
    pub clients: Vec<Client>,
    /// All connections to backends, as the backends see them.
    pub backends: Vec<Backend>,
    /// The ring of each worker.
    pub rings: Vec<Operations>,
    /// Rounds of all workers so far.
    pub round: u64,
    /// Descriptors that gate has.
    pub fds: usize,
    /// Those that workers keep to spare.
    pub spares: usize,
    /// Descriptors that somebody else in the process has.
    pub hogged: usize,
    /// Pipes that gate has.
    pub pipes: usize,
    /// What workers and control plane share.
    pub state: Option<Arc<State>>,
    /// What the control plane did.
    pub control: control::Done,
    /// Evictions, and for whom.
    pub evictions: Evictions,
    /// When gate was told to end.
    pub stopped: Option<Duration>,
    /// Bytes that went into pipes.
    pub spliced: usize,
    /// What came about that only several workers, or the control plane, bring about.
    pub seen: BTreeMap<&'static str, u64>,
    /// The limits held and everything was given back at rest.
    pub rested: bool,
    /// Nothing has happened since.
    last_event: Duration,
    queue: BinaryHeap<Reverse<(Duration, u64, Happening)>>,
    happenings: u64,
    traced: bool,
}

impl World {
    /// A world in which nothing has happened.
    pub fn new(seed: u64, traced: bool) -> Self {
        let mut random = Random::new(seed);
        let plan = Plan::new(&mut random);
        let mut world = Self {
            random,
            now: Duration::ZERO,
            lines: Vec::new(),
            queues: Vec::new(),
            clients: Vec::new(),
            backends: Vec::new(),
            rings: Vec::new(),
            round: 0,
            fds: 0,
            spares: 0,
            hogged: 0,
            pipes: 0,
            state: None,
            control: control::Done::new(&plan),
            evictions: Evictions::new(plan.workers),
            stopped: None,
            seen: BTreeMap::new(),
            rested: false,
            spliced: 0,
            last_event: Duration::ZERO,
            queue: BinaryHeap::new(),
            happenings: 0,
            traced,
            plan,
        };
        world
            .rings
            .resize_with(world.plan.workers, Operations::default);
        for queue in 0..world.plan.queues {
            world.queues.push(Queue {
                worker: queue % world.plan.workers,
                backlog: VecDeque::new(),
                open: true,
            });
        }
        for number in 0..world.plan.clients {
            let client = Client::new(number, &world.plan, &mut world.random);
            world.clients.push(client);
            let at = world.random.delay(world.plan.arrival);
            world.after(at, Happening::Arrive(number));
        }
        if world.plan.fds_max < 1000 {
            for _ in 0..world.random.below(6) {
                let at = world.random.delay(world.plan.arrival);
                let hogs = world.random.below(world.plan.fds_max);
                world.after(at, Happening::Hog(hogs));
                let span = world.random.delay(Duration::from_secs(3));
                world.after(at + span, Happening::Hog(0));
            }
        }
        for (after, what) in world.plan.control.clone() {
            world.after(after, Happening::Control(what));
        }
        world
    }

    /// Says what happens, if somebody wants to know.
    pub fn note(&self, what: impl FnOnce() -> String) {
        if self.traced {
            println!("{:>12?} {}", self.now, what());
        }
    }

    /// Counts what came about.
    pub fn saw(&mut self, what: &'static str) {
        debug_assert!(super::SEEN.contains(&what), "{what}");
        *self.seen.entry(what).or_default() += 1;
    }

    /// Has something happen later.
    pub fn after(&mut self, delay: Duration, what: Happening) {
        self.happenings += 1;
        self.queue
            .push(Reverse((self.now + delay, self.happenings, what)));
    }

    /// When the next thing happens.
    pub fn next_at(&self) -> Option<Duration> {
        self.queue.peek().map(|Reverse((at, ..))| *at)
    }

    /// Lets the next thing happen, which is due.
    pub fn happen(&mut self) {
        let Some(Reverse((at, _, what))) = self.queue.pop() else {
            return;
        };
        self.now = self.now.max(at);
        self.last_event = self.now;
        if !matches!(what, Happening::Deliver(..)) {
            self.note(|| format!("{what:?}"));
        }
        match what {
            Happening::Deliver(line, from) => self.deliver(line, from),
            Happening::Break(line, to, error) => {
                self.lines[line].tcp.break_off(to, error);
                self.settle(line);
                self.wake(line);
            }
            Happening::Connected(line) => {
                self.lines[line].tcp.established = true;
                self.wake(line);
                self.settle(line);
            }
            Happening::Arrive(number) => client::arrive(self, number),
            Happening::Client(number) => client::act(self, number),
            Happening::Backend(number) => backend::act(self, number),
            Happening::Hog(count) => self.hogged = count,
            Happening::Accepted(queue) => control::accepted_elsewhere(self, queue),
            Happening::Control(what) => control::act(self, what),
        }
    }

    /// Once nothing has happened for long enough, everything must be given back; then gate ends.
    pub fn rest(&mut self) {
        let idle = self.now.saturating_sub(self.last_event);
        if self.queue.is_empty() && self.stopped.is_none() && idle > self.plan.rest() {
            oracle::at_rest(self);
            self.rested = true;
            control::act(self, Control::Stop);
        }
    }

    /// A connection changed at gate's end.
    fn wake(&mut self, line: usize) {
        let worker = self.lines[line].worker;
        self.rings[worker].wake(line);
    }

    /// Brings the wake-ups that were written to the workers' eventfds.
    pub fn take_wakes(&mut self) {
        if let Some(state) = &self.state {
            for (ring, waker) in self.rings.iter_mut().zip(&state.wakers) {
                if waker.clear() {
                    ring.wake_waker();
                }
            }
        }
    }

    /// A new connection.
    pub fn connect(&mut self, role: Role, worker: usize, established: bool) -> usize {
        let mut size = || self.random.up_to(self.plan.buffer_max).max(600);
        let tcp = Tcp::new(established, [size(), size()], [size(), size()]);
        self.lines.push(Line {
            tcp,
            role,
            worker,
            under_way: [false; 2],
        });
        self.lines.len() - 1
    }

    /// Puts on its way what a connection has to bring.
    pub fn settle(&mut self, line: usize) {
        for from in [GATE, PEER] {
            let this = &self.lines[line];
            if this.tcp.can_deliver(from) && !this.under_way[from] {
                self.lines[line].under_way[from] = true;
                let delay = self.random.delay(self.plan.latency);
                self.after(delay, Happening::Deliver(line, from));
            }
        }
    }

    fn deliver(&mut self, line: usize, from: usize) {
        self.lines[line].under_way[from] = false;
        if !self.lines[line].tcp.can_deliver(from) {
            return;
        }
        let most = if self.random.one_in(3) {
            self.random.up_to(200)
        } else {
            self.random.up_to(self.plan.buffer_max)
        };
        let rst = self.lines[line].tcp.deliver(from, most);
        self.note(|| {
            let Line { tcp, role, .. } = &self.lines[line];
            let [gate, peer] = &tcp.ends;
            format!(
                "{role:?}: at gate {} + {}, at the peer {} + {}, FINs {}{}",
                gate.read_total,
                gate.rx.len(),
                peer.read_total,
                peer.rx.len(),
                u8::from(gate.fin_received),
                u8::from(peer.fin_received)
            )
        });
        if let Some(Rst { to }) = rst {
            self.send_rst(line, to);
        }
        if from == PEER || self.lines[line].tcp.ends[GATE].tell_room() {
            self.wake(line);
        }
        self.settle(line);
    }

    /// An RST is on its way to that end.
    pub fn send_rst(&mut self, line: usize, to: usize) {
        let delay = self.random.delay(self.plan.latency);
        self.after(delay, Happening::Break(line, to, libc::ECONNRESET));
    }

    /// The peer of gate is gone without a word; its kernel answers nothing.
    pub fn vanish(&mut self, line: usize) {
        self.after(VANISHED, Happening::Break(line, GATE, libc::ETIMEDOUT));
    }

    /// A program closes its end.
    pub fn close(&mut self, line: usize, side: usize, reset: bool) {
        let now = self.now;
        let role = self.lines[line].role;
        if side == GATE {
            evictions::given_up(self, line);
        }
        let end = &mut self.lines[line].tcp.ends[side];
        assert!(!end.closed, "{role:?} is closed twice");
        let fin_sent = end.fin_sent;
        let resets = end.close(now, reset);
        if side == GATE {
            self.note(|| format!("gate closes {role:?}, reset {resets}"));
            let worker = self.lines[line].worker;
            self.rings[worker].check_close(line);
            self.fds -= 1;
            if let (Role::Client(number), Some(fin), true) = (role, fin_sent, resets && !reset) {
                // Its words may be overtaken by the RST.
                let excused = oracle::is_excused(self, number);
                assert!(
                    now >= fin + LINGER || excused,
                    "closed at once upon FIN: {role:?}"
                );
            }
            if matches!(role, Role::Client(_)) {
                oracle::client_closed(self, line);
                turns::released(self, line);
            }
        }
        if resets && self.lines[line].tcp.established {
            self.send_rst(line, 1 - side);
        }
        self.settle(line);
    }

    /// Takes descriptors of the process.
    pub fn take_fds(&mut self, count: usize) -> Result<(), i32> {
        if self.fds + self.hogged + count > self.plan.fds_max {
            return Err(self.random.pick(&[libc::EMFILE, libc::ENFILE]));
        }
        if self.fault() && count != 1 {
            return Err(libc::ENOMEM);
        }
        self.fds += count;
        Ok(())
    }

    /// Whether something is wanting just now.
    pub fn fault(&mut self) -> bool {
        let one_in = self.plan.fault_one_in;
        one_in > 0 && self.random.one_in(one_in)
    }
}
