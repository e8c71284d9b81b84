//! A listener and a few names in plain memory, for the tests on real atomics.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use gate_common::abi::{ListenerState, SlotRef, slot};
use gate_common::cells::Cells;
use gate_common::limit::{LimitWords, Setting};
use gate_common::record::SocketRecord;
use gate_common::slots::{self, Book};

pub const CPUS: u32 = 4;
pub const USERS: usize = 3;
pub const DATABASES: usize = 2;

/// The record of one socket.
pub type Socket = SocketRecord<AtomicU64>;

/// One listener and all slots.
pub struct World {
    pub state: ListenerState<AtomicU64>,
    pub cells: Vec<AtomicU64>,
    pub slots: Vec<AtomicU64>,
    pub limits: Vec<LimitWords<AtomicU64>>,
}

/// The cells, seen from one CPU.
pub struct On<'a> {
    world: &'a World,
    cpu: u32,
}

impl Default for World {
    fn default() -> Self {
        Self::with_cpus(CPUS)
    }
}

impl World {
    pub fn with_cpus(cpus: u32) -> Self {
        let slots = slot::FIRST_NAMED as usize + USERS + DATABASES;
        Self {
            state: ListenerState::default(),
            cells: (0..cpus).map(|_| AtomicU64::new(0)).collect(),
            slots: (0..slots).map(|_| AtomicU64::new(0)).collect(),
            limits: (0..slots).map(|_| LimitWords::default()).collect(),
        }
    }

    pub fn on(&self, cpu: u32) -> On<'_> {
        On { world: self, cpu }
    }

    /// Sets the limit of a slot, as the configuration would.
    pub fn set(&self, index: u32, setting: Setting) {
        self.limits[index as usize]
            .config
            .store(setting.encode(), SeqCst);
    }

    pub fn set_total(&self, setting: Setting) {
        self.set(slot::TOTAL, setting);
    }

    pub fn used(&self, index: u32) -> u64 {
        u64::from(slots::used(self.slots[index as usize].load(SeqCst)))
    }

    pub fn in_use(&self) -> i64 {
        let words = self.cells.iter().map(|cell| cell.load(SeqCst));
        self.state.in_use(words.fold(0, u64::wrapping_add))
    }
}

impl Cells for On<'_> {
    type Word = AtomicU64;

    fn this_cpu(&self) -> u32 {
        self.cpu
    }

    fn cell(&self, cpu: u32) -> Option<&AtomicU64> {
        self.world.cells.get(cpu as usize)
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

/// Index of a user.
pub const fn user(number: usize) -> u32 {
    slot::FIRST_NAMED + number as u32
}

/// Index of a database.
pub const fn database(number: usize) -> u32 {
    user(USERS + number)
}

/// The slots of a user and perhaps a database, in their first generation.
pub fn ask(name: usize, of: Option<usize>) -> [SlotRef; 4] {
    let first = |index| SlotRef {
        index,
        generation: 0,
    };
    let of = of.map_or(SlotRef::ABSENT, |number| first(database(number)));
    [first(slot::TOTAL), first(user(name)), of, SlotRef::ABSENT]
}
