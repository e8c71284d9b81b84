//! The machine that the bench runs on: facts, changes for the time of a run,
//! CPUs, network devices.

pub mod facts;
pub mod namespace;
pub mod network;
pub mod nic;
pub mod queues;
pub mod veth;
