//! epoll, edge-triggered, with sockets under small numbers.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

/// Looked at in one turn.
const EVENTS_PER_TURN: usize = 512;
/// A load looks for its orders at least so often.
const NAP_MAX: Duration = Duration::from_millis(10);

/// Sockets to be told about.
pub struct EventLoop {
    epoll: OwnedFd,
    events: Vec<Event>,
}

/// What happened to a socket.
#[derive(Clone, Copy, Debug)]
pub struct Happened {
    /// The number that it was added under.
    pub token: usize,
    /// It can be written to.
    pub writable: bool,
    /// It can be read from; also at its end or an error.
    pub readable: bool,
}

impl EventLoop {
    /// Of no sockets yet.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            epoll: epoll::create(CreateFlags::CLOEXEC)?,
            events: Vec::with_capacity(EVENTS_PER_TURN),
        })
    }

    /// Tells of every change of a socket until it is closed. Edge-triggered: what
    /// was not read or written to its end is not told again.
    ///
    /// # Errors
    /// No memory, or more than `fs.epoll.max_user_watches`.
    pub fn add(&self, socket: impl AsFd, token: usize) -> io::Result<()> {
        let what = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        Ok(epoll::add(
            &self.epoll,
            socket,
            EventData::new_u64(token as u64),
            what,
        )?)
    }

    /// Waits for something to happen, or for a moment to come; `told` holds what
    /// happened, and nothing else, when this returns.
    ///
    /// # Errors
    /// Never, as things are.
    pub fn wait(&mut self, until: Option<Instant>, told: &mut Vec<Happened>) -> io::Result<()> {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let nap = left.map_or(NAP_MAX, |left| left.min(NAP_MAX));
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: nap.subsec_nanos().into(),
        };
        self.events.clear();
        told.clear();
        match epoll::wait(
            &self.epoll,
            spare_capacity(&mut self.events),
            Some(&timeout),
        ) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        told.extend(self.events.iter().map(happened));
        Ok(())
    }
}

fn happened(event: &Event) -> Happened {
    // The structure is packed: fields are copied, never borrowed.
    let (data, flags) = (event.data, event.flags);
    let ended = EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR;
    Happened {
        token: usize::try_from(data.u64()).unwrap_or(usize::MAX),
        writable: flags.contains(EventFlags::OUT),
        readable: flags.intersects(EventFlags::IN | ended),
    }
}
