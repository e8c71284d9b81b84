//! Programs to measure, and the commit that they are built from.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::instructions::BENCH;
use crate::{child, host, test};

/// Builds these packages' programs of the checkout, as they are shipped.
pub fn release(root: &Path, packages: &[&str]) -> Result<()> {
    let mut command = host::cargo();
    command.current_dir(root).args(["build", "--release"]);
    for package in packages {
        command.args(["--package", package]);
    }
    child::build(command.arg("--bins"))
}

/// Builds gate-bench as quickly as can be, for its help, and returns its path.
pub fn for_help(root: &Path) -> Result<PathBuf> {
    let mut command = host::cargo();
    command.current_dir(root);
    child::build(command.args(["build", "--package", "gate-bench", "--bins"]))?;
    built("debug", "gate-bench")
}

/// Builds gate of another checkout into a target folder of its own, and returns its path.
pub fn other_gate(checkout: &Path, target: &Path) -> Result<PathBuf> {
    let mut command = host::cargo();
    command
        .current_dir(checkout)
        .args(["build", "--release", "--package", "gate", "--bin", "gate"])
        .arg("--target-dir")
        .arg(target)
        // The kernel object of this checkout would be another one than that commit's.
        .env_remove("GATE_BPF_OBJECT");
    child::build(&mut command)?;
    Ok(target.join("release/gate"))
}

/// Builds the program that runs one hot function at a time, as gate is shipped, and returns its
/// path. `target` is a target folder other than the usual one.
pub fn instructions_program(checkout: &Path, target: Option<&Path>) -> Result<PathBuf> {
    let mut command = instructions_command(checkout);
    command.args(["--package", "gate"]);
    if let Some(target) = target {
        command.arg("--target-dir").arg(target);
        command.env_remove("GATE_BPF_OBJECT");
    }
    instructions_built(&mut command)
}

/// Builds the same without optimization, out of the crates that the tests have built already.
pub fn quick_instructions_program(checkout: &Path) -> Result<PathBuf> {
    let mut command = instructions_command(checkout);
    command.args(["--profile", "dev"]).args(test::PACKAGES);
    instructions_built(&mut command)
}

fn instructions_command(checkout: &Path) -> Command {
    let mut command = host::cargo();
    command
        .current_dir(checkout)
        .args(["bench", "--bench", BENCH, "--no-run"])
        .args(["--message-format", "json-render-diagnostics"]);
    command
}

fn instructions_built(command: &mut Command) -> Result<PathBuf> {
    let messages = child::build_output(command)?;
    messages
        .lines()
        .find_map(bench_program)
        .with_context(|| format!("cargo built no bench of the name {BENCH}"))
}

/// The executable that one line of cargo's JSON messages announces, if it is the bench.
fn bench_program(line: &str) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(line).ok()?;
    let target = &message["target"];
    let wanted = message["reason"] == "compiler-artifact"
        && target["kind"][0] == "bench"
        && target["name"] == BENCH;
    wanted.then(|| message["executable"].as_str().map(PathBuf::from))?
}

/// A program of this workspace that was built for release.
pub fn program(name: &str) -> Result<PathBuf> {
    built("release", name)
}

fn built(profile: &str, name: &str) -> Result<PathBuf> {
    let program = host::target_dir()?.join(profile).join(name);
    ensure!(
        host::is_executable(&program),
        "cargo built no {}",
        program.display()
    );
    Ok(program)
}

/// The commit of a checkout, with `-dirty` if its files differ from it; `unknown` outside of git.
pub fn commit(checkout: &Path) -> String {
    let git = |words: &[&str]| host::output(Command::new("git").current_dir(checkout).args(words));
    let Ok(hash) = git(&["rev-parse", "--short=12", "HEAD"]) else {
        return "unknown".to_owned();
    };
    let dirty = git(&["status", "--porcelain"]).is_ok_and(|files| !files.trim().is_empty());
    format!("{}{}", hash.trim(), if dirty { "-dirty" } else { "" })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::bench::worktree::tests::repository;
    use crate::scratch::Scratch;

    #[test]
    fn a_commit_is_named_and_changed_files_are_told() {
        let scratch = Scratch::new("test-commit").unwrap();
        assert_eq!(commit(&scratch.path), "unknown");
        repository(&scratch.path);
        let clean = commit(&scratch.path);
        assert_eq!(clean.len(), 12, "{clean}");
        fs::write(scratch.path.join("file"), "changed").unwrap();
        assert_eq!(commit(&scratch.path), format!("{clean}-dirty"));
    }

    #[test]
    fn the_bench_is_found_in_cargo_messages() {
        let line = r#"{"reason":"compiler-artifact","target":{"kind":["bench"],
            "name":"instructions"},"executable":"/t/release/deps/instructions-1"}"#;
        let found = bench_program(line);
        assert_eq!(found, Some(PathBuf::from("/t/release/deps/instructions-1")));
        assert_eq!(bench_program(&line.replace("bench", "bin")), None);
        assert_eq!(bench_program("Finished"), None);
    }
}
