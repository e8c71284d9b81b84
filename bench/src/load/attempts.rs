//! Connections made one after another: let in, refused after the startup packet,
//! or refused at once.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Result;
use slab::Slab;
use socket2::{Domain, Protocol, Socket, Type};

use super::crew::{Crew, Member, Place};
use super::event_loop::{EventLoop, Happened};
use super::pace::{Pace, Schedule};
use super::session;
use super::tally::Tally;
use crate::wire;

/// A login takes less, and less than 1 KiB.
const READ_BYTES: usize = 8192;
/// An attempt that takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(5);
/// Then the loop looks at what happened, and at its orders.
const BEGUN_PER_TURN: usize = 64;
/// After a failure, so that a target that is gone makes no loop spin.
const BREATH: Duration = Duration::from_millis(1);

/// What is to come of each attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// ReadyForQuery; then the client terminates and closes.
    Ready,
    /// FATAL 53300 after the startup packet, then the end.
    RefusedPolitely,
    /// The end or a reset, before any byte of an answer.
    RefusedHard,
}

/// What is attempted.
#[derive(Clone, Debug)]
pub struct Attempts {
    /// At once, over all threads.
    pub at_once: usize,
    /// What is to come of each.
    pub goal: Goal,
    /// The user of the startup packet.
    pub user: String,
    /// When.
    pub pace: Pace,
}

/// Starts attempting.
///
/// # Errors
/// No threads are left.
pub fn start(place: &Place, target: SocketAddr, attempts: Attempts) -> Result<Crew> {
    Crew::start(place, attempts.at_once, move |member| {
        Thread::new(&member, target, attempts.clone())?.run(&member)
    })
}

struct Attempt {
    stream: TcpStream,
    due: Instant,
    begun: Instant,
    greeted: bool,
    answer: Vec<u8>,
}

/// What has come of an attempt.
enum Outcome {
    AsWanted,
    Otherwise(String),
}

struct Thread {
    target: SocketAddr,
    attempts: Attempts,
    at_once: usize,
    packet: Vec<u8>,
    events: EventLoop,
    running: Slab<Attempt>,
    /// Due, but as many as may run at once do.
    waiting: VecDeque<Instant>,
    /// Of attempts that are over.
    spare: Vec<Vec<u8>>,
    tally: Tally,
}

impl Thread {
    fn new(member: &Member, target: SocketAddr, attempts: Attempts) -> Result<Self> {
        Ok(Self {
            target,
            at_once: member.share(attempts.at_once),
            packet: wire::startup_packet(&attempts.user, session::DATABASE),
            attempts,
            events: EventLoop::new()?,
            running: Slab::new(),
            waiting: VecDeque::new(),
            spare: Vec::new(),
            tally: Tally::new(),
        })
    }

    fn run(mut self, member: &Member) -> Result<Tally> {
        let pace = self.attempts.pace;
        let mut schedule = pace.schedule(member.index, member.of, Instant::now());
        let mut told = Vec::new();
        let mut swept = Instant::now();
        while !member.phase.is_over() {
            let now = Instant::now();
            while let Some(due) = schedule.as_mut().and_then(|schedule| schedule.take(now)) {
                self.waiting.push_back(due);
            }
            self.begin_what_may(member, schedule.is_none());
            let may_begin = !self.waiting.is_empty() && self.running.len() < self.at_once;
            let until = match &schedule {
                Some(_) if may_begin => Some(now),
                schedule => schedule.as_ref().map(Schedule::due),
            };
            self.events.wait(until, &mut told)?;
            for event in &told {
                self.go_on(*event, member);
            }
            if now - swept > PATIENCE / 10 {
                swept = now;
                self.give_up_the_slow(member, now);
            }
        }
        let now = Instant::now();
        if pace == Pace::Closed {
            for (_, attempt) in &self.running {
                if now - attempt.begun > session::HUNG {
                    self.tally
                        .failed(|| format!("no end after {:?}", session::HUNG));
                }
            }
        } else {
            let running = self.running.iter().map(|(_, attempt)| attempt.due);
            let due = running.chain(self.waiting.iter().copied());
            for late in due
                .map(|due| now - due)
                .filter(|late| *late > session::LATE)
            {
                self.tally.unfinished(late);
            }
        }
        Ok(self.tally)
    }

    fn begin_what_may(&mut self, member: &Member, closed: bool) {
        // Bounded, because an attempt may be over as soon as it has begun.
        for _ in 0..BEGUN_PER_TURN {
            if self.running.len() >= self.at_once {
                break;
            }
            let due = if closed {
                Some(Instant::now())
            } else {
                self.waiting.pop_front()
            };
            let Some(due) = due else { break };
            if let Err(error) = self.begin(due, member) {
                self.over(None, Err(error), due, member);
                std::thread::sleep(BREATH);
                break;
            }
        }
    }

    fn begin(&mut self, due: Instant, member: &Member) -> io::Result<()> {
        let kind = Type::STREAM.nonblocking().cloexec();
        let domain = Domain::for_address(self.target);
        let socket = session::like_ethernet(Socket::new(domain, kind, Some(Protocol::TCP))?)?;
        let connected = socket.connect(&self.target.into());
        let stream = TcpStream::from(socket);
        match connected {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(error) => {
                self.over(
                    None,
                    refused_at_once(self.attempts.goal, error),
                    due,
                    member,
                );
                return Ok(());
            }
        }
        let entry = self.running.vacant_entry();
        self.events.add(&stream, entry.key())?;
        entry.insert(Attempt {
            stream,
            due,
            begun: Instant::now(),
            greeted: false,
            answer: self.spare.pop().unwrap_or_default(),
        });
        Ok(())
    }

    fn go_on(&mut self, event: Happened, member: &Member) {
        // Several events of one turn may be of an attempt that is over.
        let Some(attempt) = self.running.get_mut(event.token) else {
            return;
        };
        let (goal, due) = (self.attempts.goal, attempt.due);
        let outcome = match attempt.go_on(event, &self.packet, goal) {
            Ok(None) => return,
            Ok(Some(outcome)) => Ok(outcome),
            Err(error) => refused_at_once(goal, error),
        };
        self.over(Some(event.token), outcome, due, member);
    }

    fn over(
        &mut self,
        token: Option<usize>,
        outcome: io::Result<Outcome>,
        due: Instant,
        member: &Member,
    ) {
        if let Some(token) = token {
            let mut answer = self.running.remove(token).answer;
            answer.clear();
            self.spare.push(answer);
        }
        if !member.phase.is_measured() {
            return;
        }
        let what = match outcome {
            Ok(Outcome::AsWanted) => return self.tally.done(due.elapsed()),
            Ok(Outcome::Otherwise(what)) => what,
            Err(error) => error.to_string(),
        };
        match self.attempts.pace {
            Pace::Closed => self.tally.failed(|| what),
            Pace::Open { .. } => self.tally.failed_late(due.elapsed(), || what),
        }
    }

    fn give_up_the_slow(&mut self, member: &Member, now: Instant) {
        let slow: Vec<(usize, Instant)> = self
            .running
            .iter()
            .filter(|(_, attempt)| now.saturating_duration_since(attempt.begun) > PATIENCE)
            .map(|(token, attempt)| (token, attempt.due))
            .collect();
        for (token, due) in slow {
            let slow = Outcome::Otherwise(format!("no answer within {PATIENCE:?}"));
            self.over(Some(token), Ok(slow), due, member);
        }
    }
}

impl Attempt {
    /// `None`: it is not over yet.
    fn go_on(&mut self, event: Happened, packet: &[u8], goal: Goal) -> io::Result<Option<Outcome>> {
        if !self.greeted && event.writable {
            if let Some(error) = self.stream.take_error()? {
                return Err(error);
            }
            // It fits into an empty send buffer, always.
            self.stream.write_all(packet)?;
            self.greeted = true;
        }
        if !event.readable {
            return Ok(None);
        }
        let mut buffer = [0; READ_BYTES];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return Ok(Some(at_end(&self.answer, goal))),
                Ok(bytes) => self.answer.extend_from_slice(&buffer[..bytes]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(error),
            }
            if goal == Goal::Ready
                && let Some(outcome) = let_in(&self.answer)
            {
                // As libpq ends. That the target is gone already is its affair.
                let _ = self.stream.write_all(&wire::TERMINATE);
                return Ok(Some(outcome));
            }
        }
    }
}

fn let_in(answer: &[u8]) -> Option<Outcome> {
    wire::messages(answer).find_map(|(kind, body)| match kind {
        b'Z' => Some(Outcome::AsWanted),
        b'E' => Some(Outcome::Otherwise(session::text(body))),
        _ => None,
    })
}

/// The target ended the connection.
fn at_end(answer: &[u8], goal: Goal) -> Outcome {
    let error = wire::messages(answer).find(|(kind, _)| *kind == b'E');
    let error = error.map(|(_, body)| body);
    match (goal, error) {
        (Goal::RefusedHard, None) if answer.is_empty() => Outcome::AsWanted,
        (Goal::RefusedPolitely, Some(body)) if is_refusal(body) => Outcome::AsWanted,
        (_, Some(body)) => Outcome::Otherwise(session::text(body)),
        (_, None) => Outcome::Otherwise(format!("the end, after {} bytes", answer.len())),
    }
}

/// PgBouncer says "no more connections allowed" with a SQLSTATE of its own.
fn is_refusal(body: &[u8]) -> bool {
    wire::sqlstate(body) == Some(wire::TOO_MANY_CONNECTIONS)
        || session::text(body).contains("no more connections allowed")
}

/// A reset is what a hard refusal looks like.
fn refused_at_once(goal: Goal, error: io::Error) -> io::Result<Outcome> {
    let reset = matches!(
        error.kind(),
        ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
    );
    if goal == Goal::RefusedHard && reset {
        Ok(Outcome::AsWanted)
    } else {
        Err(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(answer: &[u8], goal: Goal) -> bool {
        matches!(at_end(answer, goal), Outcome::AsWanted)
    }

    #[test]
    fn only_what_was_wanted_counts_as_done() {
        let refusal = wire::message(b'E', b"SFATAL\0VFATAL\0C53300\0Mtoo many\0\0");
        let other = wire::message(b'E', b"SFATAL\0VFATAL\0C57P03\0Mnot now\0\0");
        assert!(wanted(&refusal, Goal::RefusedPolitely));
        assert!(!wanted(&other, Goal::RefusedPolitely));
        assert!(!wanted(
            &refusal[..refusal.len() - 1],
            Goal::RefusedPolitely
        ));
        assert!(!wanted(b"", Goal::RefusedPolitely));
        assert!(wanted(b"", Goal::RefusedHard));
        assert!(!wanted(&refusal, Goal::RefusedHard));
        assert!(!wanted(b"", Goal::Ready));
        assert!(matches!(let_in(&wire::welcome()), Some(Outcome::AsWanted)));
        assert!(matches!(let_in(&refusal), Some(Outcome::Otherwise(_))));
        assert!(let_in(&wire::welcome()[..20]).is_none());
    }

    #[test]
    fn a_reset_is_a_hard_refusal_only() {
        let reset = || io::Error::from(ErrorKind::ConnectionRefused);
        assert!(refused_at_once(Goal::RefusedHard, reset()).is_ok());
        assert!(refused_at_once(Goal::RefusedPolitely, reset()).is_err());
        let other = io::Error::from(ErrorKind::AddrNotAvailable);
        assert!(refused_at_once(Goal::RefusedHard, other).is_err());
    }
}
