//! The file of a unix socket, which goes with its owner.
#![forbid(unsafe_code)]

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A socket's file, for its owner alone; removed when this is dropped.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Of the file that is ours: another gate may have replaced it since.
    inode: u64,
    kept: bool,
}

impl SocketFile {
    /// Takes charge of the file of a socket that was bound or inherited.
    ///
    /// # Errors
    /// There is no such file, or it is another user's.
    pub fn of(path: &Path) -> io::Result<Self> {
        fs::set_permissions(path, Permissions::from_mode(0o600))?;
        Ok(Self {
            path: path.to_owned(),
            inode: fs::symlink_metadata(path)?.ino(),
            kept: false,
        })
    }

    /// Leaves the file where it is when this is dropped: it is another gate's.
    pub const fn keep(&mut self) {
        self.kept = true;
    }

    /// Removes the file after all when this is dropped.
    pub const fn own(&mut self) {
        self.kept = false;
    }

    /// Removes a file at which `connect` finds nobody, left by a dead gate.
    /// Returns whether the path is free then.
    ///
    /// # Errors
    /// What is there is no socket, or cannot be looked at.
    pub fn remove_stale<T>(
        path: &Path,
        connect: impl FnOnce(&Path) -> io::Result<T>,
    ) -> io::Result<bool> {
        match fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(true),
            Err(error) => return Err(error),
            Ok(file) if !file.file_type().is_socket() => {
                return Err(io::Error::other("there is a file that is no socket"));
            }
            Ok(_) => {}
        }
        match connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                fs::remove_file(path)?;
                Ok(true)
            }
            Err(error) => Err(error),
            Ok(_) => Ok(false),
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path).is_ok_and(|file| file.ino() == self.inode);
        if ours
            && !self.kept
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "a socket stays behind");
        }
    }
}
