//! The ways from client to server that a comparison measures.

mod child;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use anyhow::{Result, bail};

/// A way to the server that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// As reports name it.
    pub name: String,
    /// What it is.
    pub kind: Kind,
}

/// What a peer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No proxy at all.
    Direct,
    /// gate, as a program of some build.
    Gate {
        /// The program `gate`.
        program: PathBuf,
        /// Its kernel plane: `auto`, `required` or `off`.
        kernel: String,
    },
    /// HAProxy in TCP mode.
    Haproxy,
    /// PgBouncer with session pooling.
    Pgbouncer,
    /// nginx's stream proxy.
    Nginx,
    /// A small relay on tokio, part of the bench.
    Tokio,
    /// A small relay on tokio-uring, part of the bench.
    TokioUring,
}

/// What a proxy is started for.
#[derive(Clone, Debug)]
pub struct Job {
    /// Where it finds the server.
    pub backend: SocketAddr,
    /// Which address it listens on; the port is free to choose.
    pub listen: IpAddr,
    /// What it does with clients.
    pub role: Role,
    /// The CPUs that it is bound to; empty: not bound.
    pub cpus: Vec<usize>,
    /// As many sessions at once must be possible.
    pub sessions: usize,
}

/// What a proxy does with clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Every client is relayed.
    Relay,
    /// Every client of the user [`REFUSED_USER`] is refused by an ErrorResponse
    /// after its startup packet.
    RefusePolitely,
    /// Every socket is refused as early as the proxy can: none of them may reach
    /// the server, nor wait for it.
    RefuseHard,
}

/// Who is refused under [`Role::RefusePolitely`].
pub const REFUSED_USER: &str = "refused";

/// A proxy that accepts connections; ends when dropped.
pub struct Proxy {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its first process; others are its descendants. `None`: there is no proxy.
    pub pid: Option<u32>,
    /// How it was started, as one would type it.
    pub command: Option<String>,
}

impl Peer {
    /// What the installed program says of its version.
    ///
    /// # Errors
    /// Why it cannot be measured on this machine.
    pub fn version(&self) -> Result<String> {
        bail!("{}: not written yet", self.name)
    }

    /// Why it cannot play a role, such as a proxy that knows no users; `None` if
    /// it can.
    #[must_use]
    pub fn cannot(&self, role: Role) -> Option<&'static str> {
        let _ = role;
        None
    }

    /// Starts it; it accepts connections when this returns.
    ///
    /// # Errors
    /// It does not start, with what it said.
    pub fn start(&self, job: &Job) -> Result<Proxy> {
        bail!("{} for {job:?}: not written yet", self.name)
    }
}
