//! What a run must not leave behind of gate's own: files, pinned maps, sockets.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::host;

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
}
