//! What gate's kernel programs and userspace share: the layout of the pinned
//! maps (the ABI) and the pure rules that run on both sides.
//!
//! | module | what it holds |
//! |---|---|
//! | [`abi`] | map names, indices, `repr(C)` values with their size asserts, the setsockopt request |
//! | [`word`] | the one atomic 64-bit word that every rule is written against |
//! | [`limit`] | how a limit is encoded, overridden, inherited |
//! | [`cells`] | the listener's ceiling: tokens in a pool and in one cell per CPU |
//! | [`slots`] | admission: total, user, database and backend slots, all or none |
//! | [`errno`] | how an admission's answer crosses from the kernel |
//! | [`steer`] | which worker a new connection goes to |
//! | [`record`] | one socket's record: what it holds and how each event gives it back |
//!
//! Nothing here does I/O, reads a clock or allocates. The rules are generic
//! over [`word::Word`], so the very same code runs on BPF instructions, on
//! `AtomicU64` in userspace and on loom's model-checked atomics.
#![no_std]
#![cfg_attr(not(feature = "user"), forbid(unsafe_code))]

#[cfg(test)]
extern crate std;

pub mod abi;
pub mod cells;
pub mod errno;
pub mod limit;
pub mod record;
pub mod slots;
pub mod steer;
pub mod word;
