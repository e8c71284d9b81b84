//! What the models share: how they are run, and worlds small enough to be
//! run in every order.

mod cells;
mod record;
mod slots;

use gate_common::abi::ListenerState;
use gate_common::word::Word;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering::SeqCst};
use loom::thread;

/// How often a thread is interrupted against its will in one execution.
const PREEMPTIONS: usize = 3;

/// Runs a model in every order, up to the bound.
fn explore(model: impl Fn() + Send + Sync + 'static) {
    explore_bounded(PREEMPTIONS, model);
}

fn explore_bounded(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.max_branches = 100_000;
    builder.check(model);
}

/// A word that the checker interleaves, or one that never changes, which
/// keeps the number of orders small.
#[derive(Debug)]
enum ModelWord {
    Shared(AtomicU64),
    Fixed(u64),
}

impl ModelWord {
    fn shared(value: u64) -> Self {
        Self::Shared(AtomicU64::new(value))
    }

    fn atomic(&self) -> &AtomicU64 {
        match self {
            Self::Shared(word) => word,
            Self::Fixed(_) => panic!("a fixed word was written"),
        }
    }
}

/// loom weakens sequentially consistent loads and stores to acquire and
/// release. A read-modify-write always meets the newest value, so loads and
/// stores are modelled as such.
impl Word for ModelWord {
    fn load(&self) -> u64 {
        match self {
            Self::Shared(word) => word.fetch_add(0, SeqCst),
            Self::Fixed(value) => *value,
        }
    }
    fn store(&self, value: u64) {
        self.atomic().swap(value, SeqCst);
    }
    fn fetch_add(&self, value: u64) -> u64 {
        self.atomic().fetch_add(value, SeqCst)
    }
    fn fetch_and(&self, value: u64) -> u64 {
        self.atomic().fetch_and(value, SeqCst)
    }
    fn fetch_or(&self, value: u64) -> u64 {
        self.atomic().fetch_or(value, SeqCst)
    }
    fn swap(&self, value: u64) -> u64 {
        self.atomic().swap(value, SeqCst)
    }
    fn exchange(&self, current: u64, new: u64) -> bool {
        let exchanged = self.atomic().compare_exchange(current, new, SeqCst, SeqCst);
        exchanged.is_ok()
    }
    fn pause() {
        loom::thread::yield_now();
    }
}

/// A listener with nothing in it.
fn empty_listener() -> ListenerState<ModelWord> {
    let zero = || ModelWord::shared(0);
    ListenerState {
        applied: zero(),
        pool: zero(),
        resizing: zero(),
        over: zero(),
        pending: zero(),
        admitted: zero(),
        over_total: zero(),
        reset_total: zero(),
        unrecorded_total: zero(),
        errors: zero(),
        moving: zero(),
        reserved: [0; 5],
    }
}

/// Runs the threads beside each other, each on its view of what they share.
fn race<T: 'static, const N: usize>(shared: &Arc<T>, threads: [fn(&T); N]) {
    let running = threads.map(|body| {
        let shared = Arc::clone(shared);
        thread::spawn(move || body(&shared))
    });
    for thread in running {
        thread.join().expect("a model thread failed");
    }
}
