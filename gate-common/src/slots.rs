//! Admission: total, user, database and backend slots, all or none.
//!
//! A slot word is `generation << 32 | used`. One compare-exchange checks the
//! generation, checks the limit and takes the slot, so a limit holds at every
//! instant and a recycled name is noticed. An odd generation is a slot with
//! an owner, an even one is free.

use crate::abi::{SlotKind, SlotRef};
use crate::limit::{Limit, LimitWords, resolve};
use crate::word::{EXCHANGE_ATTEMPTS, Word, take_off_one};

const USED_MASK: u64 = u32::MAX as u64;
/// From the slot that the fewest share to the one that all share.
const TAKING_ORDER: [SlotKind; 4] = [
    SlotKind::User,
    SlotKind::Database,
    SlotKind::Backend,
    SlotKind::Total,
];

/// Why one slot could not be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denial {
    /// The limit of this kind is reached.
    Full(SlotKind),
    /// The slot has another owner by now: look the name up again.
    Stale,
    /// The request names a slot that does not exist.
    Unknown,
    /// More lost exchanges than [`EXCHANGE_ATTEMPTS`].
    Contended,
}

/// Where the words lie: pinned maps, or the memory of one process.
pub trait Book {
    /// The word type of this memory.
    type Word: Word;
    /// The slot word at an index, `None` past the end.
    fn slot(&self, index: u32) -> Option<&Self::Word>;
    /// The limit at an index, `None` past the end.
    fn limit(&self, index: u32) -> Option<&LimitWords<Self::Word>>;

    /// The limit in force for a slot of a kind.
    #[inline(always)]
    fn resolve(&self, kind: SlotKind, index: u32) -> Option<Limit> {
        let own = self.limit(index)?.setting();
        let default = self.limit(kind.default_limit())?.setting();
        Some(resolve(own, default))
    }
}

/// How many sessions a slot word counts.
#[inline(always)]
#[must_use]
pub const fn used(word: u64) -> u32 {
    (word & USED_MASK) as u32
}

/// The generation of a slot word.
#[inline(always)]
#[must_use]
pub const fn generation(word: u64) -> u32 {
    (word >> 32) as u32
}

/// The word of a slot in a generation with no use.
#[inline(always)]
#[must_use]
pub const fn unused(generation: u32) -> u64 {
    (generation as u64) << 32
}

/// Takes every slot that is asked for, or none.
///
/// The slots are taken one after the other, the most specific first, so that
/// an attempt that will fail never holds what a stranger asks for: a rush on a
/// full user cannot make another user's admission see a full total. Two that
/// share a name can disturb each other for those few instructions; both are
/// denied then at worst, never both admitted.
///
/// # Errors
/// The first denial, in the order of [`SlotKind::ALL`] unless a race decides;
/// nothing is held then.
#[inline(always)]
pub fn admit<B: Book>(book: &B, asked: &[SlotRef; 4]) -> Result<(), Denial> {
    look(book, asked)?;
    for (done, kind) in TAKING_ORDER.into_iter().enumerate() {
        if let Err(denial) = take(book, kind, asked[kind as usize]) {
            undo(book, asked, done);
            return Err(denial);
        }
    }
    Ok(())
}

/// Looks whether every slot that is asked for is free, and takes none.
///
/// # Errors
/// The first denial, in the order of [`SlotKind::ALL`].
#[inline(always)]
pub fn look<B: Book>(book: &B, asked: &[SlotRef; 4]) -> Result<(), Denial> {
    for kind in SlotKind::ALL {
        let SlotRef { index, generation } = asked[kind as usize];
        if asked[kind as usize] == SlotRef::ABSENT {
            continue;
        }
        let word = book.slot(index).ok_or(Denial::Unknown)?;
        let limit = book.resolve(kind, index).ok_or(Denial::Unknown)?;
        check(word.load(), kind, generation, limit)?;
    }
    Ok(())
}

/// Gives one slot back. Returns false, and changes nothing, if nobody held it.
#[inline(always)]
pub fn give<B: Book>(book: &B, index: u32) -> bool {
    book.slot(index)
        .is_some_and(|word| take_off_one(word, USED_MASK))
}

/// Makes a free slot somebody's. Returns its new, odd generation, or `None`
/// if the slot is not free.
pub fn claim<W: Word>(word: &W) -> Option<u32> {
    let seen = word.load();
    let next = generation(seen).wrapping_add(1);
    let free = used(seen) == 0 && generation(seen).is_multiple_of(2);
    (free && word.exchange(seen, unused(next))).then_some(next)
}

/// Frees a slot that its owner does not use. Returns whether it did.
pub fn recycle<W: Word>(word: &W, generation: u32) -> bool {
    word.exchange(unused(generation), unused(generation.wrapping_add(1)))
}

#[inline(always)]
fn take<B: Book>(book: &B, kind: SlotKind, asked: SlotRef) -> Result<(), Denial> {
    if asked == SlotRef::ABSENT {
        return Ok(());
    }
    let word = book.slot(asked.index).ok_or(Denial::Unknown)?;
    let limit = book.resolve(kind, asked.index).ok_or(Denial::Unknown)?;
    for _ in 0..EXCHANGE_ATTEMPTS {
        let seen = word.load();
        check(seen, kind, asked.generation, limit)?;
        if word.exchange(seen, seen + 1) {
            return Ok(());
        }
    }
    Err(Denial::Contended)
}

#[inline(always)]
fn check(word: u64, kind: SlotKind, asked: u32, limit: Limit) -> Result<(), Denial> {
    if generation(word) != asked {
        return Err(Denial::Stale);
    }
    // The count must not run into the generation, however high the limit.
    if used(word) == u32::MAX || !limit.allows_one_more(used(word) as u64) {
        return Err(Denial::Full(kind));
    }
    Ok(())
}

/// Gives back the first `done` of [`TAKING_ORDER`], the last one first.
#[inline(always)]
fn undo<B: Book>(book: &B, asked: &[SlotRef; 4], done: usize) {
    for (step, kind) in TAKING_ORDER.into_iter().enumerate().rev() {
        let slot = asked[kind as usize];
        if step < done && slot != SlotRef::ABSENT {
            give(book, slot.index);
        }
    }
}
