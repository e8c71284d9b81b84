//! One socket's record: what it holds, and how each event gives it back.
//!
//! Two kinds of things hang on a record, with different ends. The token of
//! the listener's ceiling belongs to the *socket* and comes back when TCP is
//! done with it. The slots belong to the *session* and come back when the last
//! file descriptor is closed, whatever TCP says: a half-close or a reset would
//! otherwise free a slot whose backend still works.
//!
//! Every event takes its bits out of `state` with one atomic step and gives
//! back exactly what it took out, so no order of events gives anything twice.

use crate::abi::{ListenerState, SlotKind, SlotRef};
use crate::cells::{self, Cells};
use crate::slots::{self, Book, Denial};
use crate::word::{Word, take_off_one};

/// Bit of [`SocketRecord::state`]: holds a token of the listener's ceiling.
pub const COUNTED: u64 = 1;
/// Bit: found no token.
pub const OVER: u64 = 1 << 1;
/// Bit: counted in [`ListenerState::pending`].
pub const PENDING: u64 = 1 << 2;
/// Bit: holds slots, counted in [`ListenerState::admitted`].
pub const ADMITTED: u64 = 1 << 3;

/// The record of one accepted socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SocketRecord<W> {
    /// [`COUNTED`], [`OVER`], [`PENDING`], [`ADMITTED`].
    pub state: W,
    /// Index in LISTENER_STATE.
    pub listener: u32,
    /// Zero.
    pub reserved: u32,
    /// By [`SlotKind`]: index of the slot held, plus one; 0 for none.
    pub slots: [W; 4],
}

/// What became of an admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All slots are held.
    Admitted,
    /// The socket is over its listener's ceiling.
    Over,
    /// The socket holds slots already.
    Already,
    /// A slot was denied; none is held.
    Denied(Denial),
}

/// The connection is established: takes its token, or marks it over.
/// `ceiling` reads the listener's ceiling in tokens.
#[inline(always)]
pub fn established<W: Word, C: Cells>(
    record: &SocketRecord<W>,
    state: &ListenerState<W>,
    cells: &C,
    ceiling: impl Fn() -> u64,
) {
    if cells::take(state, cells, ceiling) {
        state.pending.fetch_add(1);
        record.state.fetch_or(COUNTED | PENDING);
    } else {
        state.over.fetch_add(1);
        state.over_total.fetch_add(1);
        record.state.fetch_or(OVER);
    }
}

/// TCP is done with the socket: its token comes back.
#[inline(always)]
pub fn closed<W: Word, C: Cells>(record: &SocketRecord<W>, state: &ListenerState<W>, cells: &C) {
    let held = record.state.fetch_and(!(COUNTED | OVER | PENDING));
    if held & COUNTED != 0 {
        cells::give(state, cells);
    }
    if held & OVER != 0 {
        give_count(&state.over, &state.errors);
    }
    if held & PENDING != 0 {
        give_count(&state.pending, &state.errors);
    }
}

/// A complete startup packet asks for slots. One that asks for none, a
/// CancelRequest or one that is refused anyway, is only pending no more.
#[inline(always)]
pub fn admit<W: Word, B: Book<Word = W>>(
    record: &SocketRecord<W>,
    state: &ListenerState<W>,
    book: &B,
    asked: &[SlotRef; 4],
) -> Verdict {
    let held = record.state.fetch_and(!PENDING);
    if held & PENDING != 0 {
        give_count(&state.pending, &state.errors);
    }
    if *asked == [SlotRef::ABSENT; 4] {
        return Verdict::Admitted;
    }
    if held & OVER != 0 {
        return Verdict::Over;
    }
    if held & ADMITTED != 0 {
        return Verdict::Already;
    }
    if let Err(denial) = slots::admit(book, asked) {
        return Verdict::Denied(denial);
    }
    for kind in SlotKind::ALL {
        let slot = asked[kind as usize];
        if slot != SlotRef::ABSENT {
            record.slots[kind as usize].store(slot.index as u64 + 1);
        }
    }
    state.admitted.fetch_add(1);
    record.state.fetch_or(ADMITTED);
    Verdict::Admitted
}

/// The last file descriptor is closed: the slots come back.
#[inline(always)]
pub fn released<W: Word, B: Book<Word = W>>(
    record: &SocketRecord<W>,
    state: &ListenerState<W>,
    book: &B,
) {
    let held = record.state.fetch_and(!(PENDING | ADMITTED));
    if held & PENDING != 0 {
        give_count(&state.pending, &state.errors);
    }
    if held & ADMITTED == 0 {
        return;
    }
    give_count(&state.admitted, &state.errors);
    // The total last: whoever sees a free place in it finds the others free.
    for kind in SlotKind::ALL.into_iter().rev() {
        let slot = record.slots[kind as usize].swap(0);
        if slot != 0 && !slots::give(book, (slot - 1) as u32) {
            state.errors.fetch_add(1);
        }
    }
}

/// Takes one off a count. A count of 0 stays 0 and is an error that is seen.
#[inline(always)]
fn give_count<W: Word>(count: &W, errors: &W) {
    if !take_off_one(count, u64::MAX) {
        errors.fetch_add(1);
    }
}
