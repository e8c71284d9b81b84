//! Shared harness.
pub mod kernel;
