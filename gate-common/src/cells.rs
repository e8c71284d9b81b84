//! A listener's ceiling as tokens: each CPU keeps a few free ones in its own
//! cell, a shared pool has the rest.
//!
//! What holds, proved by the model check in `tests/model.rs`:
//!
//! - never more tokens in use than the ceiling that was applied;
//! - tokens are conserved: `applied = pool + cells + in use`, once nobody is
//!   in the middle of a step;
//! - a refusal only if the pool and every cell were seen empty.
//!
//! Lowering below use makes the pool negative; releases repay it, and no cell
//! serves anybody before it is repaid.

use crate::abi::{CPUS_MAX, ListenerState};
use crate::word::{EXCHANGE_ATTEMPTS, Word};

/// Tokens that a cell fetches from a full pool in one go.
const BATCH: u64 = 8;
/// Tokens that a cell keeps of those released on its CPU.
const CELL_MAX: u64 = 16;
/// How often the sweep tries one cell. The verifier keeps a state for every
/// branch of the longest path and allows 8,192 (kernel/bpf/verifier.c,
/// BPF_COMPLEXITY_LIMIT_JMP_SEQ): [`CPUS_MAX`] cells leave room for so many.
const SWEEP_ATTEMPTS: usize = 8;

/// One word for each CPU.
pub trait Cells {
    /// The cell.
    type Word: Word;
    /// The CPU this runs on.
    fn this_cpu(&self) -> u32;
    /// The cell of a CPU, `None` past the last one.
    fn cell(&self, cpu: u32) -> Option<&Self::Word>;
}

/// Takes one token of a listener whose ceiling should be `wanted` tokens.
/// Returns whether there was one.
#[inline(always)]
pub fn take<W: Word, C: Cells>(state: &ListenerState<W>, cells: &C, wanted: u64) -> bool {
    apply(state, wanted);
    let own = cells.cell(cells.this_cpu());
    if !is_negative(&state.pool)
        && let Some(own) = own
        && take_one(own, EXCHANGE_ATTEMPTS)
    {
        return true;
    }
    take_from_pool(state, own) || take_from_any(state, cells)
}

/// Gives one token back.
#[inline(always)]
pub fn give<W: Word, C: Cells>(state: &ListenerState<W>, cells: &C) {
    if !is_negative(&state.pool)
        && let Some(own) = cells.cell(cells.this_cpu())
        && own.load() < CELL_MAX
    {
        own.fetch_add(1);
    } else {
        state.pool.fetch_add(1);
    }
}

/// Brings the pool to a ceiling that userspace changed. One CPU does it;
/// another that meets the change meanwhile waits for its few instructions, so
/// that whoever comes after a lowering is judged by the new ceiling.
#[inline(always)]
fn apply<W: Word>(state: &ListenerState<W>, wanted: u64) {
    for _ in 0..EXCHANGE_ATTEMPTS {
        if state.applied.load() == wanted {
            return;
        }
        if state.resizing.exchange(0, 1) {
            let applied = state.applied.load();
            // A raise announces itself before its tokens exist, a lowering
            // takes its tokens before it announces itself: at no moment are
            // there more tokens than `applied`.
            if wanted > applied {
                state.applied.store(wanted);
                state.pool.fetch_add(wanted - applied);
            } else {
                state.pool.fetch_sub(applied - wanted);
                state.applied.store(wanted);
            }
            state.resizing.store(0);
            return;
        }
    }
}

#[inline(always)]
fn is_negative<W: Word>(pool: &W) -> bool {
    pool.load().cast_signed() < 0
}

#[inline(always)]
fn take_one<W: Word>(cell: &W, attempts: usize) -> bool {
    for _ in 0..attempts {
        let tokens = cell.load();
        if tokens == 0 {
            return false;
        }
        if cell.exchange(tokens, tokens - 1) {
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
                own.fetch_add(count - 1);
            }
            return true;
        }
    }
    false
}

/// Before a refusal: looks into every cell. A negative pool is repaid first.
#[inline(always)]
fn take_from_any<W: Word, C: Cells>(state: &ListenerState<W>, cells: &C) -> bool {
    for cpu in 0..CPUS_MAX {
        let Some(cell) = cells.cell(cpu) else {
            break;
        };
        if is_negative(&state.pool) {
            let tokens = cell.swap(0);
            state.pool.fetch_add(tokens);
        } else if take_one(cell, SWEEP_ATTEMPTS) {
            return true;
        }
    }
    take_from_pool(state, None::<&C::Word>)
}

#[inline(always)]
const fn u64_from(value: u32) -> u64 {
    value as u64
}
