//! The system calls that aya does not wrap: links that can be pinned and
//! replaced, the admission option, shared mappings, a mount.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;

use gate_common::abi::{AdmitRequest, SO_GATE_ADMIT, SOL_GATE};
use gate_common::errno::AdmitErrno;

// include/uapi/linux/bpf.h, enum bpf_cmd.
const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_OBJ_GET: libc::c_long = 7;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_LINK_UPDATE: libc::c_long = 29;

/// Where a program is attached (`enum bpf_attach_type`).
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub enum AttachType {
    /// `BPF_CGROUP_SOCK_OPS`
    SockOps = 3,
    /// `BPF_CGROUP_SETSOCKOPT`
    SetSockOpt = 22,
    /// `BPF_CGROUP_INET_SOCK_RELEASE`
    SockRelease = 34,
}

/// The head of `union bpf_attr` for each command used here.
#[repr(C)]
struct ObjectAttr {
    path: u64,
    fd: u32,
    flags: u32,
}

#[repr(C)]
struct LinkCreateAttr {
    program_fd: u32,
    target_fd: u32,
    attach_type: u32,
    flags: u32,
}

#[repr(C)]
struct LinkUpdateAttr {
    link_fd: u32,
    new_program_fd: u32,
    flags: u32,
    old_program_fd: u32,
}

/// Attaches a program to a cgroup, beside others. The link lives as long as
/// its descriptor or its pin.
pub fn link_create(
    program: BorrowedFd<'_>,
    cgroup: BorrowedFd<'_>,
    attach: AttachType,
) -> io::Result<OwnedFd> {
    let fd = bpf(
        BPF_LINK_CREATE,
        &LinkCreateAttr {
            program_fd: number(program),
            target_fd: number(cgroup),
            attach_type: attach as u32,
            flags: 0,
        },
    )?;
    // SAFETY: the call returned a new descriptor that nobody else knows.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Replaces the program of a link in one step. ENOLINK if the cgroup and all
/// of its sockets are gone.
pub fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    bpf(
        BPF_LINK_UPDATE,
        &LinkUpdateAttr {
            link_fd: number(link),
            new_program_fd: number(program),
            flags: 0,
            old_program_fd: 0,
        },
    )
    .map(drop)
}

/// Pins an object of the kernel in a bpf file system.
pub fn object_pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    bpf(
        BPF_OBJ_PIN,
        &ObjectAttr {
            path: path.as_ptr() as u64,
            fd: number(object),
            flags: 0,
        },
    )
    .map(drop)
}

/// Opens a pinned object.
pub fn object_get(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let fd = bpf(
        BPF_OBJ_GET,
        &ObjectAttr {
            path: path.as_ptr() as u64,
            fd: 0,
            flags: 0,
        },
    )?;
    // SAFETY: the call returned a new descriptor that nobody else knows.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Asks for slots on a client's socket: all of the request, or none.
///
/// # Errors
/// The first denial; [`AdmitErrno::NotOurs`] if no program of the request's
/// instance owns the socket.
pub fn admit(socket: BorrowedFd<'_>, request: &AdmitRequest) -> Result<(), AdmitErrno> {
    let bytes = request.to_bytes();
    // SAFETY: the pointer and the length describe `bytes`; the kernel only
    // reads them.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            SOL_GATE,
            SO_GATE_ADMIT,
            bytes.as_ptr().cast(),
            bytes.len() as libc::socklen_t,
        )
    };
    if result == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    Err(AdmitErrno::from_code(error.raw_os_error().unwrap_or(0)))
}

/// Maps the first `bytes` of a mappable array, shared. Null never comes back.
pub fn map_shared(map: RawFd, bytes: usize, writable: bool) -> io::Result<ptr::NonNull<u8>> {
    let protection = if writable {
        libc::PROT_READ | libc::PROT_WRITE
    } else {
        libc::PROT_READ
    };
    // SAFETY: a new mapping at an address of the kernel's choice.
    let start = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, libc::MAP_SHARED, map, 0) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    ptr::NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mmap gave address 0"))
}

/// Ends a mapping of [`map_shared`].
///
/// # Safety
/// `start` and `bytes` are one live mapping of [`map_shared`], and no
/// reference into it is used afterwards.
pub unsafe fn unmap(start: ptr::NonNull<u8>, bytes: usize) {
    // SAFETY: the caller's promise. It cannot fail then.
    unsafe { libc::munmap(start.as_ptr().cast(), bytes) };
}

/// Mounts a bpf file system that only root may enter.
pub fn mount_bpffs(target: &Path) -> io::Result<()> {
    const KIND: &CStr = c"bpf";
    let target = c_path(target)?;
    // SAFETY: all pointers are C strings that outlive the call.
    let result = unsafe {
        libc::mount(
            KIND.as_ptr(),
            target.as_ptr(),
            KIND.as_ptr(),
            libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC,
            c"mode=0700".as_ptr().cast(),
        )
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The magic number of the file system a path is on (`linux/magic.h`).
pub fn file_system_magic(path: &Path) -> io::Result<i64> {
    let path = c_path(path)?;
    let mut found = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: a C string and room for the answer.
    let result = unsafe { libc::statfs(path.as_ptr(), found.as_mut_ptr()) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded and filled it.
    Ok(unsafe { found.assume_init() }.f_type)
}

/// Waits for the exclusive lock of an open file; its close gives it back.
pub fn lock(file: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: a call on a borrowed descriptor.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Random bytes from the kernel.
pub fn random_u64() -> io::Result<u64> {
    let mut bytes = [0; 8];
    // SAFETY: the pointer and the length describe `bytes`.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got == bytes.len() as isize {
        Ok(u64::from_ne_bytes(bytes))
    } else {
        Err(io::Error::last_os_error())
    }
}

fn bpf<T>(command: libc::c_long, attr: &T) -> io::Result<RawFd> {
    // SAFETY: `attr` is the head of `union bpf_attr` for this command and its
    // size says how much of it there is; the kernel takes the rest as zero.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            ptr::from_ref(attr),
            size_of::<T>() as libc::c_long,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    RawFd::try_from(result).map_err(io::Error::other)
}

fn number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}
