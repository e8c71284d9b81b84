//! gate: the connection gate in front of PostgreSQL.
//!
//! See LIFECYCLE.md for one connection's life by symbol name.

pub mod admission;
pub mod config;
pub mod control;
pub mod host;
pub mod kernel;
pub mod ledger;
mod listeners;
pub mod proto;
pub mod ring;
mod server;
pub mod session;
pub mod state;
pub mod stats;
mod succession;
pub mod takeover;
pub mod worker;

pub use server::{RunError, Start, run};
