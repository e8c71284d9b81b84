//! The machine that the bench runs on: facts, changes for the time of a run,
//! CPUs, network devices.

pub mod facts;
