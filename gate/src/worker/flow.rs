//! One direction of a relay, and the pipes through which bulk goes.
//!
//! Small messages are copied through the worker's one buffer. A direction whose
//! reads fill that buffer again and again takes a pipe from the pool and moves
//! its bytes by splice(2), without a copy, until its sender pauses. Bytes are
//! held back only while the receiver is slower than the sender, and then
//! nothing more is read.

use std::io;

use super::connection::{Gone, Side};
use super::machine::Machine;

/// Full reads in a row after which a direction is spliced. One is a message of
/// some size; bulk fills the buffer each time.
const FULL_READS: u8 = 2;

/// Wishes for a pipe that are not tried after one that failed: the reason will
/// last, and each try costs some system calls.
const REST: u32 = 1000;

/// What a receiver has not taken yet.
#[derive(Debug)]
enum Held<P> {
    /// Nothing: the idle state, without memory.
    Nothing,
    /// Bytes.
    Bytes(Box<Spill>),
    /// So many bytes in a pipe; none while it moves on.
    Piped(P, u32),
}

/// Bytes of which the first so many are sent.
#[derive(Debug)]
struct Spill {
    bytes: Vec<u8>,
    sent: usize,
}

impl<P> Held<P> {
    fn bytes(bytes: Vec<u8>) -> Self {
        if bytes.is_empty() {
            Self::Nothing
        } else {
            Self::Bytes(Box::new(Spill { bytes, sent: 0 }))
        }
    }
}

/// What became of what was held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flushed {
    /// Nothing is held.
    Empty,
    /// The receiver takes no more for now.
    Blocked,
    /// The receiver takes nothing any more.
    Lost(Gone),
}

/// What a move into the pipe brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// So many bytes.
    Data(usize),
    /// Nothing for now; a poll will tell.
    Blocked,
    /// The sender's FIN.
    Ended,
    /// The sender's connection broke.
    Lost,
}

/// See the module.
#[derive(Debug)]
pub struct Flow<P> {
    held: Held<P>,
    full_reads: u8,
    /// Nobody wants the bytes any more: read and drop them.
    pub drops: bool,
    /// Its end was reported; nothing is read any more.
    pub finished: bool,
}

impl<P> Default for Flow<P> {
    fn default() -> Self {
        Self {
            held: Held::Nothing,
            full_reads: 0,
            drops: false,
            finished: false,
        }
    }
}

impl<P> Flow<P> {
    /// A flow that first sends `bytes`.
    pub fn starting_with(bytes: Vec<u8>) -> Self {
        Self {
            held: Held::bytes(bytes),
            ..Self::default()
        }
    }

    /// Whether its bytes go through a pipe.
    pub fn is_piped(&self) -> bool {
        matches!(self.held, Held::Piped(..))
    }

    /// Whether it has much to move: its turn comes after those of small messages.
    pub fn is_bulk(&self) -> bool {
        self.is_piped() || self.full_reads > 0
    }

    /// Bytes held back.
    pub fn held(&self) -> usize {
        match &self.held {
            Held::Nothing => 0,
            Held::Bytes(spill) => spill.bytes.len() - spill.sent,
            Held::Piped(_, filled) => *filled as usize,
        }
    }

    /// Sends what was held back.
    pub fn flush<M: Machine<Pipe = P>>(
        &mut self,
        machine: &mut M,
        sink: Option<&Side<M::Socket>>,
    ) -> Flushed {
        match &mut self.held {
            Held::Nothing | Held::Piped(_, 0) => Flushed::Empty,
            Held::Bytes(spill) => {
                let left = &spill.bytes[spill.sent..];
                let Some(sink) = sink else {
                    return Flushed::Lost(Gone::Ended);
                };
                match sink.send(machine, left) {
                    Ok(count) => spill.sent += count,
                    Err(gone) => return Flushed::Lost(gone),
                }
                if spill.sent < spill.bytes.len() {
                    return Flushed::Blocked;
                }
                // Gives the memory back: an idle session holds no buffer.
                self.held = Held::Nothing;
                Flushed::Empty
            }
            Held::Piped(pipe, filled) => {
                let Some(sink) = sink else {
                    return Flushed::Lost(Gone::Ended);
                };
                while *filled > 0 {
                    match machine.drain(pipe, &sink.socket, *filled as usize) {
                        // Cannot be with bytes in the pipe; if it is, it is
                        // not to be tried for ever.
                        Ok(0) => return Flushed::Lost(Gone::Broken),
                        Ok(count) => *filled -= (count as u32).min(*filled),
                        Err(error) => match error.kind() {
                            io::ErrorKind::Interrupted => {}
                            io::ErrorKind::WouldBlock => return Flushed::Blocked,
                            _ => return Flushed::Lost(Gone::of(&error)),
                        },
                    }
                }
                Flushed::Empty
            }
        }
    }

    /// Sends fresh bytes, and holds back what the receiver does not take. Call it
    /// with nothing held.
    pub fn pass<M: Machine<Pipe = P>>(
        &mut self,
        machine: &mut M,
        sink: Option<&Side<M::Socket>>,
        bytes: &[u8],
    ) -> Result<(), Gone> {
        if self.drops {
            return Ok(());
        }
        let sent = sink.ok_or(Gone::Ended)?.send(machine, bytes)?;
        self.held = Held::bytes(bytes[sent..].to_vec());
        Ok(())
    }

    /// Notes whether a read filled the whole buffer. Returns whether the flow
    /// is worth a pipe now.
    pub fn wants_pipe(&mut self, full: bool) -> bool {
        self.full_reads = if full {
            self.full_reads.saturating_add(1)
        } else {
            0
        };
        self.full_reads >= FULL_READS && !self.drops && matches!(self.held, Held::Nothing)
    }

    /// Bytes go through this pipe from now on.
    pub fn take_pipe(&mut self, pipe: P) {
        debug_assert!(matches!(self.held, Held::Nothing));
        self.held = Held::Piped(pipe, 0);
    }

    /// Drops what is held and what comes. Returns the pipe, if it has one.
    pub fn drop_all(&mut self) -> GivenBack<P> {
        self.drops = true;
        if let Held::Bytes(_) = self.held {
            self.held = Held::Nothing;
        }
        self.give_pipe()
    }

    /// Ends the splicing. Returns the pipe if it is empty; one with bytes in it
    /// is closed, and its place in the pool is free all the same.
    pub fn give_pipe(&mut self) -> GivenBack<P> {
        self.full_reads = 0;
        match std::mem::replace(&mut self.held, Held::Nothing) {
            Held::Piped(pipe, 0) => GivenBack::Empty(pipe),
            Held::Piped(..) => GivenBack::Closed,
            other => {
                self.held = other;
                GivenBack::None
            }
        }
    }

    /// Moves up to `bytes` from the sender into the empty pipe.
    pub fn fill<M: Machine<Pipe = P>>(
        &mut self,
        machine: &mut M,
        source: &mut Side<M::Socket>,
        bytes: usize,
    ) -> Filled {
        let Held::Piped(pipe, filled) = &mut self.held else {
            return Filled::Blocked;
        };
        loop {
            return match machine.fill(&source.socket, pipe, bytes) {
                Ok(0) => Filled::Ended,
                Ok(count) => {
                    *filled += count as u32;
                    Filled::Data(count)
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    // The pipe is empty: it is the sender that has nothing.
                    io::ErrorKind::WouldBlock => {
                        source.readable = false;
                        Filled::Blocked
                    }
                    _ => Filled::Lost,
                },
            };
        }
    }
}

/// What [`Flow::give_pipe`] returns.
#[derive(Debug)]
pub enum GivenBack<P> {
    /// The flow had no pipe.
    None,
    /// An empty pipe, for the pool.
    Empty(P),
    /// The pipe was closed with what was in it.
    Closed,
}

/// The pipes of one worker.
#[derive(Debug)]
pub struct Pipes<P> {
    idle: Vec<P>,
    made: usize,
    max: usize,
    /// How many wishes are not tried, after one that failed.
    resting: u32,
}

impl<P> Pipes<P> {
    /// A pool that makes up to `max` pipes as they are needed.
    pub fn new(max: usize) -> Self {
        Self {
            idle: Vec::new(),
            made: 0,
            max,
            resting: 0,
        }
    }

    /// A pipe, if one is to be had. Without one, bulk is copied.
    pub fn take<M: Machine<Pipe = P>>(&mut self, machine: &mut M) -> Option<P> {
        if let Some(pipe) = self.idle.pop() {
            return Some(pipe);
        }
        if self.made >= self.max {
            return None;
        }
        if self.resting > 0 {
            self.resting -= 1;
            return None;
        }
        match machine.pipe() {
            Ok(pipe) => {
                self.made += 1;
                Some(pipe)
            }
            Err(error) => {
                tracing::debug!(%error, "no pipe: bulk is copied");
                self.resting = REST;
                None
            }
        }
    }

    /// Takes back what a flow had.
    pub fn take_back(&mut self, given: GivenBack<P>) {
        match given {
            GivenBack::None => {}
            GivenBack::Empty(pipe) => self.idle.push(pipe),
            GivenBack::Closed => self.made -= 1,
        }
    }

    /// Pipes that flows have now.
    pub fn lent(&self) -> usize {
        self.made - self.idle.len()
    }
}
