//! One connection as a state machine. Pure: bytes and time in, values out.
#![forbid(unsafe_code)]

pub mod outcome;
