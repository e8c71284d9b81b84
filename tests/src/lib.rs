//! What the privileged and end-to-end tests share.
//!
//! | module | what it holds |
//! |---|---|
//! | [`host`] | rights, ports, processes, cgroup2 and bpffs, waiting with a bound |
//! | [`suite`] | a named check per test and plane, skipped by name where it cannot run |
//! | [`binaries`] | the programs under test, built or found |
//! | [`postgres`] | a throw-away PostgreSQL cluster |
//! | [`gate`] | a running gate: start, logs, signals, restart, removal of its pins |
//! | [`observe`] | what gate says of itself: `/connections`, `/metrics`, gatectl |
//! | [`openmetrics`] | a strict reader of the metrics text |
//! | [`wire`] | packets, answers and error fields of the PostgreSQL protocol, byte for byte |
//! | [`session`] | a small client on top of [`wire`] |
//! | [`backend`] | scripted backends: trusting, silent, full, resetting, stubborn |
//! | [`pair`] | sessions of which a test holds both ends, checked bytes |
//! | [`crowd`] | many clients at once |
//! | [`kernel`] | a cgroup, network namespace and pin directory for each kernel test |
//! | [`fuzz`] | the oracles of the fuzz targets |
//! | [`sim`] | the real worker in worlds that are made by a seed |
//! | [`seccomp`] | a system call that the kernel refuses |
//! | [`clients`] | psql, pgbench and tokio-postgres with deadlines |

pub mod arrivals;
pub mod backend;
pub mod binaries;
pub mod clients;
pub mod crowd;
pub mod fuzz;
pub mod gate;
pub mod host;
pub mod kernel;
pub mod observe;
pub mod openmetrics;
pub mod pair;
mod ports;
pub mod postgres;
pub mod seccomp;
pub mod session;
pub mod sim;
pub mod suite;
pub mod wire;
