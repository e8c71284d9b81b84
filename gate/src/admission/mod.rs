//! Who waits before admission, and who has to go first. Pure.
#![forbid(unsafe_code)]

mod pending;
mod waiting;

pub use pending::PendingSet;
pub use waiting::{Join, Ticket, WaitQueue, WaitsFor};
