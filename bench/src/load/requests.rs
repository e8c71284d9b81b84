//! Ping-pong: requests and replies of a fixed size on sessions that stay open.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::crew::{Crew, Member, Place};
use super::event_loop::EventLoop;
use super::pace::Pace;
use super::session;
use super::tally::Tally;
use crate::wire;

const READ_BYTES: usize = 256 * 1024;

/// What is asked.
#[derive(Clone, Copy, Debug)]
pub struct Requests {
    /// Sessions, over all threads.
    pub sessions: usize,
    /// Of a request.
    pub bytes: usize,
    /// Of a reply.
    pub reply_bytes: usize,
    /// When.
    pub pace: Pace,
}

/// Starts asking; sessions are open before this returns.
///
/// # Errors
/// A session was not let in.
pub fn start(place: &Place, target: SocketAddr, requests: Requests) -> Result<Crew> {
    let sessions = session::open_all(target, requests.sessions)?;
    Crew::start_sharing(place, sessions, move |member, mine| {
        Thread::new(mine, requests)?.run(&member)
    })
}

struct Session {
    stream: TcpStream,
    /// When the request on its way was due, or sent in a closed loop.
    asked: Option<Instant>,
    /// Due, but the one before it has no answer yet.
    waiting: VecDeque<Instant>,
    /// Of the request on its way.
    sent: usize,
    /// Of its reply.
    received: usize,
}

struct Thread {
    events: EventLoop,
    sessions: Vec<Session>,
    request: Vec<u8>,
    requests: Requests,
    tally: Tally,
    buffer: Vec<u8>,
}

impl Thread {
    fn new(streams: Vec<TcpStream>, requests: Requests) -> Result<Self> {
        let events = EventLoop::new()?;
        let mut sessions = Vec::new();
        for (token, stream) in streams.into_iter().enumerate() {
            events.add(&stream, token)?;
            sessions.push(Session {
                stream,
                asked: None,
                waiting: VecDeque::new(),
                sent: 0,
                received: 0,
            });
        }
        Ok(Self {
            events,
            sessions,
            request: wire::request(requests.bytes, requests.reply_bytes),
            requests,
            tally: Tally::new(),
            buffer: vec![0; READ_BYTES],
        })
    }

    fn run(mut self, member: &Member) -> Result<Tally> {
        if self.sessions.is_empty() {
            return Ok(self.tally);
        }
        let pace = self.requests.pace;
        let mut schedule = pace.schedule(member.index, member.of, Instant::now());
        let (mut turn, mut told) = (0, Vec::new());
        if schedule.is_none() {
            for token in 0..self.sessions.len() {
                self.ask(token, Instant::now())?;
            }
        }
        while !member.phase.is_over() {
            let now = Instant::now();
            while let Some(due) = schedule.as_mut().and_then(|schedule| schedule.take(now)) {
                self.sessions[turn].waiting.push_back(due);
                self.ask_next(turn)?;
                turn = (turn + 1) % self.sessions.len();
            }
            let until = schedule.as_ref().map(super::pace::Schedule::due);
            self.events.wait(until, &mut told)?;
            for event in &told {
                if event.writable {
                    self.send(event.token)?;
                }
                if event.readable {
                    self.receive(event.token, member)?;
                }
            }
        }
        self.count_unfinished();
        Ok(self.tally)
    }

    /// Sends the next request that is due, unless one is on its way.
    fn ask_next(&mut self, token: usize) -> Result<()> {
        let session = &mut self.sessions[token];
        if session.asked.is_none()
            && let Some(due) = session.waiting.pop_front()
        {
            self.ask(token, due)?;
        }
        Ok(())
    }

    fn ask(&mut self, token: usize, due: Instant) -> Result<()> {
        let session = &mut self.sessions[token];
        session.asked = Some(due);
        session.sent = 0;
        session.received = 0;
        self.send(token)
    }

    fn send(&mut self, token: usize) -> Result<()> {
        let session = &mut self.sessions[token];
        while session.asked.is_some() && session.sent < self.request.len() {
            match session.stream.write(&self.request[session.sent..]) {
                Ok(bytes) => session.sent += bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error).context("a session broke while sending"),
            }
        }
        Ok(())
    }

    fn receive(&mut self, token: usize, member: &Member) -> Result<()> {
        let session = &mut self.sessions[token];
        loop {
            let bytes = match session.stream.read(&mut self.buffer) {
                Ok(0) => bail!("the target ended a session"),
                Ok(bytes) => bytes,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error).context("a session broke while receiving"),
            };
            session.received += bytes;
            if session.received >= self.requests.reply_bytes {
                break;
            }
            // A short read has emptied the socket: what comes later is told again.
            if bytes < self.buffer.len() {
                return Ok(());
            }
        }
        let Some(due) = session.asked.take() else {
            bail!("the target spoke without being asked");
        };
        if session.received > self.requests.reply_bytes {
            bail!(
                "{} bytes came in answer, {} were asked for",
                session.received,
                self.requests.reply_bytes
            );
        }
        let now = Instant::now();
        if member.phase.is_measured() {
            self.tally.done(now - due);
        }
        match self.requests.pace {
            Pace::Closed => self.ask(token, now),
            Pace::Open { .. } => self.ask_next(token),
        }
    }

    /// In an open loop what is overdue counts with the time that has passed, or
    /// a server that stops answering would look as if it had not been asked.
    fn count_unfinished(&mut self) {
        let now = Instant::now();
        if self.requests.pace == Pace::Closed {
            for asked in self.sessions.iter().filter_map(|session| session.asked) {
                if now - asked > session::HUNG {
                    self.tally
                        .failed(|| format!("no answer after {:?}", session::HUNG));
                }
            }
            return;
        }
        let due = self.sessions.iter().flat_map(|session| {
            let waiting = session.waiting.iter().copied();
            session.asked.into_iter().chain(waiting)
        });
        for late in due
            .map(|due| now - due)
            .filter(|late| *late > session::LATE)
        {
            self.tally.unfinished(late);
        }
    }
}
