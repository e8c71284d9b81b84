//! The control socket: a unix socket that only its owner may use.
#![forbid(unsafe_code)]

use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use super::ControlError;
use crate::host::SocketFile;

/// The bound socket with its file.
#[derive(Debug)]
pub(super) struct ControlSocket {
    pub listener: UnixListener,
    pub file: SocketFile,
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
        if !SocketFile::remove_stale(path, |path| UnixStream::connect(path)).map_err(failed)? {
            return Err(ControlError::Answered {
                path: path.to_owned(),
            });
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        let mut socket = Self::inherit(path, listener)?;
        socket.file.own();
        Ok(socket)
    }

    /// Shares a socket that listens at the path. Its file stays until it is this
    /// gate's own.
    pub fn inherit(path: &Path, listener: UnixListener) -> Result<Self, ControlError> {
        let failed = |error| ControlError::Socket {
            path: path.to_owned(),
            error,
        };
        listener.set_nonblocking(true).map_err(failed)?;
        let mut file = SocketFile::of(path).map_err(failed)?;
        file.keep();
        Ok(Self { listener, file })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

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
        fs::remove_file(&path).expect("removed");

        let mut left = ControlSocket::bind(&path).expect("bound");
        let listener = left.listener.try_clone().expect("a descriptor");
        let mut heir = ControlSocket::inherit(&path, listener).expect("inherited");
        left.file.keep();
        drop(left);
        UnixStream::connect(&path).expect("it still listens");
        heir.file.own();
        drop(heir);
        assert!(!path.exists(), "the heir removes it");
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
