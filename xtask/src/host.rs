//! The machine and the checkout that a task runs on: paths, rights, programs, commands.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

/// The root of the checkout: the nearest folder upwards that holds `gate-ebpf/Cargo.toml`.
pub fn root() -> Result<PathBuf> {
    let here = env::current_dir().context("no current directory")?;
    here.ancestors()
        .find(|folder| folder.join("gate-ebpf/Cargo.toml").is_file())
        .map(Path::to_owned)
        .with_context(|| format!("{} is not inside a checkout of gate", here.display()))
}

/// Cargo's target folder, with any configuration of it: this very program lies in
/// `<target>/<profile>/`.
pub fn target_dir() -> Result<PathBuf> {
    let exe = env::current_exe().context("cannot find this program's own path")?;
    exe.ancestors()
        .nth(2)
        .map(Path::to_owned)
        .with_context(|| format!("{} is not in a target folder", exe.display()))
}

/// The cargo that started this task, else the one on PATH.
pub fn cargo() -> Command {
    Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Where cargo keeps registries and installed programs.
pub fn cargo_home() -> Option<PathBuf> {
    env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(Path::new(&env::var_os("HOME")?).join(".cargo")))
}

/// Whether the effective user is root.
pub fn is_root() -> bool {
    effective_uid() == Some(0)
}

/// The effective user, which owns `/proc/self`.
pub fn effective_uid() -> Option<u32> {
    fs::metadata("/proc/self").ok().map(|proc| proc.uid())
}

/// Whether this is continuous integration, where nothing may be skipped.
pub fn in_ci() -> bool {
    env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false" && value != "0")
}

/// A program on PATH or in cargo's bin folder.
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let cargo_bin = cargo_home().map(|home| home.join("bin"));
    env::split_paths(&path)
        .chain(cargo_bin)
        .map(|folder| folder.join(name))
        .find(|file| is_executable(file))
}

/// Whether `file` is a regular file that somebody may execute.
pub fn is_executable(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// A path for a person to type: relative to the current directory where that is shorter.
pub fn shown(path: &Path) -> String {
    let relative = env::current_dir()
        .ok()
        .and_then(|here| path.strip_prefix(here).ok().map(Path::to_owned));
    relative.as_deref().unwrap_or(path).display().to_string()
}

/// The command as a person would type it, without its environment.
pub fn command_line(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program.file_name().unwrap_or(program.as_os_str());
    let words = std::iter::once(name).chain(command.get_args());
    words.map(quoted).collect::<Vec<_>>().join(" ")
}

/// Announces a command, runs it with inherited output, and fails if it fails.
pub fn run(command: &mut Command) -> Result<()> {
    let line = command_line(command);
    eprintln!("+ {line}");
    let status = command
        .stdin(Stdio::null())
        .status()
        .with_context(|| format!("cannot start `{line}`"))?;
    ensure!(status.success(), "`{line}` failed: {status}");
    Ok(())
}

/// Runs a command quietly and returns what it wrote to standard output.
pub fn output(command: &mut Command) -> Result<String> {
    let line = command_line(command);
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot start `{line}`"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("`{line}` failed: {}\n{}", output.status, said.trim_end());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The files of the checkout that are not ignored, relative to `root`, sorted. Where git knows
/// nothing of it (an unpacked archive), all files but those of cargo's target folder.
pub fn checkout_files(root: &Path) -> Result<Vec<PathBuf>> {
    let listed = output(Command::new("git").current_dir(root).args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]));
    let mut files = Vec::new();
    match listed {
        Ok(paths) => files.extend(
            paths
                .split('\0')
                .filter(|path| !path.is_empty() && root.join(path).is_file())
                .map(PathBuf::from),
        ),
        Err(_) => collect_files(root, Path::new(""), &mut files)?,
    }
    files.sort();
    Ok(files)
}

fn collect_files(root: &Path, folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let path = root.join(folder);
    for entry in fs::read_dir(&path).with_context(|| path.display().to_string())? {
        let entry = entry?;
        let inside = folder.join(entry.file_name());
        let kind = entry.file_type()?;
        if kind.is_file() {
            files.push(inside);
        } else if kind.is_dir() && inside != Path::new("target") && inside != Path::new(".git") {
            collect_files(root, &inside, files)?;
        }
    }
    Ok(())
}

fn quoted(word: &OsStr) -> String {
    let text = word.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+./:,@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.into_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_can_be_pasted() {
        let mut command = Command::new("/usr/bin/psql");
        command.args(["-c", "select 'x'", ""]);
        assert_eq!(command_line(&command), r"psql -c 'select '\''x'\''' ''");
    }

    #[test]
    fn the_checkout_is_found_from_below() {
        let root = root().unwrap();
        assert!(root.join("xtask/src/host.rs").is_file());
        let files = checkout_files(&root).unwrap();
        assert!(files.contains(&PathBuf::from("xtask/src/host.rs")));

        let mut walked = Vec::new();
        collect_files(&root.join("xtask"), Path::new(""), &mut walked).unwrap();
        assert!(walked.contains(&PathBuf::from("src/host.rs")));
    }
}
