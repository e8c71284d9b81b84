//! The one source of chance: a world is its seed.

use std::time::Duration;

/// xorshift64*.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// Any seed will do; neighbours are unlike each other.
    pub fn new(seed: u64) -> Self {
        let mut random = Self(seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        random.next();
        random
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// 0 up to `bound`, which is not reached.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() >> 32) as usize % bound.max(1)
    }

    /// 1 up to `most`; 1 if that is 0.
    pub fn up_to(&mut self, most: usize) -> usize {
        1 + self.below(most)
    }

    /// Once in `times`.
    pub fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    /// One of them.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// Less than `most`, mostly much less.
    pub fn delay(&mut self, most: Duration) -> Duration {
        let micros = most.as_micros() as usize;
        let bound = micros >> self.below(8);
        Duration::from_micros(self.below(bound) as u64)
    }
}
