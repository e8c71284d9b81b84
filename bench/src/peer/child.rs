//! A child process that does not outlive us.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, kill_process, kill_process_group, set_parent_process_death_signal,
};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::host::namespace::enter;

/// Time to end after SIGTERM, before SIGKILL.
const ENDS_WITHIN: Duration = Duration::from_secs(5);

/// Ends when dropped, or when this process is killed.
#[derive(Debug)]
pub struct Child(std::process::Child);

impl Child {
    /// Starts a command, bound to CPUs if any are given, in a process group of its
    /// own: the terminal's Ctrl-C is ours to pass on. In a network namespace, if one
    /// is given, all else that the child sees is ours.
    ///
    /// # Errors
    /// It cannot be started, or the namespace cannot be entered.
    pub fn spawn(
        mut command: Command,
        cpus: &[usize],
        namespace: Option<BorrowedFd<'_>>,
    ) -> io::Result<Self> {
        let namespace = namespace.map(|fd| fd.try_clone_to_owned()).transpose()?;
        let mut set = CpuSet::new();
        for cpu in cpus {
            set.set(*cpu);
        }
        let bound = !cpus.is_empty();
        command.process_group(0);
        // SAFETY: between fork and exec the closure makes system calls with plain
        // numbers, a descriptor of its own and a copy of the set; it allocates
        // nothing and takes no lock.
        unsafe {
            command.pre_exec(move || {
                set_parent_process_death_signal(Some(Signal::TERM))?;
                if let Some(namespace) = &namespace {
                    enter(namespace.as_fd())?;
                }
                if bound {
                    sched_setaffinity(None, &set)?;
                }
                Ok(())
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
            // The id is still this child's, and its group's: it was not waited for. A
            // failure shows in the next turn.
            let child = Pid::from_child(&self.0);
            let _ = if begin.elapsed() > ENDS_WITHIN {
                kill_process_group(child, Signal::KILL)
            } else {
                kill_process(child, Signal::TERM)
            };
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
