//! A new gate takes the place of the running one without losing a connection.
//!
//! The new one asks at a socket of its own beside the control socket, gets
//! every listening socket as a descriptor, and the locks, starts beside the
//! old one, and says when it accepts. Only then the old one stops accepting;
//! it ends with its last session. Until that word the old one holds everything
//! it ever held, so that a new one that fails changes nothing.
//!
//! | file | what it does |
//! |---|---|
//! | `message.rs` | what the two say to each other |
//! | `give.rs` | the old one's part |
//! | `take.rs` | the new one's part |

mod give;
mod message;
mod take;

use std::io;
use std::path::{Path, PathBuf};

pub use give::{Estate, Heir, Owner, serve};
pub use message::Item;
pub use take::{Predecessor, ask};

/// Why a gate cannot take over, or not from this one.
#[derive(Debug, thiserror::Error)]
pub enum TakeoverError {
    /// It runs, and does not listen for a successor.
    #[error(
        "gate (process {holder}) runs as this instance and cannot be taken over: nobody answers at {path}; stop it and start this one without --takeover"
    )]
    Unaware {
        /// The process.
        holder: String,
        /// Where it would listen.
        path: PathBuf,
    },
    /// It cannot be asked.
    #[error("the running gate cannot be asked at {path}: {error}; run as the user that it runs as")]
    Unreachable {
        /// Where it listens.
        path: PathBuf,
        /// Why not.
        error: io::Error,
    },
    /// It said no.
    #[error("the running gate does not hand over: {0}")]
    Refused(String),
    /// The conversation broke.
    #[error(
        "the running gate ended the hand-over: {0}; its log says more, and it still serves if it lives"
    )]
    Broken(#[from] io::Error),
    /// Counts cannot go from kernel to memory.
    #[error(
        "the running gate counts in the kernel and this one cannot: {0}; give it the same --kernel and rights, or stop the running one first"
    )]
    Kernel(String),
}

/// Where a gate waits for its successor.
#[must_use]
pub fn path(control: &Path, instance: &str) -> PathBuf {
    let directory = control.parent().unwrap_or(Path::new("/"));
    directory.join(format!("{instance}.takeover"))
}

#[cfg(test)]
mod tests;
