//! Wakes a worker out of its ring.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd};

/// An eventfd: any thread wakes, one worker polls.
#[derive(Debug)]
pub struct Waker {
    file: File,
}

impl Waker {
    /// A fresh one.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointer is passed; the result is checked and, if it is a
        // descriptor, nobody else owns it.
        let file = unsafe {
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            File::from_raw_fd(fd)
        };
        Ok(Self { file })
    }

    /// Wakes the worker; a wake-up that is pending already is enough.
    pub fn wake(&self) {
        // The one failure is EAGAIN: the counter is full, so it is awake.
        let _ = (&self.file).write(&1_u64.to_ne_bytes());
    }

    /// Takes back all wake-ups so far. Returns whether there were any.
    pub fn clear(&self) -> bool {
        let mut count = [0; 8];
        (&self.file).read(&mut count).is_ok()
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
