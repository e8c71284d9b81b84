//! The atomic 64-bit word that all rules are written against.

/// How often a compare-exchange is tried again before the caller gives up.
///
/// A lost exchange means that another CPU made progress. BPF loops need a
/// bound; 64 losses in a row do not happen at the microseconds that separate
/// two connections on one CPU.
pub const EXCHANGE_ATTEMPTS: usize = 64;

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

    /// Subtracts, wrapping, and returns what was there before.
    #[inline(always)]
    fn fetch_sub(&self, value: u64) -> u64 {
        self.fetch_add(value.wrapping_neg())
    }
}

#[cfg(any(not(target_arch = "bpf"), all(loom, test)))]
macro_rules! impl_word {
    ($atomic:ty, $ordering:path) => {
        impl Word for $atomic {
            fn load(&self) -> u64 {
                <$atomic>::load(self, $ordering)
            }
            fn store(&self, value: u64) {
                <$atomic>::store(self, value, $ordering)
            }
            fn fetch_add(&self, value: u64) -> u64 {
                <$atomic>::fetch_add(self, value, $ordering)
            }
            fn fetch_and(&self, value: u64) -> u64 {
                <$atomic>::fetch_and(self, value, $ordering)
            }
            fn fetch_or(&self, value: u64) -> u64 {
                <$atomic>::fetch_or(self, value, $ordering)
            }
            fn swap(&self, value: u64) -> u64 {
                <$atomic>::swap(self, value, $ordering)
            }
            fn exchange(&self, current: u64, new: u64) -> bool {
                self.compare_exchange(current, new, $ordering, $ordering)
                    .is_ok()
            }
        }
    };
}

// core's atomic read-modify-write does not exist on BPF targets: gate-ebpf
// implements the trait over the compiler's intrinsics.
#[cfg(not(target_arch = "bpf"))]
impl_word!(
    core::sync::atomic::AtomicU64,
    core::sync::atomic::Ordering::SeqCst
);
#[cfg(all(loom, test))]
impl_word!(
    loom::sync::atomic::AtomicU64,
    loom::sync::atomic::Ordering::SeqCst
);
