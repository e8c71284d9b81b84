//! gate: the connection gate in front of PostgreSQL.
//!
//! See LIFECYCLE.md for one connection's life by symbol name.

pub mod config;
pub mod control;
pub mod host;
pub mod kernel;
pub mod ledger;
pub mod session;
pub mod state;
pub mod stats;
