//! Load generators: one thread per CPU of the load, each with an epoll of its
//! own and many connections.
//!
//! An open loop sends by a schedule and times each answer from the moment its
//! request was due, sent or not: a server that stalls cannot hide it by keeping
//! the load from asking (coordinated omission). A closed loop asks again when it
//! has been answered, and finds the highest rate.

pub mod attempts;
pub mod crew;
pub mod event_loop;
pub mod pace;
pub mod requests;
pub mod session;
pub mod streams;
pub mod tally;

#[cfg(test)]
mod stall_tests;
