//! What a run must not leave behind: processes, files, pinned maps, sockets.

use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::{host, sys};

/// How long a child may take to follow one signal before the next, harder one.
const PATIENCE: Duration = Duration::from_secs(5);

/// A folder of this run alone, removed with everything in it when dropped.
pub struct Scratch {
    /// Its path; 0700.
    pub path: PathBuf,
}

impl Scratch {
    /// Makes it in the folder for temporary files.
    pub fn new() -> Result<Self> {
        let path = std::env::temp_dir().join(format!("gate-run-{}", std::process::id()));
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
            eprintln!("run: {} stays behind: {error}", self.path.display());
        }
    }
}

/// Sends one signal after the other until the child has ended.
pub fn end_child(child: &mut Child, signals: &[i32]) {
    for signal in signals {
        if matches!(child.try_wait(), Ok(Some(_))) {
            return;
        }
        let _ = sys::send(child, *signal);
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if matches!(child.try_wait(), Ok(Some(_))) {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
    eprintln!("run: process {} does not end", child.id());
}

/// What gate makes for an instance outside of its own processes, if it was not there before.
pub struct Leftovers {
    /// Folders of this instance alone.
    own: Vec<PathBuf>,
    /// Folders of all instances: removed if nobody else uses them.
    shared: Vec<PathBuf>,
    had_bpffs: bool,
}

impl Leftovers {
    /// Notes what is there before gate starts: that belongs to somebody else and will stay.
    pub fn note(instance: &str) -> Self {
        let mounted = bpffs();
        let pins = mounted.as_deref().unwrap_or(Path::new("/sys/fs/bpf"));
        let shared = [pins.join("gate"), PathBuf::from("/run/gate")];
        let own = shared.clone().map(|folder| folder.join(instance));
        if own[0].exists() {
            eprintln!(
                "run: {} is there already, gate goes on with its counts; it stays when this ends",
                own[0].display()
            );
        }
        let is_new = |path: &PathBuf| !path.exists();
        Self {
            own: own.into_iter().filter(is_new).collect(),
            shared: shared.into_iter().filter(is_new).collect(),
            had_bpffs: mounted.is_some(),
        }
    }

    /// Removes the rest. Removing pinned links detaches the programs.
    pub fn remove(&self) {
        for path in self.own.iter().filter(|path| path.exists()) {
            if let Err(error) = fs::remove_dir_all(path) {
                eprintln!("run: {} stays behind: {error}", path.display());
            }
        }
        for path in &self.shared {
            // Fails on purpose if another instance has come meanwhile.
            let _ = fs::remove_dir(path);
        }
        if let Some(mounted) = bpffs()
            && !self.had_bpffs
            && !mounted.join("gate").exists()
            && host::is_root()
        {
            let _ = Command::new("umount").arg(mounted).status();
        }
    }
}

/// Where a bpffs is mounted.
fn bpffs() -> Option<PathBuf> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").ok()?;
    bpffs_in(&mountinfo)
}

fn bpffs_in(mountinfo: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        kind.starts_with("bpf ").then_some(())?;
        mount.split(' ').nth(4).map(PathBuf::from)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bpffs_is_found_in_mountinfo() {
        let mountinfo = "24 30 0:22 / /sys rw,nosuid - sysfs sysfs rw\n\
                         34 24 0:30 / /sys/fs/bpf rw,nosuid shared:9 - bpf bpf rw,mode=700\n";
        assert_eq!(bpffs_in(mountinfo), Some(PathBuf::from("/sys/fs/bpf")));
        assert_eq!(bpffs_in("24 30 0:22 / /sys rw - sysfs bpf rw\n"), None);
    }

    #[test]
    fn a_child_that_ignores_the_first_signal_ends_by_the_next() {
        let mut child = Command::new("sleep").arg("30").spawn().unwrap();
        end_child(&mut child, &[sys::KILL]);
        assert!(matches!(child.try_wait(), Ok(Some(_))));
    }
}
