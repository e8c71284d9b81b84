//! The new gate's part: asks, adopts, says when it is ready.
#![forbid(unsafe_code)]

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use super::TakeoverError;
use super::message::{Item, Message, PROTOCOL, unexpected};
use crate::host::mail::Mailbox;

/// For the running gate to answer; its control plane may be busy for a moment.
const PATIENCE: Duration = Duration::from_secs(15);

/// For what was said already; none at all would be for ever.
const NOW: Duration = Duration::from_millis(1);

/// The gate that is taken over, with what it has passed and nobody has taken
/// yet. What is left at the end is closed.
#[derive(Debug)]
pub struct Predecessor {
    mailbox: Mailbox,
    items: Vec<(Item, OwnedFd)>,
    /// Its process.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// Whether its counts lie in the kernel.
    pub kernel: bool,
}

/// Asks the gate that waits at a path for all that it has. `None` if none does.
///
/// # Errors
/// See [`TakeoverError`].
pub fn ask(path: &Path) -> Result<Option<Predecessor>, TakeoverError> {
    let mailbox = match Mailbox::connect(path) {
        Ok(mailbox) => mailbox,
        Err(error) => {
            return match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Ok(None),
                _ => Err(TakeoverError::Unreachable {
                    path: path.to_owned(),
                    error,
                }),
            };
        }
    };
    let first = Message::TakeOver { protocol: PROTOCOL };
    first.send(&mailbox, &[], PATIENCE)?;
    let (pid, version, kernel, count) = match Message::receive(&mailbox, PATIENCE)?.0 {
        Message::Holds {
            pid,
            version,
            kernel,
            items,
        } => (pid, version, kernel, items),
        Message::Refused { why } => return Err(TakeoverError::Refused(why)),
        other => return Err(unexpected(&other).into()),
    };
    let mut items = Vec::new();
    while items.len() < count {
        let (message, fds) = Message::receive(&mailbox, PATIENCE)?;
        match message {
            Message::Items { items: some } if some.len() == fds.len() && !fds.is_empty() => {
                items.extend(some.into_iter().zip(fds));
            }
            other => return Err(unexpected(&other).into()),
        }
    }
    Ok(Some(Predecessor {
        mailbox,
        items,
        pid,
        version,
        kernel,
    }))
}

impl Predecessor {
    /// Whether it listens at an address, as that is configured.
    #[must_use]
    pub fn has_listener(&self, address: SocketAddr) -> bool {
        self.sockets(address) > 0
    }

    /// How many sockets it has at an address, as that is configured.
    #[must_use]
    pub fn sockets(&self, address: SocketAddr) -> usize {
        let wanted = Item::Listener { address };
        self.items
            .iter()
            .filter(|(item, _)| *item == wanted)
            .count()
    }

    /// Descriptors of this process that are here and not taken.
    #[must_use]
    pub const fn descriptors(&self) -> usize {
        // And the mailbox.
        self.items.len() + 1
    }

    /// Every descriptor of one kind.
    pub fn take_all(&mut self, wanted: &Item) -> Vec<OwnedFd> {
        let taken = self.items.extract_if(.., |(item, _)| item == wanted);
        taken.map(|(_, fd)| fd).collect()
    }

    /// The one descriptor of a kind.
    pub fn take(&mut self, wanted: &Item) -> Option<OwnedFd> {
        self.take_all(wanted).pop()
    }

    /// Whether it still waits for this gate, which may be about to change what
    /// the other one cannot see. One that is gone does.
    ///
    /// # Errors
    /// It does not wait any longer and goes on.
    pub fn waits(&self) -> Result<(), TakeoverError> {
        match Message::receive(&self.mailbox, NOW) {
            Ok((Message::Refused { why }, _)) => Err(TakeoverError::Refused(why)),
            Ok((other, _)) => Err(unexpected(&other).into()),
            Err(_) => Ok(()),
        }
    }

    /// Tells it that this gate accepts, and waits until it serves no requests.
    ///
    /// # Errors
    /// It did not wait any longer and goes on.
    pub fn ready(self, keeps_control: bool) -> Result<(), TakeoverError> {
        let ready = Message::Ready {
            control: keeps_control,
        };
        let sent = ready.send(&self.mailbox, &[], PATIENCE);
        // Also if that failed: its last word says why.
        match Message::receive(&self.mailbox, PATIENCE) {
            Ok((Message::Left, _)) => Ok(()),
            Ok((Message::Refused { why }, _)) => Err(TakeoverError::Refused(why)),
            Ok((other, _)) => Err(unexpected(&other).into()),
            Err(error) => {
                // It died, and what it had is here.
                let error = sent.err().unwrap_or(error);
                tracing::warn!(%error, "the gate that was taken over is gone");
                Ok(())
            }
        }
    }
}
