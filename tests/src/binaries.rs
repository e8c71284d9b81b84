//! The programs under test.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::host;

/// Where `gate`, `gatectl`, `gate-bench` and `xtask` lie: `GATE_BIN_DIR`, else the
/// target directory of this test, after a `cargo build` of these.
///
/// # Errors
/// When the build fails.
pub fn directory() -> Result<&'static Path> {
    static DIRECTORY: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    DIRECTORY
        .get_or_init(|| find_or_build().map_err(|error| format!("{error:#}")))
        .as_deref()
        .map_err(|error| anyhow::anyhow!("{error}"))
}

/// The server.
///
/// # Errors
/// When the build fails.
pub fn gate() -> Result<PathBuf> {
    Ok(directory()?.join("gate"))
}

/// The command line of the operator.
///
/// # Errors
/// When the build fails.
pub fn gatectl() -> Result<PathBuf> {
    Ok(directory()?.join("gatectl"))
}

/// The bench.
///
/// # Errors
/// When the build fails, or `GATE_BIN_DIR` has none.
pub fn gate_bench() -> Result<PathBuf> {
    there("gate-bench")
}

/// The automation.
///
/// # Errors
/// When the build fails, or `GATE_BIN_DIR` has none.
pub fn xtask() -> Result<PathBuf> {
    there("xtask")
}

fn there(name: &str) -> Result<PathBuf> {
    let program = directory()?.join(name);
    ensure!(program.is_file(), "there is no {}", program.display());
    Ok(program)
}

fn find_or_build() -> Result<PathBuf> {
    if let Some(given) = std::env::var_os("GATE_BIN_DIR") {
        let given = PathBuf::from(given);
        if !given.join("gate").is_file() {
            bail!("GATE_BIN_DIR={} holds no gate", given.display());
        }
        return Ok(given);
    }
    // target/<profile>/deps/e2e-<hash>
    let test = std::env::current_exe()?;
    let profile = test
        .parent()
        .and_then(Path::parent)
        .context("the test does not lie in a target directory")?;
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build
        .args(["build", "--quiet", "--bins"])
        .args(["--package", "gate", "--package", "gate-bench"])
        .args(["--package", "xtask"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("CARGO_TARGET_DIR", profile.parent().unwrap_or(profile));
    if profile.ends_with("release") {
        build.arg("--release");
    }
    let output = host::run(&mut build, Duration::from_secs(900))?;
    if !output.status.success() {
        bail!(
            "build gate and its bench: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(profile.to_path_buf())
}
