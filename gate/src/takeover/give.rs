//! The old gate's part: hands over, goes on until the new one is ready.
#![forbid(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use super::message::{Item, Message, PROTOCOL, unexpected};
use crate::host::mail::{FDS_PER_MESSAGE, Mailbox};

/// For the other side to send or take one message.
const PATIENCE: Duration = Duration::from_secs(5);
/// For a new gate to start, from the last descriptor to its word.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// For a gate that was refused to end its part.
const END_PATIENCE: Duration = Duration::from_secs(30);
/// Pause after accept failed: it will fail again until descriptors come back.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// What a gate hands over.
#[derive(Debug, Default)]
pub struct Estate {
    /// Each with what it is.
    pub items: Vec<(Item, OwnedFd)>,
    /// Whether its counts lie in the kernel.
    pub kernel: bool,
}

/// The gate that has taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heir {
    /// Its process.
    pub pid: u32,
    /// Whether it listens at the same control socket.
    pub keeps_control: bool,
}

/// The running gate, as the hand-over sees it.
pub trait Owner: Send + 'static {
    /// Another gate accepts: stop accepting and serving requests.
    fn leave(&self, heir: Heir);
    /// A new gate began to start and did not end well. It is gone, and may have
    /// changed whatever the two share.
    fn stay(&self);
}

/// Waits for a successor on a thread of its own, which lives as long as the
/// process or until it has handed over.
///
/// # Errors
/// No thread is to be had.
pub fn serve(listener: OwnedFd, estate: Estate, owner: impl Owner) -> io::Result<()> {
    let body = move || {
        loop {
            let mailbox = match Mailbox::accept(listener.as_fd()) {
                Ok(mailbox) => mailbox,
                Err(error) => {
                    tracing::debug!(%error, "accept failed at the takeover socket");
                    std::thread::sleep(ACCEPT_PAUSE);
                    continue;
                }
            };
            match hand_over(&mailbox, &estate) {
                Ok(heir) => {
                    tracing::info!(
                        heir = heir.pid,
                        "another gate has taken over: ends with the last session here"
                    );
                    owner.leave(heir);
                    // The locks and the last descriptors of the listening
                    // sockets, before the other one hears of it.
                    drop(estate);
                    let _ = Message::Left.send(&mailbox, &[], PATIENCE);
                    return;
                }
                Err(error) => {
                    tracing::warn!(%error, "not taken over: goes on as before");
                    let why = error.to_string();
                    let _ = Message::Refused { why }.send(&mailbox, &[], PATIENCE);
                    await_end(&mailbox);
                    owner.stay();
                }
            }
        }
    };
    let thread = std::thread::Builder::new().name("takeover".to_owned());
    thread.spawn(body).map(drop)
}

/// Until it hangs up the other one may still be at the sockets, and would undo what
/// the owner does to have them as before.
fn await_end(mailbox: &Mailbox) {
    let end = Instant::now() + END_PATIENCE;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            tracing::warn!("the gate that was refused has not ended");
            return;
        }
        match mailbox.receive(left) {
            // Its word has come too late.
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return,
        }
    }
}

fn hand_over(mailbox: &Mailbox, estate: &Estate) -> io::Result<Heir> {
    let peer = mailbox.peer()?;
    let own = rustix::process::geteuid().as_raw();
    if peer.uid != 0 && peer.uid != own {
        return Err(io::Error::other(format!(
            "user {} may not take over from user {own}",
            peer.uid
        )));
    }
    match Message::receive(mailbox, PATIENCE)?.0 {
        Message::TakeOver { protocol: PROTOCOL } => {}
        Message::TakeOver { protocol } => {
            return Err(io::Error::other(format!(
                "protocol {protocol} is asked for, gate {} speaks {PROTOCOL}",
                env!("CARGO_PKG_VERSION")
            )));
        }
        other => return Err(unexpected(&other)),
    }
    tracing::info!(heir = peer.pid, "another gate is about to take over");
    let holds = Message::Holds {
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        kernel: estate.kernel,
        items: estate.items.len(),
    };
    holds.send(mailbox, &[], PATIENCE)?;
    for some in estate.items.chunks(FDS_PER_MESSAGE) {
        let items = some.iter().map(|(item, _)| item.clone()).collect();
        let fds: Vec<BorrowedFd<'_>> = some.iter().map(|(_, fd)| fd.as_fd()).collect();
        Message::Items { items }.send(mailbox, &fds, PATIENCE)?;
    }
    match Message::receive(mailbox, START_PATIENCE)?.0 {
        Message::Ready { control } => Ok(Heir {
            pid: peer.pid,
            keeps_control: control,
        }),
        other => Err(unexpected(&other)),
    }
}
