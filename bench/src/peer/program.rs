//! The installed programs, and what they say of themselves.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use rustix::fs::{Access, access};

/// Where Debian puts servers; not in every user's PATH.
const SERVER_FOLDERS: [&str; 3] = ["/usr/local/sbin", "/usr/sbin", "/sbin"];

/// An installed program.
///
/// # Errors
/// It is not there; says which Debian package has it.
pub fn find(program: &str, package: &str) -> Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let runs = |file: &PathBuf| file.is_file() && access(file, Access::EXEC_OK).is_ok();
    env::split_paths(&path)
        .chain(SERVER_FOLDERS.map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(runs)
        .with_context(|| {
            format!(
                "{program} is not installed: apt-get install {package}, or `cargo xtask setup \
                 --what bench` for all peers"
            )
        })
}

/// The first line that a program says, on either of its outputs.
///
/// # Errors
/// It does not run, or fails.
pub fn first_line(program: &Path, flag: &str) -> Result<String> {
    let output = Command::new(program)
        .arg(flag)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let line = said.lines().next().unwrap_or_default().trim().to_owned();
    ensure!(
        output.status.success() && !line.is_empty(),
        "{} {flag} says nothing of its version ({}): {line}",
        program.display(),
        output.status
    );
    Ok(line)
}
