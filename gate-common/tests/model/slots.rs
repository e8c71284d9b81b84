//! Admission and the names' generations.

use std::sync::atomic::{AtomicU64 as Plain, Ordering::SeqCst};

use gate_common::abi::{SlotKind, SlotRef, slot};
use gate_common::limit::{LimitWords, Setting};
use gate_common::slots::{self, Book, Denial, used};
use gate_common::word::Word as _;
use loom::sync::Arc;
use loom::thread;

use super::{ModelWord, explore, explore_bounded, race};

const ALICE: u32 = slot::FIRST_NAMED;
const BOB: u32 = ALICE + 1;
const PROD: u32 = ALICE + 2;
const RESERVED: u32 = 4;

/// The total and three names.
pub(super) struct SmallBook {
    words: Vec<ModelWord>,
    limits: Vec<LimitWords<ModelWord>>,
    admitted: Plain,
}

impl Book for SmallBook {
    type Word = ModelWord;

    fn slot(&self, index: u32) -> Option<&ModelWord> {
        self.words.get(place(index))
    }

    fn limit(&self, index: u32) -> Option<&LimitWords<ModelWord>> {
        self.limits.get(place(index))
    }
}

fn place(index: u32) -> usize {
    match index {
        0..RESERVED => index as usize,
        _ => (index - slot::FIRST_NAMED + RESERVED) as usize,
    }
}

impl SmallBook {
    /// With the limits of the total, Alice, Bob and prod; 0 is unlimited.
    pub(super) fn new([total, alice, bob, prod]: [u64; 4]) -> Self {
        let unlimited = 0;
        let limits = [total, unlimited, unlimited, unlimited, alice, bob, prod];
        let fixed = |number| LimitWords {
            runtime: ModelWord::Fixed(Setting::Inherit.encode()),
            config: ModelWord::Fixed(Setting::from_number(number).encode()),
        };
        Self {
            words: limits.map(|_| ModelWord::shared(0)).into(),
            limits: limits.map(fixed).into(),
            admitted: Plain::new(0),
        }
    }

    fn admit(&self, asked: &[SlotRef; 4]) -> Result<(), Denial> {
        let verdict = slots::admit(self, asked);
        if verdict.is_ok() {
            self.admitted.fetch_add(1, SeqCst);
        }
        verdict
    }

    /// Admitted or denied: what holds either way is looked at afterwards.
    fn attempt(&self, asked: &[SlotRef; 4]) {
        let _ = self.admit(asked);
    }

    pub(super) fn used(&self, index: u32) -> u32 {
        used(self.words[place(index)].load())
    }

    fn assert_used(&self, expected: [u32; 4]) {
        let seen = [slot::TOTAL, ALICE, BOB, PROD].map(|index| self.used(index));
        assert_eq!(seen, expected, "total, Alice, Bob, prod");
    }
}

/// Total and a user in their first generation, and perhaps prod.
pub(super) fn ask(user: u32, database: Option<u32>) -> [SlotRef; 4] {
    let first = |index| SlotRef {
        index,
        generation: 0,
    };
    let database = database.map_or(SlotRef::ABSENT, first);
    [first(slot::TOTAL), first(user), database, SlotRef::ABSENT]
}

#[test]
fn the_last_slot_goes_to_one() {
    explore(|| {
        let book = Arc::new(SmallBook::new([1, 0, 0, 0]));
        race(
            &book,
            [
                |book| book.attempt(&ask(ALICE, None)),
                |book| book.attempt(&ask(BOB, None)),
                |book| assert!(book.used(slot::TOTAL) <= 1),
            ],
        );
        let admitted = book.admitted.load(SeqCst) as u32;
        assert!(admitted <= 1);
        let (alice, bob) = (book.used(ALICE), book.used(BOB));
        assert_eq!((alice + bob, book.used(slot::TOTAL)), (admitted, admitted));
    });
}

#[test]
fn a_failed_admission_leaves_nothing() {
    explore(|| {
        let book = Arc::new(SmallBook::new([2, 1, 1, 1]));
        race(
            &book,
            [
                |book| book.attempt(&ask(ALICE, Some(PROD))),
                |book| book.attempt(&ask(BOB, Some(PROD))),
            ],
        );
        let (alice, bob) = (book.used(ALICE), book.used(BOB));
        assert_eq!(alice + bob, 1, "the database lets one in");
        book.assert_used([1, alice, bob, 1]);
    });
}

/// Two race for the one slot of a name. Whichever loses, the total has room
/// for another name at every instant.
fn check_that_a_full_name_disturbs_no_other<const KIND: usize>() {
    fn of<const KIND: usize>(name: u32) -> [SlotRef; 4] {
        let mut asked = ask(name, None);
        asked.swap(SlotKind::User as usize, KIND);
        asked
    }
    explore_bounded(2, || {
        let book = Arc::new(SmallBook::new([2, 1, 1, 0]));
        race(
            &book,
            [
                |book| book.attempt(&of::<KIND>(ALICE)),
                |book| book.attempt(&of::<KIND>(ALICE)),
                |book| assert_eq!(book.admit(&of::<KIND>(BOB)), Ok(())),
            ],
        );
        book.assert_used([2, 1, 1, 0]);
    });
}

#[test]
fn a_full_user_does_not_disturb_another() {
    check_that_a_full_name_disturbs_no_other::<{ SlotKind::User as usize }>();
}

#[test]
fn a_full_database_does_not_disturb_another() {
    check_that_a_full_name_disturbs_no_other::<{ SlotKind::Database as usize }>();
}

#[test]
fn a_full_backend_does_not_disturb_another() {
    check_that_a_full_name_disturbs_no_other::<{ SlotKind::Backend as usize }>();
}

#[test]
fn a_lowered_limit_judges_who_comes_after() {
    explore(|| {
        let mut book = SmallBook::new([0, 2, 0, 0]);
        book.limits[place(ALICE)].runtime = ModelWord::shared(Setting::Inherit.encode());
        let book = Arc::new(book);
        assert_eq!(book.admit(&ask(ALICE, None)), Ok(()));
        race(
            &book,
            [
                |book| {
                    let one = Setting::AtMost(1).encode();
                    book.limits[place(ALICE)].runtime.store(one);
                    assert!(book.admit(&ask(ALICE, None)).is_err());
                },
                |book| book.attempt(&ask(ALICE, None)),
            ],
        );
        let admitted = book.admitted.load(SeqCst) as u32;
        assert!(admitted <= 2);
        book.assert_used([admitted, admitted, 0, 0]);
    });
}

#[test]
fn a_recycled_slot_never_counts_for_the_old_name() {
    explore(|| {
        let book = Arc::new(SmallBook::new([0, 0, 0, 0]));
        let word = |book: &SmallBook| book.words[place(ALICE)].load();
        let first = slots::claim(&book.words[place(ALICE)]).expect("a new slot is free");
        assert_eq!(first, 1);
        let old = SlotRef {
            index: ALICE,
            generation: 1,
        };
        let ask_old = move || [SlotRef::ABSENT, old, SlotRef::ABSENT, SlotRef::ABSENT];
        let (admitting, recycling) = (Arc::clone(&book), Arc::clone(&book));
        let admitting = thread::spawn(move || admitting.admit(&ask_old()));
        let recycling = thread::spawn(move || {
            let word = &recycling.words[place(ALICE)];
            slots::recycle(word, 1) && slots::claim(word).is_some()
        });
        let admitted = admitting.join().expect("a model thread failed");
        let recycled = recycling.join().expect("a model thread failed");
        if recycled {
            assert_eq!(admitted, Err(Denial::Stale));
            assert_eq!(word(&book), slots::unused(3));
        } else {
            assert_eq!(admitted, Ok(()));
            assert_eq!(word(&book), slots::unused(1) + 1);
        }
    });
}

#[test]
fn a_free_slot_goes_to_one_claimer() {
    explore(|| {
        let book = Arc::new(SmallBook::new([0, 0, 0, 0]));
        let claim = |book: &SmallBook| {
            if slots::claim(&book.words[place(ALICE)]).is_some() {
                book.admitted.fetch_add(1, SeqCst);
            }
        };
        race(&book, [claim, claim]);
        assert_eq!(book.admitted.load(SeqCst), 1);
    });
}

/// A4: gives without a take change nothing at any instant and are all noticed.
#[test]
fn gives_that_nobody_took_are_all_noticed() {
    explore(|| {
        let book = Arc::new(SmallBook::new([0, 0, 0, 0]));
        let give = |book: &SmallBook| assert!(!slots::give(book, ALICE));
        race(
            &book,
            [give, give, |book| {
                assert_eq!(book.admit(&ask(BOB, None)), Ok(()));
                assert_eq!(book.words[place(ALICE)].load(), 0);
            }],
        );
        book.assert_used([1, 0, 1, 0]);
    });
}

/// One slot that comes back twice at once comes back once.
#[test]
fn a_slot_given_twice_comes_back_once() {
    explore(|| {
        let book = Arc::new(SmallBook::new([0, 0, 0, 0]));
        assert_eq!(book.admit(&ask(ALICE, None)), Ok(()));
        let give = |book: &SmallBook| {
            if slots::give(book, ALICE) {
                book.admitted.fetch_sub(1, SeqCst);
            }
        };
        race(&book, [give, give]);
        assert_eq!(book.admitted.load(SeqCst), 0, "one of the two is told");
        book.assert_used([1, 0, 0, 0]);
    });
}
