//! One connection as a state machine. Pure: bytes and time in, values out.
//!
//! [`event`] is the whole contract with the worker that drives it.
#![forbid(unsafe_code)]

pub mod event;
mod machine;
pub mod outcome;

pub use machine::Session;
