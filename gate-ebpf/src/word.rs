//! The rules' atomic word on BPF, where core's atomics have no
//! read-modify-write.

use core::cell::UnsafeCell;
use core::intrinsics::{
    AtomicOrdering, atomic_and, atomic_cxchg, atomic_or, atomic_xadd, atomic_xchg,
};

use gate_common::word::Word;

const SEQ_CST: AtomicOrdering = AtomicOrdering::SeqCst;

/// One 64-bit word of a map.
#[repr(transparent)]
pub struct MapWord(UnsafeCell<u64>);

// SAFETY: every access below is one BPF instruction on eight aligned bytes,
// which other CPUs see whole.
unsafe impl Sync for MapWord {}

impl MapWord {
    /// A word of a value that is about to be stored.
    pub const fn new(value: u64) -> Self {
        Self(UnsafeCell::new(value))
    }
}

impl Word for MapWord {
    /// A plain load: target-cpu v3 has no other. It may lag behind another
    /// CPU's write where the machine allows that; every decision is made by a
    /// read-modify-write below, which is fully ordered.
    #[inline(always)]
    fn load(&self) -> u64 {
        // SAFETY: the pointer comes from a reference; volatile, so that the
        // compiler neither splits nor repeats nor drops the load.
        unsafe { self.0.get().read_volatile() }
    }

    #[inline(always)]
    fn store(&self, value: u64) {
        self.swap(value);
    }

    #[inline(always)]
    fn fetch_add(&self, value: u64) -> u64 {
        // SAFETY: the pointer comes from a reference to an aligned word.
        unsafe { atomic_xadd::<u64, u64, SEQ_CST>(self.0.get(), value) }
    }

    #[inline(always)]
    fn fetch_and(&self, value: u64) -> u64 {
        // SAFETY: as in `fetch_add`.
        unsafe { atomic_and::<u64, u64, SEQ_CST>(self.0.get(), value) }
    }

    #[inline(always)]
    fn fetch_or(&self, value: u64) -> u64 {
        // SAFETY: as in `fetch_add`.
        unsafe { atomic_or::<u64, u64, SEQ_CST>(self.0.get(), value) }
    }

    #[inline(always)]
    fn swap(&self, value: u64) -> u64 {
        // SAFETY: as in `fetch_add`.
        unsafe { atomic_xchg::<u64, SEQ_CST>(self.0.get(), value) }
    }

    #[inline(always)]
    fn exchange(&self, current: u64, new: u64) -> bool {
        // SAFETY: as in `fetch_add`.
        unsafe { atomic_cxchg::<u64, SEQ_CST, SEQ_CST>(self.0.get(), current, new).1 }
    }
}
