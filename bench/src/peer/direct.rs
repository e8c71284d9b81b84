//! No proxy at all: what every proxy is compared to.

use super::{Job, Proxy, Role};

/// In place of a version.
pub const VERSION: &str = "no proxy";

/// See [`Peer::cannot`](super::Peer::cannot).
pub fn cannot(role: Role) -> Option<&'static str> {
    match role {
        // By a role of the server with CONNECTION LIMIT 0, for example.
        Role::Relay | Role::RefusePolitely => None,
        Role::RefuseHard => Some("PostgreSQL refuses nobody before it has the startup packet"),
    }
}

/// The server itself.
pub fn start(job: &Job) -> Proxy {
    Proxy {
        address: job.backend,
        pid: None,
        command: None,
        control: None,
        child: None,
        scratch: None,
        held: Vec::new(),
    }
}
