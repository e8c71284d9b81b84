//! Network namespaces, entered for their network alone.
//!
//! `ip netns exec` also mounts another sysfs, which hides bpffs and the cgroups:
//! gate would lose its kernel plane there.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, anyhow, bail};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Where `ip netns` keeps them.
pub const NAMES: &str = "/run/netns";

/// A network namespace with a name.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    file: File,
}

impl Namespace {
    /// One that exists.
    ///
    /// # Errors
    /// It does not.
    pub fn open(name: &str) -> Result<Self> {
        let file = File::open(Path::new(NAMES).join(name)).with_context(|| {
            format!(
                "no network namespace `{name}` can be opened; `ip netns list` shows those there are"
            )
        })?;
        Ok(Self {
            name: name.to_owned(),
            file,
        })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl AsFd for Namespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Moves the calling thread into a namespace: sockets that it makes from now on
/// are in there, those that it has stay where they are.
///
/// # Errors
/// The right is missing.
pub fn enter(namespace: BorrowedFd<'_>) -> io::Result<()> {
    move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?;
    Ok(())
}

/// Does something inside a namespace, or here if there is none.
///
/// # Errors
/// The namespace cannot be entered.
pub fn inside<T: Send>(
    namespace: Option<BorrowedFd<'_>>,
    work: impl FnOnce() -> T + Send,
) -> Result<T> {
    let Some(namespace) = namespace else {
        return Ok(work());
    };
    // A thread of its own: an error on the way back would leave this one lost.
    thread::scope(|scope| {
        let thread = scope.spawn(|| enter(namespace).map(|()| work()));
        let done = thread.join();
        let done = done.map_err(|_| anyhow!("work in a network namespace panicked"))?;
        done.context("the network namespace cannot be entered; that needs root")
    })
}

/// Runs `ip`, in a namespace if one is named, and gives what it prints.
///
/// # Errors
/// What it says, and the cure if it is known.
pub fn ip(namespace: Option<&str>, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new("ip");
    if let Some(name) = namespace {
        command.args(["-n", name]);
    }
    run(command.args(arguments))
}

/// Runs a command and gives what it prints.
pub(super) fn run(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| {
        let program = command.get_program().display();
        format!("`{program}` cannot be run; `ip` is part of the package iproute2")
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let cure = if said.contains("not permitted") || said.contains("denied") {
        "; run the bench as root"
    } else {
        ""
    };
    bail!("{command:?}: {}{cure}", said.trim());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_that_is_none_is_told_of() {
        let error = Namespace::open("gate-bench-none").expect_err("there is none");
        assert!(error.to_string().contains("`gate-bench-none`"), "{error}");
    }

    #[test]
    fn what_a_command_says_is_in_the_error() {
        let failed = |script: &str| {
            let error = run(Command::new("sh").args(["-c", script])).expect_err(script);
            error.to_string()
        };
        assert!(failed("echo no such thing >&2; exit 1").ends_with(": no such thing"));
        assert!(failed("echo Operation not permitted >&2; exit 2").ends_with("as root"));
        assert!(inside(None, || 7).is_ok_and(|seven| seven == 7));
    }
}
