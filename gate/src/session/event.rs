//! The contract between a session and the worker that drives it.
//!
//! The worker feeds one [`Input`] at a time and carries out every [`Action`]
//! in order before the next input. Bytes that are relayed never pass through
//! here: the worker moves them, and tells what came to an end.

use std::sync::Arc;
use std::time::Duration;

use super::outcome::{
    CancelOutcome, CloseReason, ConnectFailure, Reason, StartupFailure, WaitOutcome,
};
use crate::proto::first_packet::Identity;
use crate::proto::refusal::Refusal;

/// What happened.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// Bytes from the client before it was admitted.
    ClientData(&'a [u8]),
    /// The client sent FIN, and everything before it has been passed on.
    ClientEnded,
    /// The client's connection was reset or broke.
    ClientLost,
    /// The ledger's answer to [`Action::Admit`].
    Admission(Result<(), Reason>),
    /// The other answer to [`Action::Admit`]: the client has joined the queue.
    Wait {
        /// How long it may wait.
        wait: Duration,
        /// The limit that refused it, and will again when the time is over.
        reason: Reason,
    },
    /// A client that waits may ask again, or is to see that gate drains.
    Turn,
    /// The backend's connection stands.
    Connected,
    /// The backend could not be reached.
    ConnectFailed(ConnectFailure),
    /// One address of the backend could not be reached, and there is another.
    AddressFailed(ConnectFailure),
    /// Bytes from the backend while the client logs in, before they are
    /// passed on.
    BackendData(&'a [u8]),
    /// The backend sent FIN, and everything before it has been passed on.
    BackendEnded,
    /// The backend's connection was reset or broke.
    BackendLost,
    /// The deadline of [`Action::Deadline`] has passed.
    DeadlinePassed,
    /// The CancelRequest goes its way without its client: too many have one under way.
    CancelQueued,
    /// Too many connections are pending, and this one was chosen to go.
    Evict,
    /// End now.
    Stop,
}

/// What the worker is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Send one byte to the client.
    Reply(u8),
    /// Ask the ledger for this identity's slots, and feed the answer.
    Admit(Arc<Identity>),
    /// Take the client out of the queue of those that wait, and count what became
    /// of it.
    EndWait(WaitOutcome),
    /// Connect to the backend of [`super::Session::identity`]. Read nothing from
    /// the client meanwhile, but watch it.
    Dial,
    /// Give up the address that was dialled and connect to the next one.
    DialNext,
    /// Pass these first bytes to the backend and relay from now on.
    Relay(Vec<u8>),
    /// Send the refusal to the client, then FIN; read and drop what it sends. No
    /// byte of a backend has reached the client.
    Refuse(Refusal),
    /// Send FIN to the backend.
    EndBackend,
    /// Send FIN to the client.
    EndClient,
    /// Read and drop what the client sends.
    DropClientData,
    /// Close the backend's socket.
    CloseBackend,
    /// The client is gone: read and drop what the backend sends.
    DropBackendData,
    /// Send this CancelRequest to the backend over a connection of its own.
    CancelQuery(Vec<u8>),
    /// Replace the deadline; `None` for none.
    Deadline(Option<Duration>),
    /// Count an outcome.
    Count(Count),
    /// Close everything, the backend first, and give the slots back.
    Close {
        /// End the client's connection with RST, not FIN.
        reset_client: bool,
    },
}

/// An outcome to be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Refused by a limit or by a drain.
    Rejected(Reason),
    /// Ended before a valid startup packet.
    StartupFailed(StartupFailure),
    /// The backend could not be reached.
    ConnectFailed(ConnectFailure),
    /// A CancelRequest came to its end.
    Cancel(CancelOutcome),
    /// An admitted session ended.
    Closed(CloseReason),
}

/// The deadlines of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// From accept to a valid startup packet.
    pub startup: Duration,
    /// To connect to the backend.
    pub connect: Duration,
    /// From then to ReadyForQuery.
    pub auth: Duration,
    /// A CancelRequest in all.
    pub cancel: Duration,
    /// Without a byte either way; zero for never.
    pub idle: Duration,
    /// Without a byte either way, once the client has ended its side; zero for
    /// never.
    pub half_close: Duration,
    /// For the backend to end once the client is gone.
    pub abandoned: Duration,
}

/// How long a socket over the ceiling may take to say who it is.
pub const OVER_STARTUP: Duration = Duration::from_secs(2);
/// How long a client that was sent FIN may take to close: an RST sent earlier
/// could overtake what it was told.
pub const LINGER: Duration = Duration::from_secs(1);
/// When the backend of a client that is gone, and that has not ended, is sent a
/// second CancelRequest.
pub const CANCEL_AGAIN: Duration = Duration::from_secs(1);
