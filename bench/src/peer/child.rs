//! A child process that does not outlive us.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

/// Time to end after SIGTERM, before SIGKILL.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// Ends when dropped, or when this process is killed.
pub struct Child(std::process::Child);

impl Child {
    /// Starts a command.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn spawn(mut command: Command) -> io::Result<Self> {
        // SAFETY: between fork and exec only prctl is called, which is
        // async-signal-safe and touches no memory.
        unsafe {
            command.pre_exec(|| {
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) == 0 {
                    Ok(())
                } else {
                    Err(io::Error::last_os_error())
                }
            });
        }
        command.spawn().map(Self)
    }

    /// Its process.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// Whether it has ended.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn has_ended(&mut self) -> io::Result<bool> {
        Ok(self.0.try_wait()?.is_some())
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let begin = Instant::now();
        while matches!(self.0.try_wait(), Ok(None)) {
            // The id is still this child's: it was not waited for.
            let signal = if begin.elapsed() > ENDS_WITHIN {
                libc::SIGKILL
            } else {
                libc::SIGTERM
            };
            if let Ok(pid) = libc::pid_t::try_from(self.0.id()) {
                // SAFETY: kill takes two numbers.
                unsafe { libc::kill(pid, signal) };
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
