//! gate itself, as a program of some build and an instance of its own.

use std::io::{ErrorKind, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::scratch::Scratch;
use super::{Job, Proxy, REFUSED_USER, Role, launch, program, template};

/// Of the control socket, in gate's folder.
const CONTROL: &str = "control.sock";
const CONFIG: &str = include_str!("../../peers/gate.toml");
/// A CancelRequest for nobody's session (src/include/libpq/pqcomm.h: length,
/// CANCEL_REQUEST_CODE, process, key).
const CANCEL_REQUEST: [u8; 16] = [0, 0, 0, 16, 4, 210, 22, 46, 0, 0, 0, 0, 0, 0, 0, 0];

/// See [`Peer::version`](super::Peer::version).
pub fn version(program: &Path) -> Result<String> {
    program::first_line(program, "--version")
        .context("build it with `cargo build --release -p gate`")
}

/// See [`Peer::cannot`](super::Peer::cannot).
pub fn cannot(role: Role, kernel: &str) -> Option<&'static str> {
    (role == Role::RefuseHard && kernel == "off")
        .then_some("it is the kernel plane that refuses hard, and it is off")
}

/// Starts gate in front of the server.
///
/// # Errors
/// It does not start, with what it said.
pub fn start(program: &Path, kernel: &str, job: &Job) -> Result<Proxy> {
    if job.role == Role::RefuseHard {
        return start_full(program, job);
    }
    let mut control = PathBuf::new();
    let mut proxy = launch::start("gate", job, |job, address, scratch| {
        control = scratch.path(CONTROL);
        command(program, kernel, job, address, scratch)
    })?;
    // Clients can connect before its workers run: its start is no part of a
    // measurement, and who asks for its workers finds them.
    proxy.wait("has no control socket that answers", || {
        Ok(UnixStream::connect(&control).ok())
    })?;
    proxy.control = Some(control);
    Ok(proxy)
}

/// Starts gate with one socket more than it allows, so that the kernel resets
/// whoever comes.
///
/// gate closes a silent socket over the ceiling after two seconds. One that asks for
/// a cancel stays for as long as the server takes, and this server never answers.
fn start_full(program: &Path, job: &Job) -> Result<Proxy> {
    let server = TcpListener::bind((job.backend.ip(), 0))?;
    let job = Job {
        backend: server.local_addr()?,
        backend_socket: None,
        ..job.clone()
    };
    let (mut proxy, mut first) = launch::start_held("gate", &job, |job, address, scratch| {
        command(program, "required", job, address, scratch)
    })?;
    first.write_all(&CANCEL_REQUEST)?;
    let address = proxy.address;
    proxy.wait("resets nobody", || match TcpStream::connect(address) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(Some(())),
        _ => Ok(None),
    })?;
    proxy.held.extend([first.into(), server.into()]);
    Ok(proxy)
}

fn command(
    program: &Path,
    kernel: &str,
    job: &Job,
    address: SocketAddr,
    scratch: &Scratch,
) -> Result<Command> {
    let config = scratch.write("gate.toml", &config(job)?)?;
    let mut command = Command::new(program);
    command
        .arg("--config")
        .arg(config)
        .args(["--listen", &address.to_string()])
        .args(["--backend", &job.backend_word()])
        .args(["--workers", &job.workers().to_string()])
        .args(["--instance", scratch.name()])
        .args(["--kernel", kernel])
        .arg("--control")
        .arg(scratch.path(CONTROL))
        .args(["--admin", "off"]);
    Ok(command)
}

/// Clients that have not spoken yet. Their descriptors are kept beside those of
/// the sessions, of which 9,000 nearly fill the usual limit.
const PENDING_MAX: usize = 512;

/// gate.toml, filled in.
pub fn config(job: &Job) -> Result<String> {
    let (ceiling, headroom) = match job.role {
        Role::RefuseHard => ("\"none\"", "1"),
        Role::Relay | Role::RefusePolitely => ("\"auto\"", "\"auto\""),
    };
    let refused = match job.role {
        Role::RefusePolitely => format!("{REFUSED_USER} = \"none\""),
        Role::Relay | Role::RefuseHard => String::new(),
    };
    let pin = if job.cpus.is_empty() { "none" } else { "cpus" };
    template::fill(
        CONFIG,
        &[
            ("sessions", job.sessions_max().to_string()),
            ("pending", job.sessions_max().min(PENDING_MAX).to_string()),
            ("ceiling", ceiling.to_owned()),
            ("headroom", headroom.to_owned()),
            ("refused", refused),
            ("pin", pin.to_owned()),
        ],
    )
}
