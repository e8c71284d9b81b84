//! The simulator: the real workers in a world that is made by a seed.
//!
//! | file | what it holds |
//! |---|---|
//! | `plan.rs` | what kind of world a seed makes |
//! | `world.rs` | time, the network, who is in it |
//! | `tcp.rs` | a TCP connection as Linux shows it to its two ends |
//! | `operations.rs` | operations in flight and their completions, as io_uring has them |
//! | `machine.rs`, `sockets.rs` | the machine that a worker runs on, its sockets and pipes |
//! | `crew.rs` | the workers, whose rounds come in any order |
//! | `control.rs` | what the control plane and another gate do |
//! | `client.rs`, `backend.rs` | who is at the other ends |
//! | `oracle.rs` | what must be true of gate, whatever the world does to it |
//! | `limits.rs` | what limits there are, and that they are kept |
//! | `turns.rs` | who is to get a slot, over all workers |
//! | `evictions.rs` | who may be evicted, and for whom |
//!
//! The workers, their sessions, deadlines and wake-ups, what they share and the ledger are gate's
//! own; sockets, pipes, rings and the clock are simulated. A world depends on its seed alone, so a failure can be had again.
#![forbid(unsafe_code)]

mod backend;
mod client;
mod control;
mod crew;
mod evictions;
mod limits;
mod machine;
mod operations;
mod oracle;
mod plan;
mod random;
mod sockets;
mod tcp;
mod turns;
mod world;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use gate::host::Waker;
use gate::ledger::Ledger;
use gate::state::{KernelState, ListenerInfo, State};
use gate::stats::Stats;

use crew::Crew;
use world::World;

/// Pipes that each simulated worker may make.
const PIPES_MAX: usize = 2;

/// What comes about in some worlds, outcomes of sessions aside.
pub const SEEN: [&str; 6] = [
    "a slot of another worker is got after a wait",
    "an eviction for another worker",
    "clients wait at a reload",
    "clients wait when gatectl sets a limit",
    "clients wait at a takeover",
    "a leaving worker finds a client at its last look",
];

/// What became of a world.
#[derive(Clone)]
pub struct Summary {
    /// Rounds of its workers.
    pub steps: u64,
    /// How long it lasted there.
    pub time: Duration,
    /// Everything was given back while gate was still serving.
    pub rested: bool,
    /// What each worker counted.
    pub stats: Vec<Arc<Stats>>,
    /// Bytes that went through pipes.
    pub spliced: usize,
    /// How often each of [`SEEN`] came about.
    pub seen: BTreeMap<&'static str, u64>,
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
    let mut crew = Crew::new(Rc::clone(&world), &state);
    crew.run(step);
    drop(crew);
    let world = &mut *world.borrow_mut();
    oracle::at_end(world);
    Summary {
        steps: step.get(),
        time: world.now,
        rested: world.rested,
        stats: state.stats.clone(),
        spliced: world.spliced,
        seen: std::mem::take(&mut world.seen),
    }
}

fn state(world: &World) -> Arc<State> {
    let config = Arc::new(world.plan.config.clone());
    let ledger = Ledger::simulated(world.plan.names_max, world.plan.asks);
    ledger
        .apply_config(&config)
        .expect("there is room for the names");
    let address = config.listeners[0].address;
    let backends = config.backends.len();
    let workers = 0..world.plan.workers;
    let stats = workers.clone().map(|_| Arc::new(Stats::new(1, backends)));
    let wakers = workers.map(|_| Waker::new().expect("a descriptor is left"));
    let mut state = State::new(
        config,
        Arc::new(ledger),
        vec![ListenerInfo { address, index: 0 }],
        stats.collect(),
        KernelState::Off,
        wakers.collect(),
    );
    state.session_fds_max = world.plan.session_fds_max;
    state.pipes_max = PIPES_MAX * world.plan.workers;
    state.advance(gate::state::Phase::Serving);
    Arc::new(state)
}
