//! The atomic 64-bit word that all rules are written against.

#[cfg(not(target_arch = "bpf"))]
use core::sync::atomic::Ordering::SeqCst;

/// How often a compare-exchange is tried again before the caller gives up.
///
/// A lost exchange means that another CPU made progress. BPF loops need a
/// bound; 64 losses in a row do not happen at the microseconds that separate
/// two connections on one CPU. The model checker, which tries every number of
/// losses, gets fewer.
pub const EXCHANGE_ATTEMPTS: usize = if cfg!(loom) { 6 } else { 64 };

/// A 64-bit word shared between CPUs. Every operation is sequentially
/// consistent: the proofs in [`crate::cells`] and [`crate::slots`] need the
/// single total order, and BPF has no weaker read-modify-write that returns.
pub trait Word {
    /// Reads the word.
    fn load(&self) -> u64;
    /// Writes the word.
    fn store(&self, value: u64);
    /// Adds, wrapping, and returns what was there before.
    fn fetch_add(&self, value: u64) -> u64;
    /// Ands and returns what was there before.
    fn fetch_and(&self, value: u64) -> u64;
    /// Ors and returns what was there before.
    fn fetch_or(&self, value: u64) -> u64;
    /// Replaces and returns what was there before.
    fn swap(&self, value: u64) -> u64;
    /// Replaces `current` by `new`. Returns whether it did.
    fn exchange(&self, current: u64, new: u64) -> bool;

    /// Waits for another CPU's few instructions.
    #[inline(always)]
    fn pause() {
        #[cfg(not(target_arch = "bpf"))]
        core::hint::spin_loop();
    }

    /// Subtracts, wrapping, and returns what was there before.
    #[inline(always)]
    fn fetch_sub(&self, value: u64) -> u64 {
        self.fetch_add(value.wrapping_neg())
    }
}

/// Takes one off the count in the bits of `mask`, its lowest being bit 0.
/// Returns false, and changes nothing at any moment, if the count is 0: a count
/// that wraps for an instant is an instant in which everybody is refused, and
/// two that undo each other's wrap never get back.
#[inline(always)]
#[must_use = "a count of 0 is an error to be counted"]
pub fn take_off_one<W: Word>(word: &W, mask: u64) -> bool {
    for _ in 0..EXCHANGE_ATTEMPTS {
        let seen = word.load();
        if seen & mask == 0 {
            return false;
        }
        if word.exchange(seen, seen - 1) {
            return true;
        }
    }
    // Never lose a release: whoever won all those exchanges saw a count too.
    word.fetch_sub(1);
    true
}

// core's atomic read-modify-write does not exist on BPF targets: gate-ebpf
// implements the trait over the compiler's intrinsics.
#[cfg(not(target_arch = "bpf"))]
impl Word for core::sync::atomic::AtomicU64 {
    fn load(&self) -> u64 {
        self.load(SeqCst)
    }
    fn store(&self, value: u64) {
        self.store(value, SeqCst);
    }
    fn fetch_add(&self, value: u64) -> u64 {
        self.fetch_add(value, SeqCst)
    }
    fn fetch_and(&self, value: u64) -> u64 {
        self.fetch_and(value, SeqCst)
    }
    fn fetch_or(&self, value: u64) -> u64 {
        self.fetch_or(value, SeqCst)
    }
    fn swap(&self, value: u64) -> u64 {
        self.swap(value, SeqCst)
    }
    fn exchange(&self, current: u64, new: u64) -> bool {
        self.compare_exchange(current, new, SeqCst, SeqCst).is_ok()
    }
}
