//! The ceiling's tokens.

use std::sync::atomic::{AtomicI64, Ordering::SeqCst};

use gate_common::abi::ListenerState;
use gate_common::cells::{self, Cells};
use gate_common::word::Word as _;
use loom::sync::Arc;

use super::{ModelWord, empty_listener, explore, explore_bounded};

const CPUS: usize = 2;

/// One listener on a machine of two CPUs.
struct Listener {
    state: ListenerState<ModelWord>,
    cells: [ModelWord; CPUS],
    wanted: ModelWord,
    /// Invisible to the checker: changes at the very moment of the step before.
    held: AtomicI64,
}

/// The cells, seen from one CPU.
struct On<'a>(&'a Listener, u32);

impl Cells for On<'_> {
    type Word = ModelWord;

    fn this_cpu(&self) -> u32 {
        self.1
    }

    fn cell(&self, cpu: u32) -> Option<&ModelWord> {
        self.0.cells.get(cpu as usize)
    }
}

impl Listener {
    /// A listener at rest with so many tokens in its cells and in use.
    fn new(ceiling: u64, cells: [u64; CPUS], held: u64) -> Arc<Self> {
        let mut state = empty_listener();
        state.applied = ModelWord::shared(ceiling);
        state.pool = ModelWord::shared(ceiling.wrapping_sub(cells.iter().sum::<u64>() + held));
        Arc::new(Self {
            state,
            cells: cells.map(ModelWord::shared),
            wanted: ModelWord::shared(ceiling),
            held: AtomicI64::new(held.cast_signed()),
        })
    }

    fn take(&self, cpu: u32) -> bool {
        let found = cells::take(&self.state, &On(self, cpu), || self.wanted.load());
        if found {
            self.held.fetch_add(1, SeqCst);
        }
        found
    }

    fn give(&self, cpu: u32) {
        self.held.fetch_sub(1, SeqCst);
        cells::give(&self.state, &On(self, cpu));
    }

    fn held(&self) -> u64 {
        u64::try_from(self.held.load(SeqCst)).expect("nobody gives what nobody holds")
    }

    fn assert_held_at_most(&self, bound: u64) {
        assert!(self.held() <= bound, "{} held of {bound}", self.held());
    }

    /// Once nobody is in the middle of a step.
    fn assert_conserved(&self) {
        let sum = self.cells.iter().map(|cell| cell.load());
        let sum = sum.fold(0, u64::wrapping_add);
        assert_eq!(self.state.in_use(sum), self.held.load(SeqCst));
        assert_eq!(self.state.applied.load(), self.wanted.load());
        assert_eq!(self.state.resizing.load(), 0);
        assert_eq!(self.state.moving.load(), 0);
    }
}

/// Runs the threads beside each other, and looks at the listener afterwards.
fn race<const N: usize>(listener: &Arc<Listener>, threads: [fn(&Listener); N]) {
    super::race(listener, threads);
    listener.assert_conserved();
}

#[test]
fn never_more_in_use_than_the_ceiling() {
    explore(|| {
        let listener = Listener::new(2, [1, 0], 0);
        race(
            &listener,
            [
                |listener| {
                    listener.take(0);
                    listener.assert_held_at_most(2);
                },
                |listener| {
                    if listener.take(1) {
                        listener.assert_held_at_most(2);
                        listener.give(0);
                    }
                },
                |listener| {
                    listener.take(1);
                    listener.assert_held_at_most(2);
                },
            ],
        );
        assert!(listener.held() >= 1, "nobody got a free token");
    });
}

/// One token for each: nobody is refused, although the tokens lie in other
/// CPUs' cells.
#[test]
fn tokens_in_other_cells_are_found() {
    explore(|| {
        let listener = Listener::new(3, [0, 3], 0);
        race(
            &listener,
            [
                |listener| assert!(listener.take(0)),
                |listener| assert!(listener.take(0)),
                |listener| assert!(listener.take(1)),
            ],
        );
    });
}

/// At no moment are fewer than one of two tokens free, but the free one
/// moves: from a cell that was not yet looked at to one that was.
#[test]
fn a_token_that_moves_during_a_sweep_is_found() {
    explore(|| {
        let listener = Listener::new(2, [0, 1], 1);
        race(
            &listener,
            [
                |listener| assert!(listener.take(0)),
                |listener| {
                    listener.give(0);
                    assert!(listener.take(1));
                },
            ],
        );
    });
}

/// The same, to and fro: two sweeps in a row that find nothing are no proof,
/// unless nothing was given meanwhile. To deceive both takes five switches.
#[test]
fn a_token_that_moves_during_two_sweeps_is_found() {
    explore_bounded(5, || {
        let listener = Listener::new(2, [0, 1], 1);
        race(
            &listener,
            [
                |listener| assert!(listener.take(0)),
                |listener| {
                    for (to, from) in [(0, 1), (1, 0), (0, 1)] {
                        listener.give(to);
                        assert!(listener.take(from));
                    }
                },
            ],
        );
    });
}

/// The same through a churn of takes and gives on both CPUs.
#[test]
fn enough_for_all_refuses_nobody() {
    explore_bounded(2, || {
        let listener = Listener::new(3, [1, 1], 0);
        let churn = |listener: &Listener| {
            assert!(listener.take(0));
            listener.give(1);
            assert!(listener.take(1));
            listener.give(0);
        };
        race(
            &listener,
            [churn, churn, |listener| assert!(listener.take(0))],
        );
    });
}

/// Two tokens are left after a debt of one is repaid from the cells; both
/// takers get one, whoever repays.
#[test]
fn a_debt_is_repaid_before_anybody_is_refused() {
    for cells in [[2, 1], [3, 0]] {
        explore(move || {
            let listener = Listener::new(3, cells, 1);
            race(
                &listener,
                [
                    |listener| assert!(listener.take(0)),
                    |listener| assert!(listener.take(1)),
                ],
            );
        });
    }
}

#[test]
fn a_lowering_below_use_lets_nobody_in() {
    explore(|| {
        // Four were allowed; three are in use and one lies in a cell.
        let listener = Listener::new(4, [1, 0], 3);
        listener.wanted.store(2);
        race(
            &listener,
            [
                |listener| assert!(!listener.take(0)),
                |listener| {
                    listener.give(0);
                    assert!(!listener.take(0));
                },
            ],
        );
        listener.give(1);
        assert!(listener.take(1), "one of two is free again");
        assert!(!listener.take(0));
    });
}

/// All begin after the lowering: it judges all, whoever applies it.
#[test]
fn a_lowering_judges_all_that_come_after() {
    explore(|| {
        let listener = Listener::new(3, [1, 0], 0);
        listener.wanted.store(1);
        race(
            &listener,
            [
                |listener| {
                    listener.take(0);
                    listener.assert_held_at_most(1);
                },
                |listener| {
                    listener.take(1);
                    listener.take(1);
                    listener.assert_held_at_most(1);
                },
            ],
        );
        assert_eq!(listener.held(), 1);
    });
}

/// A taker that read the old ceiling must not bring it back.
#[test]
fn an_old_reading_of_the_ceiling_does_not_undo_a_lowering() {
    explore(|| {
        let listener = Listener::new(2, [0, 0], 1);
        race(
            &listener,
            [
                |listener| {
                    listener.take(1);
                    listener.assert_held_at_most(2);
                },
                |listener| {
                    listener.wanted.store(1);
                    assert!(!listener.take(0));
                    assert!(!listener.take(0));
                },
            ],
        );
    });
}

#[test]
fn a_raise_is_announced_before_its_tokens_exist() {
    explore(|| {
        let listener = Listener::new(1, [0, 0], 0);
        let take_all = |listener: &Listener| {
            for _ in 0..2 {
                listener.take(1);
                let held = listener.held();
                // Only raised in this model: what is read later is no lower.
                assert!(held <= listener.state.applied.load());
            }
        };
        race(
            &listener,
            [
                |listener| {
                    listener.wanted.store(2);
                    listener.take(0);
                },
                take_all,
            ],
        );
        assert_eq!(listener.held(), 2);
    });
}

#[test]
fn limits_lowered_and_raised_keep_the_tokens() {
    explore(|| {
        let listener = Listener::new(2, [1, 0], 1);
        race(
            &listener,
            [
                |listener| {
                    listener.wanted.store(1);
                    listener.take(0);
                    listener.wanted.store(3);
                    listener.take(0);
                    listener.assert_held_at_most(3);
                },
                |listener| {
                    listener.give(1);
                    listener.take(1);
                    listener.assert_held_at_most(3);
                },
            ],
        );
    });
}

/// A pool so full that cells fetch batches.
#[test]
fn batches_keep_the_tokens() {
    explore(|| {
        let listener = Listener::new(10_000, [0, 0], 0);
        race(
            &listener,
            [
                |listener| {
                    assert!(listener.take(0));
                    assert!(listener.take(0));
                },
                |listener| {
                    assert!(listener.take(0));
                    listener.give(1);
                    assert!(listener.take(1));
                },
            ],
        );
        let own = cells::tokens(listener.cells[0].load());
        assert!(own > 0, "no batch was fetched");
    });
}
