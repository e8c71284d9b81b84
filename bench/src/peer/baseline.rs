//! The relays that are part of the bench.

use std::env;
use std::process::Command;

use anyhow::{Context, Result};

use super::{Job, Proxy, Role, launch};
use crate::baseline::Runtime;

/// Tells the versions that this program was built with.
const LOCK_FILE: &str = include_str!("../../../Cargo.lock");

/// See [`Peer::version`](super::Peer::version).
pub fn version(runtime: Runtime) -> Result<String> {
    let name = runtime.name();
    let version = locked(LOCK_FILE, name).with_context(|| format!("Cargo.lock has no {name}"))?;
    Ok(format!("{name} {version}, in this bench"))
}

/// Starts this program once more, as a relay.
///
/// # Errors
/// It does not start, with what it said.
pub fn start(runtime: Runtime, job: &Job) -> Result<Proxy> {
    launch::start(runtime.name(), job, |job, address, _| {
        let program = env::current_exe().context("where is this program?")?;
        let mut command = Command::new(program);
        command
            .args(["baseline", runtime.name()])
            .args(["--listen", &address.to_string()])
            .args(["--backend", &job.backend.to_string()])
            .args(["--threads", &job.workers().to_string()]);
        if !job.cpus.is_empty() {
            command.arg("--pin");
        }
        match job.role {
            Role::Relay => {}
            Role::RefusePolitely => drop(command.args(["--refuse", "politely"])),
            Role::RefuseHard => drop(command.args(["--refuse", "hard"])),
        }
        Ok(command)
    })
}

/// The version of a package in a Cargo.lock.
fn locked<'a>(lock_file: &'a str, package: &str) -> Option<&'a str> {
    let head = format!("name = \"{package}\"");
    let mut lines = lock_file.lines().skip_while(|line| *line != head);
    lines
        .nth(1)?
        .strip_prefix("version = \"")?
        .strip_suffix('"')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_those_of_the_package_itself() {
        let lock_file = "[[package]]\nname = \"tokio-uring\"\nversion = \"0.5.0\"\n\n\
                         [[package]]\nname = \"tokio\"\nversion = \"1.54.1\"\n";
        assert_eq!(locked(lock_file, "tokio"), Some("1.54.1"));
        assert_eq!(locked(lock_file, "tokio-uring"), Some("0.5.0"));
        assert_eq!(locked(lock_file, "uring"), None);
        assert!(
            version(Runtime::TokioUring)
                .unwrap()
                .starts_with("tokio-uring ")
        );
    }
}
