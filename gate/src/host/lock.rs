//! Advisory locks: one gate per instance, one remover per table of names.

use std::fs::{File, TryLockError};
use std::io::{self, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

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
        "another gate (process {holder}) runs as this instance: it holds {path}; stop it, or give this one another --instance"
    )]
    Held {
        /// The lock file.
        path: PathBuf,
        /// What the file says of its holder.
        holder: String,
    },
    /// The lock file cannot be made.
    #[error(
        "{path} cannot be made: {source}; run as root, or give a --control path in a directory that this user may write"
    )]
    Unavailable {
        /// The lock file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
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
        let path = pins.join("running");
        let locked = match std::fs::create_dir(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => try_lock(&path),
        };
        match locked {
            Ok(Some(directory)) => Ok(Self { directory }),
            Ok(None) => Err(InstanceLockError::Held {
                path,
                holder: "unknown".to_owned(),
            }),
            Err(source) => Err(InstanceLockError::Unavailable { path, source }),
        }
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
        let unavailable = |source| InstanceLockError::Unavailable {
            path: path.clone(),
            source,
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
                let holder = holder.trim().to_owned();
                return Err(InstanceLockError::Held { path, holder });
            }
            Err(TryLockError::Error(source)) => return Err(unavailable(source)),
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
