//! gate: the connection gate in front of PostgreSQL.
//!
//! See LIFECYCLE.md for one connection's life by symbol name.

pub mod admission;
pub mod backends;
pub mod budget;
pub mod config;
pub mod control;
pub mod host;
pub mod kernel;
pub mod ledger;
mod listeners;
pub mod placement;
pub mod proto;
pub mod ring;
mod server;
pub mod session;
pub mod sessions;
pub mod state;
pub mod stats;
mod succession;
pub mod takeover;
pub mod waiting;
pub mod worker;

pub use server::{RunError, Start, run};
