//! A folder for what a task needs while it runs.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use anyhow::{Context, Result};

/// A folder of this run alone, removed with everything in it when dropped.
pub struct Scratch {
    /// Its path; 0700.
    pub path: PathBuf,
}

impl Scratch {
    /// Makes it in the folder for temporary files, with the task's name in its own.
    pub fn new(task: &str) -> Result<Self> {
        let name = format!("gate-{task}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self { path })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.path) {
            eprintln!("xtask: {} stays behind: {error}", self.path.display());
        }
    }
}
