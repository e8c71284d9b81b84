//! HAProxy, as a plain TCP proxy.

use std::net::SocketAddr;
use std::process::Command;

use anyhow::Result;

use super::scratch::Scratch;
use super::{Job, Role, program, template};

const CONFIG: &str = include_str!("../../peers/haproxy.cfg");

/// See [`Peer::version`](super::Peer::version).
pub fn version() -> Result<String> {
    let line = program::first_line(&program::find("haproxy", "haproxy")?, "-v")?;
    // Behind it is the address of the web site.
    let version = line.split(" - ").next().unwrap_or_default();
    Ok(version.to_owned())
}

/// See [`Peer::cannot`](super::Peer::cannot).
pub fn cannot(role: Role) -> Option<&'static str> {
    match role {
        Role::RefusePolitely => {
            Some("HAProxy does not speak PostgreSQL: it can close a connection, but not say why")
        }
        Role::Relay | Role::RefuseHard => None,
    }
}

/// HAProxy in the foreground.
///
/// # Errors
/// It is not installed, or its configuration cannot be written.
pub fn command(job: &Job, address: SocketAddr, scratch: &Scratch) -> Result<Command> {
    let config = scratch.write("haproxy.cfg", &config(job, address)?)?;
    let mut command = Command::new(program::find("haproxy", "haproxy")?);
    command.args(["-db", "-f"]).arg(config);
    Ok(command)
}

/// haproxy.cfg, filled in.
pub fn config(job: &Job, address: SocketAddr) -> Result<String> {
    let cpus: Vec<_> = job.cpus.iter().map(usize::to_string).collect();
    let cpu_map = match cpus.len() {
        0 => String::new(),
        // A thread at a time (`cpu-map 1/2 3`) is accepted by 2.6, and has no effect.
        threads => format!("cpu-map auto:1/1-{threads} {}", cpus.join(" ")),
    };
    let refuse = match job.role {
        Role::RefuseHard => "tcp-request connection reject",
        Role::Relay | Role::RefusePolitely => "",
    };
    let backend = match &job.backend_socket {
        Some(socket) => format!("unix@{}", socket.display()),
        None => job.backend.to_string(),
    };
    template::fill(
        CONFIG,
        &[
            ("threads", job.workers().to_string()),
            ("cpu_map", cpu_map),
            ("sessions", job.sessions_max().to_string()),
            ("listen", address.to_string()),
            ("backend", backend),
            ("refuse", refuse.to_owned()),
        ],
    )
}
