//! What gate must understand of the PostgreSQL protocol, and the few bytes it
//! may send itself. Pure: no I/O, no clock, no unsafe.
//!
//! Everything else passes unread.
#![forbid(unsafe_code)]

pub mod backend;
pub mod first_packet;
pub mod refusal;
