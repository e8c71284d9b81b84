//! Who waits before admission, and who has to go first. Pure.
#![forbid(unsafe_code)]

mod pending;

pub use pending::PendingSet;
