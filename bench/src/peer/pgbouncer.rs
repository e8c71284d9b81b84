//! PgBouncer, with session pooling.

use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::Result;
use rustix::process::geteuid;

use super::scratch::Scratch;
use super::{Job, REFUSED_USER, Role, program, template};

/// See [`Peer::note`](super::Peer::note).
pub const NOTE: &str = "it answers logins from memory and gives a client a server session that an \
    earlier client has left: no new session at the server is in its figures";
const CONFIG: &str = include_str!("../../peers/pgbouncer.ini");
/// Those that the loads log in as; all with trust, as nothing is said of their
/// passwords anywhere.
const USERS: [&str; 3] = ["postgres", "bench", REFUSED_USER];
/// `nobody`, whom PgBouncer runs as where the bench is root: it refuses to be root.
const NOBODY: u32 = 65534;

/// See [`Peer::version`](super::Peer::version).
pub fn version() -> Result<String> {
    program::first_line(&program::find("pgbouncer", "pgbouncer")?, "--version")
}

/// See [`Peer::cannot`](super::Peer::cannot).
pub fn cannot(role: Role) -> Option<&'static str> {
    match role {
        Role::Relay | Role::RefusePolitely => None,
        Role::RefuseHard => Some("PgBouncer refuses nobody before it has the startup packet"),
    }
}

/// PgBouncer in the foreground.
///
/// # Errors
/// It is not installed, or its configuration cannot be written.
pub fn command(job: &Job, address: SocketAddr, scratch: &Scratch) -> Result<Command> {
    let users: String = USERS
        .iter()
        .map(|user| format!("\"{user}\" \"\"\n"))
        .collect();
    let users = scratch.write("users.txt", &users)?;
    let config = scratch.write("pgbouncer.ini", &config(job, address, &users)?)?;
    let mut command = Command::new(program::find("pgbouncer", "pgbouncer")?);
    command.arg(config);
    if geteuid().is_root() {
        // Not by its own setting `user`: who changes the user of a running
        // process is not told any more when its parent dies.
        command.uid(NOBODY).gid(NOBODY);
    }
    Ok(command)
}

/// pgbouncer.ini, filled in.
pub fn config(job: &Job, address: SocketAddr, users: &Path) -> Result<String> {
    let clients = match job.role {
        Role::RefusePolitely => 0,
        Role::Relay | Role::RefuseHard => job.sessions_max(),
    };
    // It makes a socket's name of its folder and the port itself.
    let folder = job.backend_socket.as_deref().and_then(Path::parent);
    let backend = match folder {
        Some(folder) => folder.display().to_string(),
        None => job.backend.ip().to_string(),
    };
    template::fill(
        CONFIG,
        &[
            ("listen_address", address.ip().to_string()),
            ("listen_port", address.port().to_string()),
            ("backend_address", backend),
            ("backend_port", job.backend.port().to_string()),
            ("users", users.display().to_string()),
            ("clients", clients.to_string()),
            ("sessions", job.sessions_max().to_string()),
        ],
    )
}
