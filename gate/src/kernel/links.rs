//! Pinned links: attached for as long as the pin stands, replaced in one step.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::error::KernelError;
use super::pins::PinDirectory;
use super::sys::{self, AttachType};

/// Attaches a program to a cgroup and pins the link, and brings the links of
/// an earlier gate to this program: also those of other cgroups, whose sockets
/// still count on them. A link whose cgroup and sockets are gone is unpinned.
pub fn attach(
    pins: &PinDirectory,
    program: (&'static str, BorrowedFd<'_>),
    attach: AttachType,
    cgroup: &Path,
) -> Result<(), KernelError> {
    let (name, program) = program;
    let directory = File::open(cgroup)
        .map_err(|error| KernelError::io(format!("open cgroup {}", cgroup.display()), error))?;
    // The inode of a cgroup's directory is its 64-bit identity (kernfs).
    let identity = directory
        .metadata()
        .map_err(|error| KernelError::io(format!("look at cgroup {}", cgroup.display()), error))?
        .ino();
    let own = format!("{name}-{identity}");
    let mut own_is_pinned = false;
    for pin in pins.names(&format!("{name}-"))? {
        match replace(pins, &pin, program) {
            Ok(()) => own_is_pinned |= pin == own,
            Err(error) if error.raw_os_error() == Some(libc::ENOLINK) => pins.remove(&pin)?,
            Err(error) => return Err(KernelError::io(format!("replace link {pin}"), error)),
        }
    }
    if own_is_pinned {
        return Ok(());
    }
    let link = sys::link_create(program, directory.as_fd(), attach).map_err(|error| {
        KernelError::io(format!("attach {name} to {}", cgroup.display()), error)
    })?;
    sys::object_pin(link.as_fd(), &pins.join(&own))
        .map_err(|error| KernelError::io(format!("pin link {own}"), error))
}

fn replace(pins: &PinDirectory, pin: &str, program: BorrowedFd<'_>) -> io::Result<()> {
    let link = sys::object_get(&pins.join(pin))?;
    sys::link_update(link.as_fd(), program)
}
