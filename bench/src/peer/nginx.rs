//! nginx, by its stream module.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::launch::descriptors_needed;
use super::scratch::Scratch;
use super::{Job, Role, program, template};

const CONFIG: &str = include_str!("../../peers/nginx.conf");
/// Debian's libnginx-mod-stream, and where others put it.
const MODULES: [&str; 3] = [
    "/usr/lib/nginx/modules/ngx_stream_module.so",
    "/usr/lib64/nginx/modules/ngx_stream_module.so",
    "/usr/local/lib/nginx/modules/ngx_stream_module.so",
];

/// See [`Peer::version`](super::Peer::version).
pub fn version() -> Result<String> {
    let program = program::find("nginx", "nginx libnginx-mod-stream")?;
    module()?;
    let line = program::first_line(&program, "-v")?;
    let version = line.strip_prefix("nginx version: ").unwrap_or(&line);
    Ok(version.to_owned())
}

/// See [`Peer::cannot`](super::Peer::cannot).
pub fn cannot(role: Role) -> Option<&'static str> {
    match role {
        Role::RefusePolitely => {
            Some("nginx does not speak PostgreSQL: it can close a connection, but not say why")
        }
        Role::Relay | Role::RefuseHard => None,
    }
}

/// nginx in the foreground.
///
/// # Errors
/// It is not installed, or its configuration cannot be written.
pub fn command(job: &Job, address: SocketAddr, scratch: &Scratch) -> Result<Command> {
    let config = config(job, address, module()?)?;
    let config = scratch.write("nginx.conf", &config)?;
    let mut command = Command::new(program::find("nginx", "nginx libnginx-mod-stream")?);
    // Where it looks for its files, and where it complains before it has read
    // its configuration.
    command.args(["-e", "stderr", "-p"]).arg(scratch.folder());
    command.arg("-c").arg(config);
    Ok(command)
}

/// nginx.conf, filled in.
pub fn config(job: &Job, address: SocketAddr, module: &Path) -> Result<String> {
    let refuse = match job.role {
        Role::RefuseHard => "deny all;",
        Role::Relay | Role::RefusePolitely => "",
    };
    template::fill(
        CONFIG,
        &[
            ("module", module.display().to_string()),
            ("workers", job.workers().to_string()),
            ("affinity", affinity(&job.cpus)),
            ("descriptors", descriptors_needed(job).to_string()),
            ("connections", descriptors_needed(job).to_string()),
            ("listen", address.to_string()),
            ("backend", job.backend.to_string()),
            ("refuse", refuse.to_owned()),
        ],
    )
}

/// A mask for each worker, as nginx writes them: the last digit is CPU 0.
fn affinity(cpus: &[usize]) -> String {
    if cpus.is_empty() {
        return String::new();
    }
    let masks: Vec<_> = cpus
        .iter()
        .map(|cpu| format!("1{}", "0".repeat(*cpu)))
        .collect();
    format!("worker_cpu_affinity {};", masks.join(" "))
}

fn module() -> Result<&'static Path> {
    let found = MODULES
        .map(Path::new)
        .into_iter()
        .find(|file| file.exists());
    found.context(
        "nginx has no stream module: apt-get install libnginx-mod-stream, or `cargo xtask setup \
         --what bench` for all peers",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_have_their_cpu_counted_from_the_right() {
        assert_eq!(affinity(&[]), "");
        assert_eq!(affinity(&[0, 3]), "worker_cpu_affinity 1 1000;");
    }
}
