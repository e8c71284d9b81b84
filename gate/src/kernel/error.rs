//! What can go wrong with the kernel plane: each with its cause and its cure.

use std::io;
use std::path::PathBuf;

use aya::EbpfError;
use aya::programs::ProgramError;

/// A fault of the kernel plane.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The name cannot be a directory of pins.
    #[error("instance name `{0}` is not allowed: use 1 to 32 of a-z, 0-9, `-` and `_`")]
    BadInstance(String),
    /// There are no pins of this instance.
    #[error(
        "there is no instance `{instance}` in the kernel: start gate, or name another instance"
    )]
    NoInstance {
        /// The instance asked for.
        instance: String,
    },
    /// The kernel does not let this process do it.
    #[error(
        "not permitted to {doing}: run as root, or with CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON and the \
         right to write in the bpf file system (a container also needs a seccomp profile that allows \
         bpf)"
    )]
    NotPermitted {
        /// What was tried.
        doing: String,
    },
    /// The kernel lacks what the programs use.
    #[error("Linux {found} is too old for the kernel plane: it needs {needed} or newer")]
    KernelTooOld {
        /// The running release.
        found: String,
        /// The oldest release that works.
        needed: &'static str,
    },
    /// No cgroup v2 hierarchy is mounted.
    #[error("no cgroup2 is mounted: mount one (`mount -t cgroup2 none /sys/fs/cgroup/unified`)")]
    NoCgroup2,
    /// The process is in a cgroup that no cgroup2 mount shows.
    #[error(
        "cgroup `{path}` lies outside every cgroup2 mount: share the host's cgroup namespace, or \
         mount its cgroup2"
    )]
    CgroupHidden {
        /// As `/proc/self/cgroup` names it.
        path: String,
    },
    /// The path is not a cgroup v2 directory.
    #[error("`{0}` is not a cgroup2 directory: name one below the cgroup2 mount")]
    NotACgroup(PathBuf),
    /// No bpffs, and none could be mounted.
    #[error(
        "no bpf file system is mounted and mounting one failed ({0}): as root, \
         `mount -t bpf bpf /sys/fs/bpf`"
    )]
    NoBpffs(io::Error),
    /// The verifier refused a program.
    #[error("the kernel refused program {program}: {reason}; report this with `uname -r`")]
    Refused {
        /// The program.
        program: &'static str,
        /// The verifier's last line, or the error of the call.
        reason: String,
    },
    /// The embedded object cannot be read or its maps cannot be made.
    #[error("cannot load the kernel object: {0}; rebuild it with `cargo xtask build-ebpf`")]
    Object(String),
    /// A pinned map is not what this version makes.
    #[error(
        "pinned map {map} has {found}, this version needs {expected}: remove the pins with \
         `rm -r {pins}` once gate is stopped, or run the version that made them"
    )]
    Shape {
        /// The map.
        map: &'static str,
        /// What this version makes.
        expected: String,
        /// What is pinned.
        found: String,
        /// The directory of the instance's pins.
        pins: PathBuf,
    },
    /// The probe connection was not counted as it must be.
    #[error("the probe connection was not counted: {0}")]
    Probe(String),
    /// A system call failed.
    #[error("cannot {doing}: {source}")]
    Io {
        /// What was tried.
        doing: String,
        /// Why it failed.
        source: io::Error,
    },
    /// A map could not be read or written.
    #[error("map {map}: {reason}")]
    Map {
        /// The map.
        map: &'static str,
        /// Why.
        reason: String,
    },
}

impl KernelError {
    /// Whether the host cannot have a kernel plane now, so that the local
    /// ledger can do without. The others are faults that a person must mend.
    #[must_use]
    pub const fn is_unavailable(&self) -> bool {
        match self {
            Self::NotPermitted { .. }
            | Self::KernelTooOld { .. }
            | Self::NoCgroup2
            | Self::CgroupHidden { .. }
            | Self::NoBpffs(_)
            | Self::Refused { .. }
            | Self::Object(_)
            | Self::Probe(_)
            | Self::Io { .. } => true,
            Self::BadInstance(_)
            | Self::NoInstance { .. }
            | Self::NotACgroup(_)
            | Self::Shape { .. }
            | Self::Map { .. } => false,
        }
    }

    /// A failed system call; a missing right is told apart.
    pub(super) fn io(doing: impl Into<String>, source: io::Error) -> Self {
        let doing = doing.into();
        match source.raw_os_error() {
            Some(libc::EPERM | libc::EACCES) => Self::NotPermitted { doing },
            _ => Self::Io { doing, source },
        }
    }

    /// A failure of aya to load the object.
    pub(super) fn object(error: &EbpfError) -> Self {
        if os_error(error).is_some_and(is_missing_right) {
            return Self::NotPermitted {
                doing: "create maps".into(),
            };
        }
        Self::Object(chain(error))
    }

    /// A failure of aya to load one program.
    pub(super) fn program(program: &'static str, error: &ProgramError) -> Self {
        match error {
            ProgramError::LoadError {
                io_error,
                verifier_log,
            } => match last_line(&verifier_log.to_string()) {
                // What the verifier says when CAP_PERFMON alone is missing.
                Some(line) if line.contains("prohibited for !root") => Self::NotPermitted {
                    doing: format!("load program {program}"),
                },
                Some(line) => Self::Refused {
                    program,
                    reason: line.to_owned(),
                },
                None if io_error.raw_os_error().is_some_and(is_missing_right) => {
                    Self::NotPermitted {
                        doing: format!("load program {program}"),
                    }
                }
                // Not for the program: the process or the host has run out.
                None if io_error.raw_os_error().is_some_and(is_shortage) => Self::Io {
                    doing: format!("load program {program}"),
                    source: io::Error::new(io_error.kind(), io_error.to_string()),
                },
                None => Self::Refused {
                    program,
                    reason: io_error.to_string(),
                },
            },
            other => Self::Refused {
                program,
                reason: chain(other),
            },
        }
    }

    /// A failure of a map operation.
    pub(super) fn map(map: &'static str, error: &dyn std::error::Error) -> Self {
        Self::Map {
            map,
            reason: chain(error),
        }
    }
}

const fn is_missing_right(errno: i32) -> bool {
    matches!(errno, libc::EPERM | libc::EACCES)
}

const fn is_shortage(errno: i32) -> bool {
    matches!(errno, libc::EMFILE | libc::ENFILE | libc::ENOMEM)
}

/// An error with its causes in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !line.contains(&cause_text) {
            line.push_str(": ");
            line.push_str(&cause_text);
        }
        next = cause.source();
    }
    line
}

fn os_error(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<io::Error>() {
            return io.raw_os_error();
        }
        next = error.source();
    }
    None
}

/// The verifier's last word; its statistics come after it.
fn last_line(log: &str) -> Option<&str> {
    log.lines().rev().map(str::trim).find(|line| {
        !line.is_empty()
            && ![
                "processed ",
                "verification time",
                "stack depth",
                "max_states",
            ]
            .iter()
            .any(|statistic| line.starts_with(statistic))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verifiers_last_word_is_found_before_its_statistics() {
        let log = "0: R1=ctx()\ninvalid access to map value, value_size=8 off=8 size=8\n\
                   verification time 12 usec\nstack depth 0\nprocessed 2 insns (limit 1000000)\n";
        assert_eq!(
            last_line(log),
            Some("invalid access to map value, value_size=8 off=8 size=8")
        );
        assert_eq!(last_line("\n"), None);
    }

    #[test]
    fn a_missing_right_is_told_apart_from_other_failures() {
        let denied = KernelError::io("attach", io::Error::from_raw_os_error(libc::EPERM));
        assert!(denied.to_string().contains("CAP_BPF"), "{denied}");
        assert!(denied.is_unavailable());
        let other = KernelError::io("attach", io::Error::from_raw_os_error(libc::ENOSPC));
        assert!(other.to_string().starts_with("cannot attach: "), "{other}");
    }
}
