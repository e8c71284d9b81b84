//! What a proxy has on disk, and what it leaves behind.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

/// Told apart by it: proxies of one process.
static COUNTER: AtomicU32 = AtomicU32::new(0);
/// Of names, before our process and a number.
const PREFIX: &str = "bench-";
/// Of folders, before the same and the program.
const FOLDER_PREFIX: &str = "gate-bench-";

/// A folder of a proxy's own; removed when dropped, with the pins of gate.
#[derive(Debug)]
pub struct Scratch {
    /// No other proxy of this machine has this name at the same time.
    name: String,
    folder: PathBuf,
    /// Whether gate may have pinned maps under this name.
    has_pins: bool,
}

impl Scratch {
    /// An empty folder, which every user may read: PgBouncer does not run as root.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new(program: &str) -> Result<Self> {
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let unique = format!("{}-{number}", std::process::id());
        let name = format!("{PREFIX}{unique}");
        let folder = std::env::temp_dir().join(format!("{FOLDER_PREFIX}{unique}-{program}"));
        // Made, not reused: another user's folder of this name is an error.
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        let has_pins = program == "gate";
        let scratch = Self {
            name,
            folder,
            has_pins,
        };
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

    /// Copies the files whose names end in one of `endings` into another folder.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn copy_files(&self, endings: &[&str], to: &Path) -> Result<()> {
        for file in fs::read_dir(&self.folder)? {
            let file = file?.path();
            let ending = file.extension().and_then(|ending| ending.to_str());
            if let (Some(ending), Some(name)) = (ending, file.file_name())
                && endings.contains(&ending)
            {
                fs::create_dir_all(to)?;
                fs::copy(&file, to.join(name))
                    .with_context(|| format!("cannot keep {}", file.display()))?;
            }
        }
        Ok(())
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
        remove(&self.folder);
        if !self.has_pins {
            return;
        }
        for gates in pin_folders() {
            remove(&gates.join(&self.name));
            // Goes only if this was the last instance.
            let _ = fs::remove_dir(gates);
        }
    }
}

/// Removes what a bench that was killed has left: pins of gate, which cost every
/// socket of the machine a little, and folders.
pub fn sweep() {
    let pins = pin_folders().into_iter().map(|gates| (gates, PREFIX));
    let folders = (std::env::temp_dir(), FOLDER_PREFIX);
    for (parent, prefix) in pins.chain([folders]) {
        for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
            let dead = entry
                .file_name()
                .to_str()
                .and_then(|name| owner(name, prefix))
                .is_some_and(|process| !Path::new("/proc").join(process).exists());
            if dead {
                remove(&entry.path());
            }
        }
    }
}

/// The process that a name was made by.
fn owner<'a>(name: &'a str, prefix: &str) -> Option<&'a str> {
    let (process, number) = name.strip_prefix(prefix)?.split_once('-')?;
    let numeric = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let number = number.split('-').next()?;
    (numeric(process) && numeric(number)).then_some(process)
}

/// Where the instances of gate have their pins.
fn pin_folders() -> Vec<PathBuf> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts = bpf_mounts(&mountinfo);
    mounts.map(|mount| mount.join("gate")).collect()
}

fn remove(folder: &Path) {
    match fs::remove_dir_all(folder) {
        // Without root nobody sees into bpffs, and has no pins there either.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && is_pin(folder) => {}
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            eprintln!("gate-bench: {} is left behind: {error}", folder.display());
        }
        _ => {}
    }
}

fn is_pin(folder: &Path) -> bool {
    pin_folders().iter().any(|gates| folder.starts_with(gates))
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
    fn owners_are_read_from_names_of_the_bench_alone() {
        for (name, expected) in [
            ("bench-12-3", Some("12")),
            ("bench-12-3-gate", Some("12")),
            ("bench-12", None),
            ("bench--3", None),
            ("bench-12-x", None),
            ("bench-..-3", None),
            ("default", None),
        ] {
            assert_eq!(owner(name, PREFIX), expected, "{name}");
        }
    }

    #[test]
    fn only_what_the_dead_left_is_swept() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let name = format!("{FOLDER_PREFIX}{}-0-x", child.id());
        let dead = std::env::temp_dir().join(name);
        fs::create_dir(&dead).unwrap();
        let ours = Scratch::new("swept").unwrap();
        sweep();
        assert!(!dead.exists());
        assert!(ours.folder().exists());
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
