//! The simulator: the real worker in a world that is made by a seed.
//!
//! | file | what it holds |
//! |---|---|
//! | `plan.rs` | what kind of world a seed makes |
//! | `world.rs` | time, the network, who is in it |
//! | `tcp.rs` | a TCP connection as Linux shows it to its two ends |
//! | `operations.rs` | operations in flight and their completions, as io_uring has them |
//! | `machine.rs` | the machine that the worker runs on |
//! | `client.rs`, `backend.rs` | who is at the other ends |
//! | `oracle.rs` | what must be true of gate, whatever the world does to it |
//!
//! The worker, its sessions, its deadlines and the ledger are gate's own; sockets, pipes, the ring
//! and the clock are simulated. A world depends on its seed alone, so a failure can be had again.
#![forbid(unsafe_code)]

mod backend;
mod client;
mod machine;
mod operations;
mod oracle;
mod plan;
mod random;
mod tcp;
mod world;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gate::ledger::Ledger;
use gate::state::{KernelState, ListenerInfo, State};
use gate::stats::Stats;
use gate::worker::{Holdings, Listening, Worker};

use machine::SimMachine;
use world::World;

/// Pipes that a simulated worker may make.
const PIPES_MAX: usize = 2;

/// What became of a world.
#[derive(Clone)]
pub struct Summary {
    /// Rounds of the worker.
    pub steps: u64,
    /// How long it lasted there.
    pub time: Duration,
    /// Everything was given back while gate was still serving.
    pub rested: bool,
    /// What gate counted.
    pub stats: Arc<Stats>,
    /// Bytes that went through pipes.
    pub spliced: usize,
}

/// What went wrong, and when.
#[derive(Debug)]
pub struct Failure {
    /// Which world.
    pub seed: u64,
    /// In which round.
    pub step: u64,
    /// What.
    pub why: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "seed {} step {}: {}\n  to see it: GATE_SIM_SEED={} cargo test -p gate-tests --test sim every_seed -- --nocapture",
            self.seed, self.step, self.why, self.seed
        )
    }
}

/// Lets one world run to its end.
///
/// # Errors
/// gate broke a promise.
pub fn run(seed: u64, traced: bool) -> Result<Summary, Failure> {
    let step = Rc::new(Cell::new(0));
    let counted = Rc::clone(&step);
    let outcome = panic::catch_unwind(AssertUnwindSafe(|| live(seed, traced, &counted)));
    outcome.map_err(|panic| Failure {
        seed,
        step: step.get(),
        why: message(&*panic),
    })
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without words").to_owned()
}

fn live(seed: u64, traced: bool, step: &Rc<Cell<u64>>) -> Summary {
    let world = Rc::new(RefCell::new(World::new(seed, traced)));
    let state = state(&world.borrow());
    world.borrow_mut().state = Some(Arc::clone(&state));
    let machine = SimMachine::new(Rc::clone(&world), Rc::clone(step));
    let index = state.listeners[0].index;
    let mut worker = Worker::new(
        0,
        Arc::clone(&state),
        vec![Listening::new((), 0, index)],
        machine,
    );
    worker.begin().expect("it begins");
    let mut rested = false;
    loop {
        let goes_on = worker.round().expect("it accepts and the ring works");
        let holdings = worker.holdings();
        oracle::after_round(&world.borrow(), &holdings);
        if !rested && world.borrow().rested {
            rested = true;
            assert_eq!(holdings, Holdings::default(), "something is left");
        }
        if goes_on.is_break() {
            break;
        }
    }
    drop(worker);
    oracle::at_end(&world.borrow());
    let world = world.borrow();
    Summary {
        steps: step.get(),
        time: world.now,
        rested,
        stats: Arc::clone(&state.stats[0]),
        spliced: world.spliced,
    }
}

fn state(world: &World) -> Arc<State> {
    let config = Arc::new(world.plan.config.clone());
    let ledger = if world.plan.asks {
        Ledger::simulated()
    } else {
        Ledger::local()
    };
    ledger
        .apply_config(&config)
        .expect("there is room for the names");
    let address = config.listeners[0].address;
    let backends = config.backends.len();
    let mut state = State::new(
        config,
        Arc::new(ledger),
        vec![ListenerInfo { address, index: 0 }],
        vec![Arc::new(Stats::new(1, backends))],
        KernelState::Off,
        Vec::new(),
    );
    state.session_fds_max = world.plan.session_fds_max;
    state.pipes_max = PIPES_MAX;
    state.advance(gate::state::Phase::Serving);
    Arc::new(state)
}
