//! The rules on real atomics and real threads, a second or so each: what the
//! model check proves for a few steps, for millions of them (CASES A8, A9).

// The model check's build has nothing to do here.
#![cfg(not(loom))]

mod book;

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use gate_common::abi::{CPUS_MAX, SlotKind, slot};
use gate_common::cells;
use gate_common::limit::Setting;
use gate_common::record;
use gate_common::slots;

use book::{CPUS, Socket, USERS, World, ask, user};

const THREADS: u64 = 8;
const LASTS: Duration = Duration::from_millis(1000);

/// A cheap generator (xorshift64*), seeded: a failure can be run again.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) % bound
    }
}

/// Repeats `step` on every thread until the time is over. Returns the steps.
fn hammer(step: impl Fn(&mut Random) + Sync) -> u64 {
    let (over, steps) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (step, over, steps) = (&step, &over, &steps);
            scope.spawn(move || {
                let mut random = Random(0x9E37_79B9_7F4A_7C15 ^ (thread + 1));
                while !over.load(SeqCst) {
                    step(&mut random);
                    steps.fetch_add(1, SeqCst);
                }
            });
        }
        thread::sleep(LASTS);
        over.store(true, SeqCst);
    });
    steps.load(SeqCst)
}

/// Takes on one CPU, gives on another: as many tokens as threads, so nobody
/// is ever refused; one less, and the bound holds.
#[test]
fn tokens_are_exact_and_none_is_refused_in_vain() {
    for (ceiling, may_refuse) in [(THREADS, false), (THREADS - 1, true), (1, true)] {
        let world = World::default();
        let (held, refused) = (AtomicI64::new(0), AtomicU64::new(0));
        let steps = hammer(|random| {
            let (from, to) = (random.below(CPUS.into()), random.below(CPUS.into()));
            if cells::take(&world.state, &world.on(from as u32), || ceiling) {
                let now = held.fetch_add(1, SeqCst) + 1;
                assert!(now <= ceiling.cast_signed(), "{now} of {ceiling} in use");
                held.fetch_sub(1, SeqCst);
                cells::give(&world.state, &world.on(to as u32));
            } else {
                refused.fetch_add(1, SeqCst);
            }
        });
        assert!(
            steps > 1000,
            "only {steps} steps: too slow to mean anything"
        );
        assert_eq!(world.in_use(), 0);
        assert!(
            may_refuse || refused.load(SeqCst) == 0,
            "{refused:?} of {steps} refused"
        );
    }
}

/// The ceiling changes all the time; at rest nothing is lost or made up.
#[test]
fn tokens_survive_changes_of_the_ceiling() {
    let world = World::default();
    let wanted = AtomicU64::new(4);
    hammer(|random| {
        if random.below(16) == 0 {
            wanted.store(random.below(9), SeqCst);
        }
        let cpu = random.below(CPUS.into()) as u32;
        if cells::take(&world.state, &world.on(cpu), || wanted.load(SeqCst)) {
            cells::give(&world.state, &world.on(CPUS - 1 - cpu));
        }
    });
    assert_eq!(world.in_use(), 0);
    assert_eq!(world.state.resizing.load(SeqCst), 0);
    assert_eq!(world.state.moving.load(SeqCst), 0);
    let on = world.on(0);
    let last = (0..20)
        .filter(|_| cells::take(&world.state, &on, || 5))
        .count();
    assert_eq!(last, 5);
}

/// A8: whole connections with random ends on all threads; afterwards every
/// count is 0.
#[test]
fn a8_every_count_is_zero_at_rest() {
    let world = World::default();
    world.set_total(Setting::AtMost(5));
    world.set(user(0), Setting::AtMost(2));
    let admitted = AtomicU64::new(0);
    hammer(|random| {
        let socket = Socket::default();
        let cpu = random.below(CPUS.into()) as u32;
        record::established(&socket, &world.state, &world.on(cpu), || 6);
        if random.below(4) > 0 {
            let name = random.below(USERS as u64) as usize;
            let asked = ask(name, (random.below(2) == 0).then_some(0));
            if record::admit(&socket, &world.state, &world, &asked) == record::Verdict::Admitted {
                admitted.fetch_add(1, SeqCst);
                assert!(world.used(slot::TOTAL) <= 5);
                assert!(world.used(user(0)) <= 2);
            }
        }
        let released = || record::released(&socket, &world.state, &world);
        let closed = || record::closed(&socket, &world.state, &world.on(CPUS - 1 - cpu));
        match random.below(3) {
            0 => {
                released();
                closed();
            }
            1 => {
                closed();
                released();
            }
            _ => thread::scope(|scope| {
                scope.spawn(released);
                closed();
            }),
        }
    });
    assert!(admitted.load(SeqCst) > 0);
    let state = &world.state;
    for count in [&state.over, &state.pending, &state.admitted, &state.errors] {
        assert_eq!(count.load(SeqCst), 0);
    }
    assert_eq!(world.in_use(), 0);
    for word in &world.slots {
        assert_eq!(word.load(SeqCst), 0);
    }
}

/// A9: 2,000 ask at once for 100 slots; the high-water mark is 100.
#[test]
fn a9_two_thousand_race_for_a_hundred() {
    const ATTEMPTS: u64 = 2000;
    const LIMIT: u64 = 100;
    let world = World::default();
    world.set_total(Setting::AtMost(LIMIT));
    let (admitted, highest) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for attempt in 0..ATTEMPTS / THREADS {
                    let name = attempt as usize % USERS;
                    if slots::admit(&world, &ask(name, None)).is_ok() {
                        admitted.fetch_add(1, SeqCst);
                    }
                    highest.fetch_max(world.used(slot::TOTAL), SeqCst);
                }
            });
        }
    });
    assert_eq!(
        (admitted.into_inner(), highest.into_inner()),
        (LIMIT, LIMIT)
    );
    let of_users: u64 = (0..USERS).map(|name| world.used(user(name))).sum();
    assert_eq!(of_users, LIMIT);
}

/// A CPU past the last one that a sweep looks at must not hide tokens.
#[test]
fn tokens_given_on_a_far_cpu_are_found() {
    let world = World::with_cpus(2 * CPUS_MAX);
    let far = world.on(CPUS_MAX + 7);
    assert!(cells::take(&world.state, &far, || 1));
    cells::give(&world.state, &far);
    assert!(cells::take(&world.state, &world.on(0), || 1));
}

/// A release repays the debt at once: nobody has to sweep for it.
#[test]
fn a_release_repays_a_debt_first() {
    let world = World::default();
    let on = world.on(0);
    for _ in 0..3 {
        assert!(cells::take(&world.state, &on, || 3));
    }
    assert!(!cells::take(&world.state, &on, || 1));
    assert_eq!(world.state.pool.load(SeqCst).cast_signed(), -2);
    cells::give(&world.state, &on);
    cells::give(&world.state, &on);
    assert_eq!(world.state.pool.load(SeqCst).cast_signed(), 0);
    assert!(!cells::take(&world.state, &on, || 1));
    assert_eq!(world.in_use(), 1);
}

/// Every kind is taken, also the backend's, which no other test here asks for.
#[test]
fn every_kind_of_slot_is_taken_and_given() {
    let world = World::default();
    let mut asked = ask(0, Some(0));
    asked[SlotKind::Backend as usize].index = user(1);
    asked[SlotKind::Backend as usize].generation = 0;
    world.set(user(1), Setting::AtMost(1));
    assert_eq!(slots::admit(&world, &asked), Ok(()));
    let full = Err(slots::Denial::Full(SlotKind::Backend));
    assert_eq!(slots::admit(&world, &asked), full);
    for slot in asked {
        assert_eq!(world.used(slot.index), 1);
        assert!(slots::give(&world, slot.index));
    }
}
