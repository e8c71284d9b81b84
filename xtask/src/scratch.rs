//! A folder for what a task needs while it runs.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Tasks whose folders are swept.
const TASKS: [&str; 3] = ["bench", "bench-sockets", "run"];

/// A folder of this run alone, removed with everything in it when dropped.
pub struct Scratch {
    /// Its path; 0700.
    pub path: PathBuf,
}

impl Scratch {
    /// Makes it in the folder for temporary files, with the task's name in its own. What tasks that
    /// were killed have left there is removed: the bench's cluster is large.
    pub fn new(task: &str) -> Result<Self> {
        let parent = std::env::temp_dir();
        sweep(&parent);
        let path = parent.join(format!("gate-{task}-{}", std::process::id()));
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

fn sweep(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(owner);
        if owner.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            // Another user's folder stays; that user's next task removes it.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// The process that made a folder of this name. gate-bench has `gate-bench-<process>-...` for
/// itself.
fn owner(name: &str) -> Option<&str> {
    let (task, process) = name.strip_prefix("gate-")?.rsplit_once('-')?;
    let is_number = !process.is_empty() && process.bytes().all(|byte| byte.is_ascii_digit());
    (TASKS.contains(&task) && is_number).then_some(process)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_are_read_from_names_of_tasks_alone() {
        for (name, expected) in [
            ("gate-bench-12", Some("12")),
            ("gate-run-7", Some("7")),
            ("gate-bench-sockets-7", Some("7")),
            ("gate-bench-12-0-haproxy", None),
            ("gate-bench-12-0", None),
            ("gate-bench-", None),
            ("gate-bench-..", None),
            ("gate-tests-12", None),
            ("gate-run", None),
            ("run-12", None),
        ] {
            assert_eq!(owner(name), expected, "{name}");
        }
    }

    #[test]
    fn only_what_the_dead_left_is_swept() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let make = |name: String| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.join("cluster/data")).unwrap();
            path
        };
        let dead = make(format!("gate-bench-{}", child.id()));
        let other = make(format!("gate-other-{}", child.id()));
        let alive = make(format!("gate-bench-{}", std::process::id()));
        sweep(folder.path());
        assert!(!dead.exists());
        assert!(other.exists() && alive.exists());
    }
}
