//! Advisory locks: one gate per instance, one remover per table of names.

use std::fs::{File, TryLockError};
use std::io::{self, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The lock in the directory of an instance's pins.
const PINS_LOCK: &str = "running";
/// For [`PinsLock::is_held`] of another process, which has the lock for a moment.
const LOOKER_PATIENCE: Duration = Duration::from_millis(100);

/// Locks a file or directory. `None` if another holder has it; the lock ends
/// with the returned file.
///
/// # Errors
/// The path cannot be opened or does not take locks.
pub fn try_lock(path: &Path) -> io::Result<Option<File>> {
    let file = File::open(path)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Holds the name of an instance while the process lives.
#[derive(Debug)]
pub struct InstanceLock {
    file: File,
}

/// Why an instance's name could not be had.
#[derive(Debug, thiserror::Error)]
pub enum InstanceLockError {
    /// Another gate runs under it.
    #[error(
        "another gate{} runs as this instance: it holds {path}; stop it, or give this one another --instance",
        process(holder.as_deref())
    )]
    Held {
        /// The lock file.
        path: PathBuf,
        /// The process that holds it, where that can be known.
        holder: Option<String>,
    },
    /// The lock file cannot be made.
    #[error(
        "{path} cannot be made: {error}; run as root, or give a --control path in a directory that this user may write"
    )]
    Unavailable {
        /// The lock file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

impl InstanceLockError {
    /// Whether the host denies this user a right (exit code 3).
    #[must_use]
    pub fn is_host(&self) -> bool {
        match self {
            Self::Held { .. } => false,
            Self::Unavailable { error, .. } => error.kind() == io::ErrorKind::PermissionDenied,
        }
    }
}

fn process(holder: Option<&str>) -> String {
    holder.map_or(String::new(), |holder| format!(" (process {holder})"))
}

/// Holds the pinned maps of an instance while the process lives: two gates with
/// control sockets in different places are still two gates on one ledger.
#[derive(Debug)]
pub struct PinsLock {
    directory: File,
}

impl PinsLock {
    /// Takes the lock of the maps pinned in a directory. It is a directory of
    /// its own there: bpffs has no files, and the pins' own is the lock of
    /// whoever changes names.
    ///
    /// # Errors
    /// See [`InstanceLockError`].
    pub fn take(pins: &Path) -> Result<Self, InstanceLockError> {
        let path = pins.join(PINS_LOCK);
        let started = Instant::now();
        let locked = loop {
            let locked = match std::fs::create_dir(&path) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
                _ => try_lock(&path),
            };
            match locked {
                Ok(None) if started.elapsed() < LOOKER_PATIENCE => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                locked => break locked,
            }
        };
        match locked {
            Ok(Some(directory)) => Ok(Self { directory }),
            Ok(None) => Err(InstanceLockError::Held { path, holder: None }),
            Err(error) => Err(InstanceLockError::Unavailable { path, error }),
        }
    }

    /// Whether a gate runs on the maps pinned in a directory.
    #[must_use]
    pub fn is_held(pins: &Path) -> bool {
        let file = File::open(pins.join(PINS_LOCK));
        file.is_ok_and(|file| matches!(file.try_lock_shared(), Err(TryLockError::WouldBlock)))
    }

    /// Shares the lock of another gate, which passed its descriptor: the lock
    /// is the open file's, and free when both have closed it.
    #[must_use]
    pub fn inherit(directory: OwnedFd) -> Self {
        Self {
            directory: directory.into(),
        }
    }
}

impl From<PinsLock> for OwnedFd {
    fn from(lock: PinsLock) -> Self {
        lock.directory.into()
    }
}

impl InstanceLock {
    /// Takes an instance's lock file in a directory, which is made if it is
    /// missing.
    ///
    /// # Errors
    /// See [`InstanceLockError`].
    pub fn take(directory: &Path, instance: &str) -> Result<Self, InstanceLockError> {
        let path = directory.join(format!("{instance}.lock"));
        let unavailable = |error| InstanceLockError::Unavailable {
            path: path.clone(),
            error,
        };
        std::fs::create_dir_all(directory).map_err(unavailable)?;
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(unavailable)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let holder = io::read_to_string(file).unwrap_or_default();
                let holder = Some(holder.trim().to_owned());
                return Err(InstanceLockError::Held {
                    path,
                    holder: holder.filter(|holder| !holder.is_empty()),
                });
            }
            Err(TryLockError::Error(error)) => return Err(unavailable(error)),
        }
        let lock = Self { file };
        lock.sign().map_err(unavailable)?;
        Ok(lock)
    }

    /// Shares the lock of another gate, which passed its descriptor. It names
    /// that one until [`InstanceLock::sign`].
    #[must_use]
    pub fn inherit(file: OwnedFd) -> Self {
        Self { file: file.into() }
    }

    /// Writes this process into the file.
    ///
    /// # Errors
    /// The file system takes no bytes.
    pub fn sign(&self) -> io::Result<()> {
        let mut file = &self.file;
        file.set_len(0)?;
        file.rewind()?;
        writeln!(file, "{}", std::process::id())
    }
}

impl From<InstanceLock> for OwnedFd {
    fn from(lock: InstanceLock) -> Self {
        lock.file.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_seen_without_being_taken() {
        let pins = tempfile::tempdir().expect("a directory");
        assert!(!PinsLock::is_held(pins.path()), "nobody ever had it");
        let lock = PinsLock::take(pins.path()).expect("free");
        assert!(PinsLock::is_held(pins.path()));
        let error = PinsLock::take(pins.path()).expect_err("held").to_string();
        assert!(error.starts_with("another gate runs as"), "{error}");
        drop(lock);
        assert!(!PinsLock::is_held(pins.path()));
        PinsLock::take(pins.path()).expect("free again");
    }

    #[test]
    fn an_instance_names_its_holder_and_says_its_cause_once() {
        let directory = tempfile::tempdir().expect("a directory");
        let _lock = InstanceLock::take(directory.path(), "it").expect("free");
        let error = InstanceLock::take(directory.path(), "it").expect_err("held");
        let process = format!("(process {})", std::process::id());
        assert!(error.to_string().contains(&process), "{error}");
        assert!(!error.is_host(), "another gate is no fault of the host");
        let file = directory.path().join("it.lock");
        let error = InstanceLock::take(&file, "it").expect_err("no directory");
        let text = format!("{:#}", anyhow::Error::from(error));
        assert_eq!(text.matches("os error").count(), 1, "{text}");
        let denied = InstanceLockError::Unavailable {
            path: file,
            error: io::ErrorKind::PermissionDenied.into(),
        };
        assert!(denied.is_host());
    }
}
