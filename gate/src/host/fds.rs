//! File descriptors and CPUs of this process.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

/// Descriptors that one session needs: its client and its backend.
pub const FDS_PER_SESSION: u64 = 2;
/// Descriptors that gate opens after its budget is drawn up, workers aside: the
/// control plane's runtime and sockets, what is to be handed over, locks.
const CONTROL_OWN: u64 = 20;
/// Descriptors kept for what the control plane has at a time: requests at both of
/// its sockets, checks of backends' addresses, a reload, a gate that takes over.
const CONTROL_RESERVE: u64 = 32;
/// Descriptors kept for a load of the kernel programs: a gate that nobody took
/// over from after all steers its sockets again, however full it is.
const LOAD_RESERVE: u64 = 20;
/// Descriptors kept so that a full gate can still answer politely.
pub const POLITE_RESERVE: u64 = 16;

/// Descriptors of a pipe.
const FDS_PER_PIPE: u64 = 2;
/// Pipes of all workers at most. The kernel gives a user without
/// CAP_SYS_RESOURCE 16,384 pages for all pipes (`fs.pipe-user-pages-soft`): 64 of
/// 1 MiB.
pub const PIPES_MAX: usize = 64;
/// A process gets a pipe for so many descriptors that it may hold.
const FDS_FOR_A_PIPE: u64 = 128;

/// How many descriptors there are, and how many sessions may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FdBudget {
    /// RLIMIT_NOFILE, after it was raised.
    pub limit: u64,
    /// What all sessions together may hold.
    pub sessions: u64,
    /// Pipes that all sessions together may use.
    pub pipes: usize,
}

impl FdBudget {
    /// The budget of a process that holds `open` descriptors with those of its
    /// workers. `None` if not one session fits beside a client that is pending.
    #[must_use]
    pub fn new(limit: u64, open: u64) -> Option<Self> {
        let pipes = (limit / FDS_FOR_A_PIPE).min(PIPES_MAX as u64);
        let kept = open
            + CONTROL_OWN
            + CONTROL_RESERVE
            + LOAD_RESERVE
            + POLITE_RESERVE
            + pipes * FDS_PER_PIPE;
        let sessions = limit.checked_sub(kept)?;
        (sessions >= 2 * FDS_PER_SESSION).then_some(Self {
            limit,
            sessions,
            pipes: pipes as usize,
        })
    }

    /// How many sessions that are.
    #[must_use]
    pub const fn sessions_max(&self) -> u64 {
        self.sessions / FDS_PER_SESSION
    }
}

/// Raises the soft limit on descriptors to the hard one. Returns the limit.
///
/// # Errors
/// The system refuses to tell or to raise it.
pub fn raise_fd_limit() -> io::Result<u64> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a valid rlimit for the kernel to fill.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: `limit` is a valid rlimit for the kernel to read.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(limit.rlim_cur)
}

/// How many descriptors this process holds.
///
/// # Errors
/// /proc is not mounted, or no descriptor is left to read it.
pub fn count_open_fds() -> io::Result<u64> {
    // The directory's own descriptor is one of those listed.
    Ok(std::fs::read_dir("/proc/self/fd")?.count() as u64 - 1)
}

/// The CPUs that this process may run on.
///
/// # Errors
/// The system refuses to tell.
pub fn allowed_cpus() -> io::Result<Vec<usize>> {
    // SAFETY: an all-zero cpu_set_t is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is a valid cpu_set_t for the kernel to fill.
    let result = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    let is_allowed = |cpu: &usize| {
        // SAFETY: `cpu` is below CPU_SETSIZE.
        unsafe { libc::CPU_ISSET(*cpu, &set) }
    };
    Ok((0..libc::CPU_SETSIZE as usize).filter(is_allowed).collect())
}

/// Keeps the calling thread on one CPU.
///
/// # Errors
/// The CPU does not exist or is not allowed to this process.
pub fn pin_to_cpu(cpu: usize) -> io::Result<()> {
    // SAFETY: an all-zero cpu_set_t is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: `cpu` is below CPU_SETSIZE, and `set` outlives both calls.
    let result = unsafe {
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Has the kernel prefer this listening socket, among those of its SO_REUSEPORT
/// group, for connections whose packets are handled on a CPU; `None` for none.
///
/// # Errors
/// The socket takes no such option.
pub fn prefer_incoming_cpu(socket: BorrowedFd<'_>, cpu: Option<usize>) -> io::Result<()> {
    // -1 is no preference (sk_incoming_cpu in include/net/sock.h).
    let cpu = cpu.map_or(Ok(-1), libc::c_int::try_from);
    let cpu = cpu.map_err(io::Error::other)?;
    // SAFETY: the pointer and the length describe `cpu`; the kernel only reads
    // it.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_INCOMING_CPU,
            (&raw const cpu).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_without_room_for_a_session_is_none() {
        assert_eq!(FdBudget::new(64, 40), None);
        // 88 are kept, and there is one pipe.
        assert_eq!(FdBudget::new(40 + 88 + 2 + 3, 40), None);
        assert_eq!(FdBudget::new(40 + 88 + 2 + 4, 40).unwrap().sessions, 4);
        let budget = FdBudget::new(1000, 40).unwrap();
        assert_eq!(budget.pipes, 7);
        assert_eq!(budget.sessions, 1000 - 40 - 88 - 14);
        assert_eq!(FdBudget::new(20_000, 40).unwrap().pipes, PIPES_MAX);
    }

    #[test]
    fn open_descriptors_are_counted() {
        let before = count_open_fds().unwrap();
        let file = std::fs::File::open("/proc/self/status").unwrap();
        // Other tests of this process open and close files meanwhile.
        assert!(count_open_fds().unwrap() + 20 > before);
        drop(file);
    }
}
