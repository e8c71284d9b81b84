//! A TCP connection as Linux shows it to the two programs at its ends.
//!
//! Bytes that were sent lie in the sender's buffer until the network brings some of them over,
//! and in the receiver's until they are read. Errors are told as the kernel tells them
//! (`net/ipv4/tcp.c`, `tcp_input.c`): what was received before an RST can still be read, an error
//! is told once, and after that a read sees an end.

use std::collections::VecDeque;
use std::time::Duration;

use gate::worker::ready;

/// gate's end of a connection.
pub const GATE: usize = 0;
/// The client's or the backend's end.
pub const PEER: usize = 1;

/// What a read or a write comes to.
pub type Outcome = Result<usize, i32>;

/// One end.
#[derive(Debug, Default)]
pub struct End {
    /// Received, not read.
    pub rx: VecDeque<u8>,
    /// Sent, not received.
    pub tx: VecDeque<u8>,
    rx_max: usize,
    tx_max: usize,
    /// This end sent FIN, at that time.
    pub fin_sent: Option<Duration>,
    /// The other end's FIN came; what came before may still be unread.
    pub fin_received: bool,
    fin_delivered: bool,
    error: Option<i32>,
    /// Nothing goes either way any more.
    pub dead: bool,
    /// The program closed its descriptor.
    pub closed: bool,
    /// It wants to hear of room to write.
    wants_room: bool,
    /// Bytes that the program read in all.
    pub read_total: usize,
    /// Bytes that the program wrote in all.
    pub written_total: usize,
}

/// A connection.
#[derive(Debug)]
pub struct Tcp {
    /// By [`GATE`] and [`PEER`].
    pub ends: [End; 2],
    /// The handshake is over.
    pub established: bool,
}

/// What is to be sent to an end at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rst {
    /// The end that gets it.
    pub to: usize,
}

impl Tcp {
    /// A connection with buffers of these sizes.
    pub fn new(established: bool, rx_max: [usize; 2], tx_max: [usize; 2]) -> Self {
        let end = |side: usize| End {
            rx_max: rx_max[side],
            tx_max: tx_max[side],
            ..End::default()
        };
        Self {
            ends: [end(GATE), end(PEER)],
            established,
        }
    }

    /// Whether the network has something to bring from that end, and room for it.
    pub fn can_deliver(&self, from: usize) -> bool {
        let (sender, receiver) = (&self.ends[from], &self.ends[1 - from]);
        let has_room = receiver.rx.len() < receiver.rx_max || receiver.closed;
        self.established
            && !sender.dead
            && (!sender.tx.is_empty() && has_room
                || sender.tx.is_empty() && sender.fin_sent.is_some() && !sender.fin_delivered)
    }

    /// The network brings up to `most` bytes of that end, or its FIN behind them.
    pub fn deliver(&mut self, from: usize, most: usize) -> Option<Rst> {
        let [gate, peer] = &mut self.ends;
        let (sender, receiver) = if from == GATE {
            (gate, peer)
        } else {
            (peer, gate)
        };
        if receiver.dead {
            // Long gone: every segment is answered with RST.
            return Some(Rst { to: from });
        }
        if !sender.tx.is_empty() {
            if receiver.closed {
                receiver.die();
                return Some(Rst { to: from });
            }
            let room = receiver.rx_max - receiver.rx.len();
            let count = most.min(room).min(sender.tx.len());
            receiver.rx.extend(sender.tx.drain(..count));
        }
        if sender.tx.is_empty() && sender.fin_sent.is_some() && !sender.fin_delivered {
            sender.fin_delivered = true;
            receiver.fin_received = true;
        }
        None
    }

    /// An RST arrives at that end, or its kernel gives up with that error.
    pub fn break_off(&mut self, to: usize, error: i32) {
        let end = &mut self.ends[to];
        if !end.dead {
            // CLOSE_WAIT answers EPIPE (`tcp_reset`).
            end.error = Some(if end.fin_received { libc::EPIPE } else { error });
            end.die();
        }
    }
}

impl End {
    fn die(&mut self) {
        self.dead = true;
        self.tx.clear();
    }

    /// Reads.
    pub fn receive(&mut self, buffer: &mut [u8]) -> Outcome {
        let count = self.readable(buffer.len())?;
        for (to, from) in buffer.iter_mut().zip(self.rx.drain(..count)) {
            *to = from;
        }
        Ok(count)
    }

    /// How many of `most` bytes could be read now; 0 is the end.
    pub fn readable(&mut self, most: usize) -> Outcome {
        if !self.rx.is_empty() {
            let count = most.min(self.rx.len());
            self.read_total += count;
            return Ok(count);
        }
        if self.fin_received {
            return Ok(0);
        }
        match self.error.take() {
            Some(error) => Err(error),
            None if self.dead => Ok(0),
            None => Err(libc::EAGAIN),
        }
    }

    /// How many of `most` bytes the socket takes now, if it takes no more than `limit`.
    pub fn writable(&mut self, most: usize, limit: usize) -> Outcome {
        if self.dead || self.error.is_some() || self.fin_sent.is_some() {
            return Err(self.error.take().unwrap_or(libc::EPIPE));
        }
        let room = self.tx_max.saturating_sub(self.tx.len());
        let count = most.min(room).min(limit);
        if count < most {
            self.wants_room = true;
        }
        if count == 0 && most > 0 {
            return Err(libc::EAGAIN);
        }
        self.written_total += count;
        Ok(count)
    }

    /// Writes up to `limit` bytes.
    pub fn send(&mut self, bytes: &[u8], limit: usize) -> Outcome {
        let count = self.writable(bytes.len(), limit)?;
        self.tx.extend(&bytes[..count]);
        Ok(count)
    }

    /// Sends FIN after all earlier bytes.
    pub fn end(&mut self, now: Duration) {
        if !self.dead {
            self.fin_sent.get_or_insert(now);
        }
    }

    /// The program closes. Returns whether that resets the connection.
    pub fn close(&mut self, now: Duration, reset: bool) -> bool {
        self.closed = true;
        if self.dead {
            return false;
        }
        if reset || !self.rx.is_empty() {
            self.die();
            return true;
        }
        self.end(now);
        false
    }

    /// Takes the error, as SO_ERROR does.
    pub fn take_error(&mut self) -> Option<i32> {
        self.error.take()
    }

    /// Whether there is room again for one who waits for it (`sk_stream_is_writeable`). Says so
    /// once.
    pub fn tell_room(&mut self) -> bool {
        self.wants_room && self.has_room() && std::mem::take(&mut self.wants_room)
    }

    fn has_room(&self) -> bool {
        3 * self.tx.len() <= 2 * self.tx_max
    }

    /// What poll(2) says (`tcp_poll`).
    pub fn mask(&mut self, established: bool) -> u32 {
        let mut bits = 0;
        if self.error.is_some() {
            bits |= ready::ERROR;
        }
        if self.dead || (self.fin_received && self.fin_sent.is_some()) {
            bits |= ready::HANG_UP;
        }
        if !established && !self.dead {
            return bits;
        }
        if self.fin_received || self.dead {
            bits |= ready::READ | ready::PEER_ENDED;
        }
        if !self.rx.is_empty() {
            bits |= ready::READ;
        }
        if self.has_room() || self.fin_sent.is_some() || self.dead {
            bits |= ready::WRITE;
        } else {
            self.wants_room = true;
        }
        bits
    }
}
