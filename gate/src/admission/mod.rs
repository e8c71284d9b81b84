//! Who waits before admission, and who has to go first. Pure.
#![forbid(unsafe_code)]

mod pending;
mod waiting;
mod wanted;

pub use pending::PendingSet;
pub use waiting::{Join, Ticket, WaitQueue, WaitsFor};
pub use wanted::WantedEvictions;
