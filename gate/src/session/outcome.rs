//! The closed sets of outcomes. Logs, metrics and `gatectl` all print these
//! words and no others.

/// Who is at fault for an end that was not asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// The client, or its network.
    Client,
    /// The PostgreSQL server, or the way to it.
    Backend,
    /// gate itself: its limits, its operator.
    Gate,
    /// The machine: descriptors, memory, kernel.
    Host,
}

impl Fault {
    /// The word in logs and metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Backend => "backend",
            Self::Gate => "gate",
            Self::Host => "host",
        }
    }
}

macro_rules! outcomes {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $label:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum $name { $($(#[$vdoc])* $variant,)* }

        impl $name {
            /// Every outcome, in the order of its index (`as usize`).
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The word in logs and metrics.
            #[must_use]
            pub const fn label(self) -> &'static str {
                match self { $(Self::$variant => $label,)* }
            }
        }
    };
}

outcomes! {
    /// Why a client was refused by a limit or by a drain.
    Reason {
        /// The total of admitted sessions.
        MaxConnections = "max_connections",
        /// Evicted while pending, because too many were.
        MaxPending = "max_pending",
        /// The user's limit.
        User = "user",
        /// The database's limit.
        Database = "database",
        /// The source's limit.
        Source = "source",
        /// The backend's limit.
        Backend = "backend",
        /// The listener's ceiling on sockets.
        OverCeiling = "over_ceiling",
        /// No slot is free for a new name.
        NamesFull = "names_full",
        /// gate is draining.
        Draining = "draining",
        /// gate has no file descriptor to spare.
        Descriptors = "descriptors",
    }
}

outcomes! {
    /// Why a connection ended before a valid startup packet.
    StartupFailure {
        /// Bytes that are no PostgreSQL startup.
        BadStartup = "bad_startup",
        /// The startup deadline.
        StartupTimeout = "startup_timeout",
        /// The client left.
        AbandonedStartup = "abandoned_startup",
    }
}

outcomes! {
    /// Why a backend could not be reached.
    ConnectFailure {
        /// ECONNREFUSED, or no unix socket of that name.
        Refused = "refused",
        /// The connect deadline, or ETIMEDOUT.
        Timeout = "timeout",
        /// No route, network or host down.
        Unreachable = "unreachable",
        /// The connection was reset while it was made.
        Reset = "reset",
        /// No descriptor, port or memory on this machine.
        Host = "host",
        /// Anything else.
        Other = "other",
    }
}

outcomes! {
    /// What became of a CancelRequest.
    CancelOutcome {
        /// Handed to the backend, which then closed.
        Forwarded = "forwarded",
        /// The backend could not be reached.
        Failed = "failed",
        /// The cancel deadline.
        TimedOut = "timed_out",
        /// The client left first.
        Abandoned = "abandoned",
        /// Many were under way: its client was closed, and gate sends it in turn.
        Queued = "queued",
    }
}

outcomes! {
    /// What became of a client that waited for a place.
    WaitOutcome {
        /// It was admitted.
        Admitted = "admitted",
        /// Its time was over, or gate ended.
        Refused = "refused",
        /// It left.
        Left = "left",
    }
}

outcomes! {
    /// Why an admitted session ended.
    CloseReason {
        /// The client closed, the backend followed.
        ClientClosed = "client_closed",
        /// The backend closed first.
        BackendClosed = "backend_closed",
        /// The client's connection was reset or lost.
        ClientReset = "client_reset",
        /// The backend's connection was reset or lost.
        BackendReset = "backend_reset",
        /// The client left while the backend was being dialled.
        ClientLeftDial = "client_left_dial",
        /// The backend could not be reached.
        ConnectFailed = "connect_failed",
        /// The backend ended before ReadyForQuery.
        LoginFailed = "login_failed",
        /// The authentication deadline.
        AuthTimeout = "auth_timeout",
        /// The idle deadline.
        IdleTimeout = "idle_timeout",
        /// The half-close deadline.
        HalfCloseTimeout = "half_close_timeout",
        /// The client had gone and the backend did not end in time.
        AbandonedTimeout = "abandoned_timeout",
        /// The drain deadline.
        Drained = "drained",
    }
}

outcomes! {
    /// What a session does now.
    SessionState {
        /// A valid startup packet is still missing.
        Startup = "startup",
        /// Asks for its slots.
        Waiting = "waiting",
        /// The backend is being dialled.
        Connecting = "connecting",
        /// Not ReadyForQuery yet.
        Login = "login",
        /// Bytes go both ways.
        Active = "active",
        /// The client has said all, the backend has not.
        HalfClosed = "half_closed",
        /// The client is gone, the backend is still at work.
        Abandoned = "abandoned",
        /// A CancelRequest on its way.
        Cancel = "cancel",
        /// Was told the end, or is being closed.
        Ending = "ending",
    }
}

impl SessionState {
    /// Whether the backend has said ReadyForQuery and is still there for a client.
    #[must_use]
    pub const fn is_relay(self) -> bool {
        matches!(self, Self::Active | Self::HalfClosed)
    }

    /// The state of a word.
    #[must_use]
    pub fn from_label(label: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|state| state.label() == label)
    }
}

impl CloseReason {
    /// Who is at fault.
    #[must_use]
    pub const fn fault(self) -> Fault {
        match self {
            Self::ClientClosed | Self::ClientReset | Self::ClientLeftDial | Self::AuthTimeout => {
                Fault::Client
            }
            Self::BackendClosed
            | Self::BackendReset
            | Self::ConnectFailed
            | Self::LoginFailed
            | Self::AbandonedTimeout => Fault::Backend,
            Self::IdleTimeout | Self::HalfCloseTimeout | Self::Drained => Fault::Gate,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_found_by_its_word() {
        for state in SessionState::ALL {
            assert_eq!(SessionState::from_label(state.label()), Some(*state));
        }
        assert_eq!(SessionState::from_label("idle"), None);
    }

    #[test]
    fn indices_follow_the_order_of_all() {
        for (index, reason) in Reason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, index);
        }
        for (index, reason) in CloseReason::ALL.iter().enumerate() {
            assert_eq!(*reason as usize, index);
        }
    }
}
