//! Advisory locks: one gate per instance, one remover per table of names.

use std::fs::{File, TryLockError};
use std::io::{self, Seek, Write};
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
    _file: File,
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
    _directory: File,
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
            Ok(Some(directory)) => Ok(Self {
                _directory: directory,
            }),
            Ok(None) => Err(InstanceLockError::Held {
                path,
                holder: "unknown".to_owned(),
            }),
            Err(source) => Err(InstanceLockError::Unavailable { path, source }),
        }
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
        let mut file = File::options()
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
        let written = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()));
        written.map_err(unavailable)?;
        Ok(Self { _file: file })
    }
}
