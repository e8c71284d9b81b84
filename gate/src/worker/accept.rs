//! New connections.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Worker;
use super::connection::{Connection, Mode, Side};
use super::machine::{Key, Kind, Machine, Watch};
use crate::host::{FDS_PER_SESSION, POLITE_RESERVE};
use crate::ledger::Standing;
use crate::session::Session;
use crate::session::outcome::Reason;
use crate::sessions::Source;
use crate::state::Phase;

/// How long accepting rests when descriptors ran out.
const RETRY: Duration = Duration::from_millis(50);

/// How many connections a leaving worker takes from one queue at most: as many
/// as fit in it.
const LAST_ACCEPTS_MAX: usize = 4096;

/// A listening socket of this worker.
#[derive(Debug)]
pub struct Listening<L> {
    /// Bound and listening, non-blocking.
    pub socket: L,
    /// Place of its listener in the configuration.
    pub place: usize,
    /// Index of its words in the ledger.
    pub index: u32,
    /// Accepting ended and is to be armed again.
    paused: bool,
    /// One at a time where the operation that accepts many was refused.
    accepts: Watch,
}

impl<L> Listening<L> {
    /// A listener that is not armed yet.
    #[must_use]
    pub fn new(socket: L, place: usize, index: u32) -> Self {
        Self {
            socket,
            place,
            index,
            paused: true,
            accepts: Watch::Changes,
        }
    }
}

/// What a worker knows of accepting.
#[derive(Debug)]
pub(super) struct Accepting<L> {
    /// Several of one listener if a gate with more workers was taken over.
    pub listeners: Vec<Listening<L>>,
    /// Accepts no more, and ends with the last connection.
    pub leaving: bool,
    /// When paused listeners are armed again.
    pub retry_at: Option<Instant>,
    /// Those accepted in this round.
    pub fresh: Vec<u32>,
    /// Those accepted lately, with their generation, not in `pending` yet.
    pub newcomers: VecDeque<(Instant, u32, u32)>,
    /// A connection lives on the spare descriptor.
    pub spare_lent: bool,
    /// Connections being refused for want of descriptors.
    pub on_reserve: u64,
    /// Descriptors ran out, and that was said.
    pub exhausted: bool,
}

impl<L> Accepting<L> {
    pub const fn new(listeners: Vec<Listening<L>>) -> Self {
        Self {
            listeners,
            leaving: false,
            retry_at: None,
            fresh: Vec::new(),
            newcomers: VecDeque::new(),
            spare_lent: false,
            on_reserve: 0,
            exhausted: false,
        }
    }
}

/// What an error of accept means for the next one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    /// It was about one connection: go on at once.
    GoOn,
    /// Something ran out: try again a little later.
    Rest,
    /// It will never work again.
    Fatal,
}

impl<M: Machine> Worker<M> {
    /// Arms every listener that is not.
    pub(super) fn arm_listeners(&mut self) -> io::Result<()> {
        self.accepting.retry_at = None;
        if self.accepting.leaving {
            return Ok(());
        }
        self.keep_spare();
        for (index, listening) in self.accepting.listeners.iter_mut().enumerate() {
            if listening.paused {
                let key = Key::new(Kind::Accept, index as u32, 0);
                self.machine
                    .accept(&listening.socket, listening.accepts, key)?;
                listening.paused = false;
            }
        }
        Ok(())
    }

    /// Ends accepting: another gate has the same sockets. [`Worker::close_listeners`]
    /// does the rest once the last completions have come.
    pub(super) fn leave(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.accepting.leaving, true) {
            return Ok(());
        }
        self.accepting.retry_at = None;
        for (index, listening) in self.accepting.listeners.iter().enumerate() {
            if !listening.paused {
                self.machine
                    .cancel(Key::new(Kind::Accept, index as u32, 0))?;
            }
        }
        Ok(())
    }

    /// Whether nothing can be accepted any more.
    pub(super) fn has_left(&self) -> bool {
        self.accepting.leaving && self.accepting.listeners.is_empty()
    }

    /// Closes the listening sockets of a leaving worker when no accept is armed.
    pub(super) fn close_listeners(&mut self, now: Instant) {
        let armed = self
            .accepting
            .listeners
            .iter()
            .any(|listening| !listening.paused);
        if armed || self.has_left() {
            return;
        }
        // The kernel wakes one of all who wait at a socket. It may have been
        // ours, just before the cancel: what it was woken for would stay in the
        // queue until the next client wakes the other gate.
        let takes = if self.phase < Phase::Stopping {
            LAST_ACCEPTS_MAX
        } else {
            0
        };
        for index in 0..self.accepting.listeners.len() {
            for _ in 0..takes {
                match self
                    .machine
                    .accept_now(&self.accepting.listeners[index].socket)
                {
                    Ok(socket) => self.on_accepted(index, socket, now),
                    Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                    Err(_) => break,
                }
            }
        }
        self.begin_fresh(now);
        // Never shutdown(2): the queue is the other gate's too.
        self.accepting.listeners.clear();
        self.state.worker_left();
    }

    pub(super) fn on_accepted(&mut self, listener: usize, socket: M::Socket, now: Instant) {
        self.stats.accepted();
        // The end waits for the connections there are, not for new ones.
        if self.phase == Phase::Stopping {
            return self.machine.reset(socket);
        }
        // With its backend's, so that a crowd that came at once finds the
        // descriptors for some sessions, not for no session at all.
        let budgeted = self.state.take_fds(FDS_PER_SESSION);
        if !budgeted {
            self.ran_out("the descriptors for sessions");
            if self.accepting.on_reserve >= self.reserve() {
                let place = self.accepting.listeners[listener].place;
                self.stats.rejected(place, Reason::Descriptors);
                return self.machine.reset(socket);
            }
        }
        self.enter(listener, socket, budgeted, false, now);
    }

    /// What accepts many has ended for a reason of its own: begins anew.
    pub(super) fn on_accept_ended(&mut self, listener: usize) -> io::Result<()> {
        self.accepting.listeners[listener].paused = true;
        self.arm_listeners()
    }

    /// Accepting failed, which ended it.
    pub(super) fn on_accept_failed(
        &mut self,
        listener: usize,
        error: &io::Error,
        now: Instant,
    ) -> io::Result<()> {
        self.accepting.listeners[listener].paused = true;
        if self.accepting.leaving {
            return Ok(());
        }
        let errno = error.raw_os_error().unwrap_or(0);
        self.stats.accept_failed(errno);
        match after(errno) {
            After::GoOn => self.arm_listeners(),
            After::Rest => {
                self.ran_out(&error.to_string());
                self.accepting.retry_at = Some(now + RETRY);
                self.accept_on_spare(listener, now);
                Ok(())
            }
            // Of the operation rather than of the socket, if it is the first.
            After::Fatal if self.accepting.listeners[listener].accepts == Watch::Changes => {
                tracing::warn!(%error, listener, "accepts one connection at a time from here on");
                self.accepting.listeners[listener].accepts = Watch::Once;
                self.arm_listeners()
            }
            After::Fatal => {
                tracing::error!(%error, listener, "this listener can accept no more");
                Err(io::Error::new(error.kind(), format!("accept: {error}")))
            }
        }
    }

    /// Gives up the spare descriptor for one client, so that it is told.
    fn accept_on_spare(&mut self, listener: usize, now: Instant) {
        // At the end nobody is let in any more, not even to be told.
        if self.phase == Phase::Stopping || !self.machine.give_up_spare() {
            return;
        }
        match self
            .machine
            .accept_now(&self.accepting.listeners[listener].socket)
        {
            Ok(socket) => {
                self.stats.accepted();
                self.accepting.spare_lent = true;
                self.enter(listener, socket, false, true, now);
            }
            Err(_) => self.keep_spare(),
        }
    }

    /// Keeps a spare descriptor again. If none is to be had now, it is tried
    /// again a little later, or the next to run out would find none.
    pub(super) fn keep_spare(&mut self) {
        if !self.accepting.spare_lent && !self.machine.keep_spare() {
            let at = self.machine.now() + RETRY;
            self.accepting.retry_at.get_or_insert(at);
        }
    }

    /// Makes a connection of an accepted socket. One that is not `budgeted` is
    /// only let in to be refused.
    fn enter(
        &mut self,
        listener: usize,
        socket: M::Socket,
        budgeted: bool,
        on_spare: bool,
        now: Instant,
    ) {
        let Listening { place, index, .. } = self.accepting.listeners[listener];
        let (entry, standing) = self.state.ledger.accepted(socket.as_fd(), index);
        let doomed = match standing {
            Standing::Over => Some(Reason::OverCeiling),
            Standing::Counted if !budgeted => Some(Reason::Descriptors),
            Standing::Counted if self.phase >= Phase::Draining => Some(Reason::Draining),
            Standing::Counted => None,
        };
        let session = Session::new(Arc::clone(&self.deadlines), doomed);
        let mut connection = Connection::new(session, place as u16, now);
        connection.entry = Some(entry);
        connection.client = Some(Side::new(socket));
        connection.fds = if budgeted { FDS_PER_SESSION as u8 } else { 0 };
        connection.on_reserve = !budgeted;
        connection.on_spare = on_spare;
        connection.pending = standing == Standing::Counted;
        self.accepting.on_reserve += u64::from(!budgeted);
        let id = self.insert(connection);
        self.accepting.fresh.push(id);
    }

    /// Begins with those who were accepted in this round, after everything else:
    /// by then most of them have spoken, and no poll is needed to hear it.
    pub(super) fn begin_fresh(&mut self, now: Instant) {
        let mut fresh = std::mem::take(&mut self.accepting.fresh);
        for id in fresh.drain(..) {
            if self.connections[id as usize].mode == Mode::Closing {
                continue;
            }
            self.start(id, now);
            let connection = &self.connections[id as usize];
            if connection.pending && connection.session.is_pending() {
                let generation = connection.generation;
                self.accepting.newcomers.push_back((now, id, generation));
                self.evict_for(id, now);
            }
        }
        self.accepting.fresh = fresh;
    }

    /// The client's address; nowhere if it is gone or has none.
    pub(super) fn source(&mut self, id: u32) -> Source {
        let connection = &mut self.connections[id as usize];
        if connection.source == Source::NOWHERE
            && let Some(client) = &connection.client
            && let Some(address) = self.machine.peer(&client.socket)
        {
            connection.source = Source::from(address);
        }
        connection.source
    }

    /// How many connections may live on this worker's share of the descriptors
    /// kept for polite answers; each may turn out to be a cancel.
    pub(super) fn reserve(&self) -> u64 {
        (POLITE_RESERVE / FDS_PER_SESSION / self.state.stats.len() as u64).max(1)
    }

    /// Says once that something ran out.
    fn ran_out(&mut self, what: &str) {
        if !self.accepting.exhausted {
            self.accepting.exhausted = true;
            tracing::warn!(
                worker = self.id,
                "new clients are turned away: {what} ran out"
            );
        }
    }

    /// Says once that there is enough again.
    pub(super) fn recovered(&mut self) {
        let held = self.state.session_fds.load(Ordering::Relaxed);
        // Not at the first one that comes free: that would be a line for each.
        let enough = self.state.session_fds_max - self.state.session_fds_max / 16;
        if self.accepting.exhausted && held < enough {
            self.accepting.exhausted = false;
            tracing::info!(worker = self.id, "new clients are served again");
        }
    }
}

/// accept(2): which errors are the network's, which pass, which stay.
fn after(errno: i32) -> After {
    match errno {
        libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM => After::Rest,
        libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EOPNOTSUPP | libc::EFAULT => {
            After::Fatal
        }
        _ => After::GoOn,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k1_accept_goes_on_unless_it_can_never_work() {
        for errno in [
            libc::ECONNABORTED,
            libc::EINTR,
            libc::EAGAIN,
            libc::EPROTO,
            libc::EPERM,
            libc::ECANCELED,
            libc::ENETDOWN,
        ] {
            assert_eq!(after(errno), After::GoOn);
        }
        for errno in [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM] {
            assert_eq!(after(errno), After::Rest);
        }
        for errno in [libc::EBADF, libc::EINVAL, libc::ENOTSOCK] {
            assert_eq!(after(errno), After::Fatal);
        }
    }
}
