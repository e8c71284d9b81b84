//! What a run found: as JSON, as text, as plots, beside another one.

mod command;
pub mod compare;
pub mod distribution;
mod figures;
pub mod finish;
#[cfg(test)]
mod fixture;
pub mod goals;
mod header;
pub mod hgrm;
pub mod histogram;
pub mod latency_table;
pub mod model;
pub mod plot;
pub mod text;

pub use self::command::{Options, run};
