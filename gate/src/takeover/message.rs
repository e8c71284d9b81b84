//! What two gates say to each other, as JSON; descriptors ride beside it.
#![forbid(unsafe_code)]

use std::io;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::host::mail::Mailbox;

/// Both must speak the same one.
pub(super) const PROTOCOL: u32 = 1;

/// One message. The new gate begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "message", rename_all = "snake_case")]
pub(super) enum Message {
    /// New to old: the first.
    TakeOver { protocol: u32 },
    /// Old to new: what it is, and how many descriptors follow.
    Holds {
        pid: u32,
        version: String,
        /// Whether its counts lie in the kernel.
        kernel: bool,
        items: usize,
    },
    /// Old to new: one descriptor for each, in this order.
    Items { items: Vec<Item> },
    /// New to old: accepts from now on.
    Ready {
        /// Whether it listens at the same control socket.
        control: bool,
    },
    /// Old to new: has stopped serving requests.
    Left,
    /// Old to new: no, and why.
    Refused { why: String },
}

/// What a descriptor is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Item {
    /// One of the sockets of a listener.
    Listener {
        /// As it is configured: port 0 stays 0.
        address: SocketAddr,
    },
    /// The admin address.
    Admin {
        /// As it is configured.
        address: SocketAddr,
    },
    /// The control socket.
    Control {
        /// Its file.
        path: PathBuf,
    },
    /// The socket of this very conversation's listener.
    Takeover,
    /// The open file of the instance's lock.
    InstanceLock,
    /// The open directory of the pins' lock.
    PinsLock,
    /// Something that only a newer gate knows.
    #[serde(other)]
    Unknown,
}

impl Message {
    pub fn send(
        &self,
        mailbox: &Mailbox,
        fds: &[BorrowedFd<'_>],
        patience: Duration,
    ) -> io::Result<()> {
        mailbox.send(&serde_json::to_vec(self)?, fds, patience)
    }

    pub fn receive(mailbox: &Mailbox, patience: Duration) -> io::Result<(Self, Vec<OwnedFd>)> {
        let (bytes, fds) = mailbox.receive(patience).map_err(|error| {
            let text = match error.kind() {
                io::ErrorKind::WouldBlock => "it said nothing in time",
                io::ErrorKind::UnexpectedEof => "it has hung up",
                _ => return error,
            };
            io::Error::new(error.kind(), text)
        })?;
        Ok((serde_json::from_slice(&bytes)?, fds))
    }
}

/// For a message that fits nowhere.
pub(super) fn unexpected(message: &Message) -> io::Error {
    io::Error::other(format!("it said {message:?} out of turn"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_look_the_same_in_every_version() {
        let address = "127.0.0.1:6432".parse().expect("an address");
        let path = "/run/c".into();
        let items = vec![
            Item::Listener { address },
            Item::Control { path },
            Item::PinsLock,
        ];
        for (message, text) in [
            (
                Message::TakeOver { protocol: 1 },
                r#"{"message":"take_over","protocol":1}"#,
            ),
            (
                Message::Items { items },
                r#"{"message":"items","items":[{"is":"listener","address":"127.0.0.1:6432"},{"is":"control","path":"/run/c"},{"is":"pins_lock"}]}"#,
            ),
            (
                Message::Ready { control: true },
                r#"{"message":"ready","control":true}"#,
            ),
            (Message::Left, r#"{"message":"left"}"#),
        ] {
            assert_eq!(serde_json::to_string(&message).expect("JSON"), text);
            let back: Message = serde_json::from_str(text).expect("a message");
            assert_eq!(back, message);
        }
    }

    #[test]
    fn what_a_newer_gate_passes_is_unknown_and_no_error() {
        let newer = r#"{"is":"moon","phase":3}"#;
        let item: Item = serde_json::from_str(newer).expect("an item");
        assert_eq!(item, Item::Unknown);
    }
}
