//! A listener's ceiling as tokens: each CPU keeps a few free ones in its own
//! cell, a shared pool has the rest.
//!
//! What holds, proved by the model check in `tests/model.rs`:
//!
//! - never more tokens in use than the ceiling that was applied;
//! - tokens are conserved: `applied = pool + cells + in use`, once nobody is
//!   in the middle of a step;
//! - a refusal only if there was a moment at which the pool and every cell
//!   were empty, [`SWEEPS`] disturbed sweeps in a row aside;
//! - a take that begins after a change of the ceiling is judged by the change,
//!   however old the value is that another CPU has in hand.
//!
//! Lowering below use makes the pool negative; releases repay it, and no cell
//! serves anybody before it is repaid.
//!
//! A cell's word is `gives << 32 | tokens`. Gives only ever grow, so two sweeps
//! with the same sum of gives that found no token both prove that none came
//! in between: without it, a token given to a cell that was already looked at
//! would be missed while one is taken from a cell that was not.

use crate::abi::{CPUS_MAX, ListenerState};
use crate::word::{EXCHANGE_ATTEMPTS, Word};

/// Tokens that a cell fetches from a full pool in one go.
const BATCH: u64 = 8;
/// Tokens that a cell keeps of those released on its CPU.
const CELL_MAX: u64 = 16;
/// Sweeps over all cells before a refusal without proof, which takes another
/// CPU that interferes with each of them: with 4, threads that do nothing else
/// manage it once in a million takes; with 8, never.
const SWEEPS: usize = 16;

const TOKENS_MASK: u64 = u32::MAX as u64;
const ONE_GIVE: u64 = 1 << 32;

/// One word for each CPU.
pub trait Cells {
    /// The cell.
    type Word: Word;
    /// The CPU this runs on.
    fn this_cpu(&self) -> u32;
    /// The cell of a CPU, `None` past the last one.
    fn cell(&self, cpu: u32) -> Option<&Self::Word>;

    /// [`sweep`] over these cells. The kernel's form calls it as a function of
    /// its own: the verifier then follows the loop once, not once for every
    /// path that leads to it.
    #[inline(always)]
    fn sweep<W: Word>(&self, state: &ListenerState<W>) -> Sweep
    where
        Self: Sized,
    {
        sweep(state, self)
    }
}

/// The free tokens that a cell's word counts. Of a wrapping sum of such words,
/// the free tokens in all.
#[inline(always)]
#[must_use]
pub const fn tokens(word: u64) -> u64 {
    word & TOKENS_MASK
}

/// Takes one token of a listener whose ceiling should be `wanted()` tokens.
/// Returns whether there was one.
#[inline(always)]
pub fn take<W: Word, C: Cells>(
    state: &ListenerState<W>,
    cells: &C,
    wanted: impl Fn() -> u64,
) -> bool {
    apply(state, wanted);
    let own = own_cell(cells);
    if !is_negative(&state.pool)
        && let Some(own) = own
        && take_one(own)
    {
        return true;
    }
    take_from_pool(state, own) || take_from_any(state, cells)
}

/// Gives one token back.
#[inline(always)]
pub fn give<W: Word, C: Cells>(state: &ListenerState<W>, cells: &C) {
    if !is_negative(&state.pool)
        && let Some(own) = own_cell(cells)
        && tokens(own.load()) < CELL_MAX
    {
        put(own, 1);
    } else {
        state.pool.fetch_add(1);
    }
}

/// Brings the pool to a ceiling that userspace changed. One CPU does it;
/// another that meets the change meanwhile waits for its few instructions, so
/// that whoever comes after a lowering is judged by the new ceiling.
#[inline(always)]
fn apply<W: Word>(state: &ListenerState<W>, wanted: impl Fn() -> u64) {
    let first = wanted();
    for _ in 0..EXCHANGE_ATTEMPTS {
        if state.applied.load() == first {
            return;
        }
        if state.resizing.exchange(0, 1) {
            // Read again: what was read before may be older than what another
            // CPU has applied since, and would undo it.
            resize(state, wanted());
            state.resizing.store(0);
            return;
        }
        W::pause();
    }
}

/// A raise announces itself before its tokens exist, a lowering takes its
/// tokens before it announces itself: at no moment are there more tokens than
/// `applied`.
#[inline(always)]
fn resize<W: Word>(state: &ListenerState<W>, wanted: u64) {
    let applied = state.applied.load();
    if wanted > applied {
        state.applied.store(wanted);
        state.pool.fetch_add(wanted - applied);
    } else {
        state.pool.fetch_sub(applied - wanted);
        state.applied.store(wanted);
    }
}

/// The cell of this CPU, if a sweep would find what lies in it.
#[inline(always)]
fn own_cell<C: Cells>(cells: &C) -> Option<&C::Word> {
    let cpu = cells.this_cpu();
    if cpu < CPUS_MAX {
        cells.cell(cpu)
    } else {
        None
    }
}

#[inline(always)]
fn is_negative<W: Word>(pool: &W) -> bool {
    pool.load().cast_signed() < 0
}

#[inline(always)]
fn put<W: Word>(cell: &W, count: u64) {
    cell.fetch_add(ONE_GIVE + count);
}

#[inline(always)]
fn take_one<W: Word>(cell: &W) -> bool {
    for _ in 0..EXCHANGE_ATTEMPTS {
        let seen = cell.load();
        if tokens(seen) == 0 {
            return false;
        }
        if cell.exchange(seen, seen - 1) {
            return true;
        }
    }
    false
}

/// Takes a token from the pool, and a batch for the own cell while the pool
/// is so full that the batch on its way can make nobody else miss it.
#[inline(always)]
fn take_from_pool<W: Word, C: Word>(state: &ListenerState<W>, own: Option<&C>) -> bool {
    for _ in 0..EXCHANGE_ATTEMPTS {
        let pool = state.pool.load();
        if pool.cast_signed() <= 0 {
            return false;
        }
        let plenty = pool > BATCH * 2 * u64_from(CPUS_MAX);
        let count = if plenty && own.is_some() { BATCH } else { 1 };
        if state.pool.exchange(pool, pool - count) {
            if let Some(own) = own
                && count > 1
            {
                put(own, count - 1);
            }
            return true;
        }
    }
    false
}

/// Before a refusal: looks into every cell, until a token is found or nothing
/// moved from one sweep to the next.
#[inline(always)]
fn take_from_any<W: Word, C: Cells>(state: &ListenerState<W>, cells: &C) -> bool {
    let mut before = Sweep::Disturbed;
    for _ in 0..SWEEPS {
        let now = cells.sweep(state);
        match (before, now) {
            (_, Sweep::Took) => return true,
            (Sweep::Empty { gives: first }, Sweep::Empty { gives }) if first == gives => {
                return false;
            }
            _ => {}
        }
        // Read-modify-writes, because plain loads of two sweeps are in no
        // order on BPF: these two stand between them. With no token on its way
        // and none in the pool, the next sweep can be the proof.
        let moving = state.moving.fetch_add(0) != 0;
        let pool = state.pool.fetch_add(0);
        let empty = pool.cast_signed() <= 0;
        if !empty && state.pool.exchange(pool, pool - 1) {
            return true;
        }
        before = if moving || !empty {
            Sweep::Disturbed
        } else {
            now
        };
        if moving {
            W::pause();
        }
    }
    false
}

/// What one look into every cell came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sweep {
    /// A token was found and taken.
    Took,
    /// No cell had a token when it was looked at.
    Empty {
        /// Sum of the gives that the cells had seen by then.
        gives: u64,
    },
    /// Others took or gave meanwhile.
    Disturbed,
}

impl Sweep {
    const TOOK: u64 = u64::MAX;
    const DISTURBED: u64 = u64::MAX - 1;

    /// As one number: what a BPF function can return.
    #[inline(always)]
    #[must_use]
    pub const fn encode(self) -> u64 {
        match self {
            Self::Took => Self::TOOK,
            Self::Disturbed => Self::DISTURBED,
            // 2^8 cells of 2^32 gives each: far below the two others.
            Self::Empty { gives } => gives,
        }
    }

    /// What [`Sweep::encode`] gave.
    #[inline(always)]
    #[must_use]
    pub const fn decode(number: u64) -> Self {
        match number {
            Self::TOOK => Self::Took,
            Self::DISTURBED => Self::Disturbed,
            gives => Self::Empty { gives },
        }
    }
}

/// Looks into every cell once: takes a token if there is one, and moves tokens
/// to a negative pool.
#[inline(always)]
pub fn sweep<W: Word, C: Cells>(state: &ListenerState<W>, cells: &C) -> Sweep {
    let mut gives: u64 = 0;
    let mut quiet = true;
    for cpu in 0..CPUS_MAX {
        let Some(cell) = cells.cell(cpu) else {
            break;
        };
        let seen = cell.load();
        gives = gives.wrapping_add(seen / ONE_GIVE);
        if tokens(seen) == 0 {
            continue;
        }
        quiet = false;
        if is_negative(&state.pool) {
            repay(state, cell);
        } else if cell.exchange(seen, seen - 1) {
            return Sweep::Took;
        }
    }
    if quiet {
        Sweep::Empty { gives }
    } else {
        Sweep::Disturbed
    }
}

/// Moves a cell's tokens to a negative pool, and says so meanwhile.
#[inline(always)]
fn repay<W: Word, C: Word>(state: &ListenerState<W>, cell: &C) {
    state.moving.fetch_add(1);
    let moved = tokens(cell.fetch_and(!TOKENS_MASK));
    state.pool.fetch_add(moved);
    state.moving.fetch_sub(1);
}

#[inline(always)]
const fn u64_from(value: u32) -> u64 {
    value as u64
}
