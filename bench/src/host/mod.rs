//! The machine that the bench runs on: facts, settings for the time of a run,
//! CPUs, network devices, signals.

pub mod cpus;
pub mod descriptors;
pub mod facts;
pub mod interrupt;
pub mod namespace;
pub mod network;
pub mod nic;
pub mod queues;
pub mod settings;
pub mod veth;
