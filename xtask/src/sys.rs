//! The few system calls that std has no form for: signals to and from other processes.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// SIGINT: end now.
pub const INTERRUPT: i32 = libc::SIGINT;
/// SIGTERM: end in order.
pub const TERMINATE: i32 = libc::SIGTERM;
/// SIGQUIT: PostgreSQL's immediate shutdown.
pub const QUIT: i32 = libc::SIGQUIT;
/// SIGKILL.
pub const KILL: i32 = libc::SIGKILL;

static LAST_SIGNAL: AtomicI32 = AtomicI32::new(0);
static SIGNALS_SEEN: AtomicU32 = AtomicU32::new(0);

/// From here on SIGINT, SIGTERM and SIGHUP are noted for [`signals`] and end nothing by themselves.
pub fn note_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        let handler = note as extern "C" fn(libc::c_int);
        // SAFETY: the handler only stores to atomics, which is async-signal-safe, and it lives as
        // long as the program. std has no interface to signals.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
}

/// How many signals were noted so far, and the last of them.
pub fn signals() -> (u32, i32) {
    let seen = SIGNALS_SEEN.load(Ordering::SeqCst);
    (seen, LAST_SIGNAL.load(Ordering::SeqCst))
}

/// Sends a signal to a child that has not been waited for, so its id cannot have been reused.
pub fn send(child: &Child, signal: i32) -> io::Result<()> {
    let pid = libc::pid_t::try_from(child.id()).map_err(io::Error::other)?;
    kill(pid, signal)
}

/// Sends a signal to the group of a child that leads one of its own and has not been waited for.
pub fn send_group(child: &Child, signal: i32) -> io::Result<()> {
    let pid = libc::pid_t::try_from(child.id()).map_err(io::Error::other)?;
    kill(-pid, signal)
}

fn kill(pid: libc::pid_t, signal: i32) -> io::Result<()> {
    // SAFETY: kill takes plain numbers and touches no memory of ours.
    if unsafe { libc::kill(pid, signal) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Makes the child a group of its own, so that the terminal's Ctrl-C reaches only this program,
/// and has the kernel send it `signal` should this program be killed.
pub fn own_group_and_die_with_parent(command: &mut Command, signal: i32) -> &mut Command {
    command.process_group(0);
    // SAFETY: the closure runs between fork and exec and makes one system call with plain
    // numbers; it allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, signal) == 0 {
                Ok(())
            } else {
                Err(io::Error::last_os_error())
            }
        })
    }
}

extern "C" fn note(signal: libc::c_int) {
    LAST_SIGNAL.store(signal, Ordering::SeqCst);
    SIGNALS_SEEN.fetch_add(1, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[test]
    fn a_child_ends_by_the_signal_sent() {
        let mut command = Command::new("sleep");
        let mut child = own_group_and_die_with_parent(command.arg("30"), KILL)
            .spawn()
            .unwrap();
        send(&child, TERMINATE).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(TERMINATE));
    }
}
