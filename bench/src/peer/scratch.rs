//! What a proxy has on disk, and what it leaves behind.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

/// Told apart by it: proxies of one process.
static COUNTER: AtomicU32 = AtomicU32::new(0);

/// A folder of a proxy's own; removed when dropped, with the pins of gate.
#[derive(Debug)]
pub struct Scratch {
    /// No other proxy of this machine has this name at the same time.
    name: String,
    folder: PathBuf,
}

impl Scratch {
    /// An empty folder, which every user may read: PgBouncer does not run as root.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new(program: &str) -> Result<Self> {
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let name = format!("bench-{}-{number}", std::process::id());
        let folder = std::env::temp_dir().join(format!("gate-{name}-{program}"));
        // Made, not reused: another user's folder of this name is an error.
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        let scratch = Self { name, folder };
        // Set apart from making it, which obeys the umask.
        fs::set_permissions(&scratch.folder, fs::Permissions::from_mode(0o755))?;
        Ok(scratch)
    }

    /// A name that no other proxy of this machine has; gate's instance.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where a file of this name is.
    pub fn path(&self, file: &str) -> PathBuf {
        self.folder.join(file)
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes a file that every user may read, and says where it is.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn write(&self, file: &str, text: &str) -> Result<PathBuf> {
        let path = self.path(file);
        let failed = || format!("cannot write {}", path.display());
        fs::write(&path, text).with_context(failed)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).with_context(failed)?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let pins: Vec<PathBuf> = bpf_mounts(&mountinfo)
            .map(|mount| mount.join("gate"))
            .collect();
        for folder in pins.iter().map(|gates| gates.join(&self.name)) {
            remove(&folder);
        }
        for gates in &pins {
            // Goes only if this was the last instance.
            let _ = fs::remove_dir(gates);
        }
        remove(&self.folder);
    }
}

fn remove(folder: &Path) {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            eprintln!("gate-bench: {} is left behind: {error}", folder.display());
        }
        _ => {}
    }
}

/// Where bpf file systems are mounted: proc_pid_mountinfo(5). A mount point with
/// a blank in its name, which is escaped there, is not found.
fn bpf_mounts(mountinfo: &str) -> impl Iterator<Item = PathBuf> + '_ {
    mountinfo.lines().filter_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let point = mount.split(' ').nth(4)?;
        kind.starts_with("bpf ").then(|| point.into())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bpf_mounts_are_told_from_others() {
        let mountinfo = "\
24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 24 0:26 / /sys/fs/bpf rw,nosuid shared:9 master:1 - bpf bpf rw,mode=700
31 24 0:27 /bpf /mnt rw - tmpfs bpf rw
32 24 0:28 / /run/bpf rw - bpf none rw
";
        let found: Vec<_> = bpf_mounts(mountinfo).collect();
        assert_eq!(found, [Path::new("/sys/fs/bpf"), Path::new("/run/bpf")]);
    }

    #[test]
    fn names_and_folders_differ_and_go() {
        let (one, two) = (Scratch::new("x").unwrap(), Scratch::new("x").unwrap());
        assert_ne!(one.name(), two.name());
        let file = one.write("file", "text").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "text");
        let folder = one.folder().to_owned();
        drop(one);
        assert!(!folder.exists());
        assert!(two.folder().exists());
    }
}
