//! The control socket: a unix socket that only its owner may use.
#![forbid(unsafe_code)]

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use super::ControlError;

/// The bound socket; its file goes with it.
#[derive(Debug)]
pub(super) struct ControlSocket {
    path: PathBuf,
    /// Of the file that we made: another gate may have replaced it since.
    inode: u64,
    listener: Option<UnixListener>,
}

impl ControlSocket {
    /// Binds with mode 0600. A file that a dead gate left is replaced; one at
    /// which somebody answers, or that is no socket, is not.
    pub fn bind(path: &Path) -> Result<Self, ControlError> {
        let failed = |error| ControlError::Socket {
            path: path.to_owned(),
            error,
        };
        if let Some(directory) = path.parent() {
            fs::create_dir_all(directory).map_err(failed)?;
        }
        remove_stale(path)?;
        let listener = UnixListener::bind(path).map_err(failed)?;
        let made = || -> io::Result<u64> {
            fs::set_permissions(path, Permissions::from_mode(0o600))?;
            listener.set_nonblocking(true)?;
            Ok(fs::symlink_metadata(path)?.ino())
        };
        let inode = made().map_err(failed)?;
        Ok(Self {
            path: path.to_owned(),
            inode,
            listener: Some(listener),
        })
    }

    /// The listener, once. It does not block.
    pub fn listener(&mut self) -> io::Result<UnixListener> {
        self.listener
            .take()
            .ok_or_else(|| io::Error::other("the listener was taken before"))
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        let ours = fs::symlink_metadata(&self.path).is_ok_and(|file| file.ino() == self.inode);
        if ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "the control socket stays behind");
        }
    }
}

fn remove_stale(path: &Path) -> Result<(), ControlError> {
    let failed = |error| ControlError::Socket {
        path: path.to_owned(),
        error,
    };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
        Ok(file) if !file.file_type().is_socket() => {
            return Err(failed(io::Error::other(
                "there is a file that is no socket",
            )));
        }
        Ok(_) => {}
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).map_err(failed)
        }
        Err(error) => Err(failed(error)),
        Ok(_) => Err(ControlError::Answered {
            path: path.to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_file_is_replaced_and_a_living_one_is_not() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("deep/control.sock");
        let first = ControlSocket::bind(&path).expect("bound");
        let mode = fs::symlink_metadata(&path)
            .expect("made")
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = ControlSocket::bind(&path).expect_err("somebody answers");
        assert!(matches!(error, ControlError::Answered { .. }), "{error}");
        drop(first);
        assert!(!path.exists(), "removed at the end");

        drop(UnixListener::bind(&path).expect("a stale file"));
        assert!(path.exists());
        let second = ControlSocket::bind(&path).expect("replaced");
        // Somebody else replaces the file: it is not ours to remove.
        fs::remove_file(&path).expect("removed");
        let _other = UnixListener::bind(&path).expect("bound");
        drop(second);
        assert!(path.exists());
    }

    #[test]
    fn what_is_no_socket_stays() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("file");
        fs::write(&path, "precious").expect("written");
        let error = ControlSocket::bind(&path)
            .expect_err("no socket")
            .to_string();
        assert!(error.contains("no socket"), "{error}");
        assert!(path.exists());
    }
}
