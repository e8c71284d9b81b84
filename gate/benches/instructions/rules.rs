//! The rules of gate-common on the atomics of this machine. The kernel runs
//! the same code as BPF instructions, whose number is another.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use gate_common::abi::{ListenerState, SlotKind, SlotRef, SocketRecord, slot};
use gate_common::cells::{self, Cells};
use gate_common::limit::{Limit, LimitWords, Setting, resolve_ceiling};
use gate_common::record::{self, Verdict};
use gate_common::slots::{self, Book, Denial};

use crate::{Call, Case};

/// As many as a server has; a refusal looks into each one's cell.
const CPUS: usize = 64;
const PLENTY: u64 = 5000;

const USER: u32 = slot::FIRST_NAMED;
const DATABASE: u32 = USER + 1;
const BACKEND: u32 = USER + 2;
const ALL_FOUR: [SlotRef; 4] = [
    first(slot::TOTAL),
    first(USER),
    first(DATABASE),
    first(BACKEND),
];

/// Names are `module: what`.
pub const CASES: &[Case] = &[
    Case {
        name: "limit: resolved, own",
        prepare: || resolved(Setting::AtMost(PLENTY)),
    },
    Case {
        name: "limit: resolved, inherited",
        prepare: || resolved(Setting::Inherit),
    },
    Case {
        name: "limit: automatic ceiling",
        prepare: ceiling,
    },
    Case {
        name: "cells: taken and given",
        prepare: || taken_and_given(PLENTY),
    },
    Case {
        name: "cells: refused, 64 CPUs",
        prepare: refused,
    },
    Case {
        name: "slots: four taken and given",
        prepare: admitted,
    },
    Case {
        name: "slots: user full",
        prepare: || denied(USER, SlotKind::User),
    },
    Case {
        name: "slots: total full",
        prepare: || denied(slot::TOTAL, SlotKind::Total),
    },
    Case {
        name: "record: a whole life",
        prepare: life,
    },
    Case {
        name: "record: over the ceiling",
        prepare: over,
    },
];

/// One listener and its slots in plain memory.
struct World {
    state: ListenerState<AtomicU64>,
    cells: Vec<AtomicU64>,
    slots: Vec<AtomicU64>,
    limits: Vec<LimitWords<AtomicU64>>,
}

impl World {
    /// Every limit is [`PLENTY`].
    fn new() -> Self {
        let slots = BACKEND as usize + 1;
        let world = Self {
            state: ListenerState::default(),
            cells: (0..CPUS).map(|_| AtomicU64::new(0)).collect(),
            slots: (0..slots).map(|_| AtomicU64::new(0)).collect(),
            limits: (0..slots).map(|_| LimitWords::default()).collect(),
        };
        for slot in ALL_FOUR {
            world.set(slot.index, Setting::AtMost(PLENTY));
        }
        world
    }

    fn set(&self, index: u32, setting: Setting) {
        let words = &self.limits[index as usize];
        words.config.store(setting.encode(), SeqCst);
    }
}

impl Cells for World {
    type Word = AtomicU64;

    fn this_cpu(&self) -> u32 {
        black_box(3)
    }

    fn cell(&self, cpu: u32) -> Option<&AtomicU64> {
        self.cells.get(cpu as usize)
    }
}

impl Book for World {
    type Word = AtomicU64;

    fn slot(&self, index: u32) -> Option<&AtomicU64> {
        self.slots.get(index as usize)
    }

    fn limit(&self, index: u32) -> Option<&LimitWords<AtomicU64>> {
        self.limits.get(index as usize)
    }
}

const fn first(index: u32) -> SlotRef {
    SlotRef {
        index,
        generation: 0,
    }
}

fn resolved(own: Setting) -> Call {
    let world = World::new();
    world.set(USER, own);
    world.set(slot::DEFAULT_USER, Setting::AtMost(7));
    Box::new(move || {
        black_box(Book::resolve(&world, SlotKind::User, black_box(USER)));
    })
}

fn ceiling() -> Call {
    let at = Limit::AtMost;
    Box::new(move || {
        black_box(resolve_ceiling(
            black_box(Setting::Auto),
            Setting::Inherit,
            black_box(at(PLENTY)),
            black_box(at(1000)),
            black_box(at(65_536)),
        ));
    })
}

fn taken_and_given(ceiling: u64) -> Call {
    let world = World::new();
    Box::new(move || {
        assert!(cells::take(&world.state, &world, || black_box(ceiling)));
        cells::give(&world.state, &world);
    })
}

fn refused() -> Call {
    let world = World::new();
    assert!(cells::take(&world.state, &world, || 1));
    Box::new(move || {
        assert!(!cells::take(&world.state, &world, || black_box(1)));
    })
}

fn admitted() -> Call {
    let world = World::new();
    Box::new(move || {
        assert!(slots::admit(&world, black_box(&ALL_FOUR)).is_ok());
        for slot in ALL_FOUR {
            assert!(slots::give(&world, black_box(slot.index)));
        }
    })
}

fn denied(full: u32, kind: SlotKind) -> Call {
    let world = World::new();
    world.set(full, Setting::None);
    Box::new(move || {
        let denial = slots::admit(&world, black_box(&ALL_FOUR));
        assert_eq!(denial, Err(Denial::Full(kind)));
    })
}

fn life() -> Call {
    let world = World::new();
    Box::new(move || {
        let record = SocketRecord::<AtomicU64>::default();
        record::established(&record, &world.state, &world, || black_box(PLENTY));
        let verdict = record::admit(&record, &world.state, &world, black_box(&ALL_FOUR));
        assert_eq!(verdict, Verdict::Admitted);
        record::closed(&record, &world.state, &world);
        record::released(&record, &world.state, &world);
    })
}

fn over() -> Call {
    let world = World::new();
    Box::new(move || {
        let record = SocketRecord::<AtomicU64>::default();
        record::established(&record, &world.state, &world, || black_box(0));
        let verdict = record::admit(&record, &world.state, &world, black_box(&ALL_FOUR));
        assert_eq!(verdict, Verdict::Over);
        record::closed(&record, &world.state, &world);
        record::released(&record, &world.state, &world);
    })
}
