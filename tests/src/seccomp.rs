//! Refuses a system call to a process, as a container's seccomp profile does.

use std::io;

/// `seccomp_data.nr` in `linux/seccomp.h`.
const NUMBER_OFFSET: u32 = 0;

/// Makes io_uring_setup(2) fail with `errno` for this process and its children,
/// for good. To be called between fork and exec: it allocates nothing.
///
/// # Errors
/// The kernel takes no filters.
pub fn refuse_io_uring(errno: i32) -> io::Result<()> {
    let code = |code: u32| code as u16;
    let refused = libc::SECCOMP_RET_ERRNO | (errno as u32 & libc::SECCOMP_RET_DATA);
    let mut program = [
        libc::sock_filter {
            code: code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS),
            jt: 0,
            jf: 0,
            k: NUMBER_OFFSET,
        },
        libc::sock_filter {
            code: code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K),
            jt: 0,
            jf: 1,
            k: libc::SYS_io_uring_setup as u32,
        },
        libc::sock_filter {
            code: code(libc::BPF_RET | libc::BPF_K),
            jt: 0,
            jf: 0,
            k: refused,
        },
        libc::sock_filter {
            code: code(libc::BPF_RET | libc::BPF_K),
            jt: 0,
            jf: 0,
            k: libc::SECCOMP_RET_ALLOW,
        },
    ];
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: both calls take numbers and one pointer to a live struct that the
    // kernel copies. Without the first one only root may call the second.
    let set = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const filter,
            ) == 0
    };
    if set {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
