//! The real PostgreSQL of a measurement.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use crate::cluster::Cluster;
use crate::scratch::Scratch;
use crate::{host, setup, sys};

/// What differs from PostgreSQL's defaults, and why.
///
/// - A commit does not wait for the disk (`synchronous_commit=off`, which people do run): the
///   tpcb-like rows would measure the disk otherwise, the same one behind every peer. `fsync` stays
///   on, so that the server does all of its usual work.
/// - No checkpoint falls into one round and not into the next.
/// - The pgbench tables (160 MB) fit into the server's own memory.
const SETTINGS: [&str; 5] = [
    "max_connections=300",
    "synchronous_commit=off",
    "checkpoint_timeout=1d",
    "max_wal_size=8GB",
    "shared_buffers=256MB",
];

/// pgbench's own advice is a scale of at least the number of clients; ten rows of branches keep
/// the clients of the tpcb-like rows from waiting for each other all the time.
const SCALE: u32 = 10;

/// `bench` may do what pgbench does, `refused` is never let in.
const ROLES: [&str; 3] = [
    "create role bench login",
    "grant select, insert, update, delete on all tables in schema public to bench",
    "create role refused login connection limit 0",
];

/// What a report says of it.
pub fn about(version: &str) -> String {
    let tables = match pgbench() {
        Some(_) => format!("pgbench tables at scale {SCALE}"),
        None => "no pgbench tables".to_owned(),
    };
    format!("{version}; {}; {tables}", SETTINGS.join(" "))
}

/// The pgbench of the server's own programs. What Debian has on PATH is a wrapper in Perl, whose
/// start would count as work of the client.
pub fn pgbench() -> Option<PathBuf> {
    let pgbench = setup::postgresql_bin()?.join("pgbench");
    host::is_executable(&pgbench).then_some(pgbench)
}

/// Starts a cluster with pgbench tables in the database `postgres`, which the superuser `postgres`
/// owns, and with its unix socket in this folder.
pub fn start(scratch: &Scratch, sockets: &Path) -> Result<Cluster> {
    // The last word on a setting counts.
    let sockets = format!("unix_socket_directories={}", sockets.display());
    let settings: Vec<&str> = SETTINGS.into_iter().chain([sockets.as_str()]).collect();
    let cluster = Cluster::start(scratch, &settings)?;
    cluster.make_pgbench_tables("postgres", SCALE)?;
    cluster.sql("postgres", &ROLES)?;
    // What the tables left to be written is written before anything is measured.
    cluster.sql("postgres", &["checkpoint"])?;
    ensure!(sys::signals().0 == 0, "interrupted");
    Ok(cluster)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_has_version_and_settings_in_one_line() {
        let about = about("PostgreSQL 15.14");
        assert!(about.starts_with("PostgreSQL 15.14; max_connections=300 "));
        assert!(about.contains("synchronous_commit=off"), "{about}");
        assert!(!about.contains('\n'), "{about}");
        let tables = about.contains("tables at scale 10");
        assert_eq!(tables, pgbench().is_some(), "{about}");
    }
}
