//! The machine that a simulated worker runs on.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use gate::config::Backend;
use gate::worker::{Completion, Event, Key, Kind, Machine, Submitted, Watch};
use gate_common::abi::AdmitRequest;
use gate_common::errno::AdmitErrno;

use super::operations::{self, Posted, Report, Target};
use super::sockets::{SimListener, SimPipe, SimSocket};
use super::tcp::GATE;
use super::world::World;
use super::{backend, evictions, oracle, turns};

/// The largest pipe of a simulated machine.
pub const PIPE_BYTES_MAX: usize = gate::worker::PIPE_BYTES;

/// See the module.
pub struct SimMachine {
    world: Rc<RefCell<World>>,
    worker: usize,
    base: Instant,
    spare: bool,
}

impl SimMachine {
    /// The machine of a worker in that world, which began at `base`.
    pub fn new(world: Rc<RefCell<World>>, worker: usize, base: Instant) -> Self {
        Self {
            world,
            worker,
            base,
            spare: false,
        }
    }

    /// The listening sockets of this worker.
    pub fn listeners(&self) -> Vec<SimListener> {
        let world = self.world.borrow();
        let own =
            (0..world.queues.len()).filter(|queue| world.queues[*queue].worker == self.worker);
        own.map(|queue| SimListener {
            queue,
            world: Rc::clone(&self.world),
        })
        .collect()
    }

    fn socket(&self, line: usize) -> SimSocket {
        SimSocket {
            line,
            world: Rc::clone(&self.world),
            reset: Cell::new(false),
        }
    }

    fn completion(&self, posted: &Posted) -> Completion<SimSocket> {
        let event = match posted.report {
            Report::Accepted(line) => Event::Accepted(self.socket(line)),
            Report::AcceptFailed(error) => Event::AcceptFailed(io::Error::from_raw_os_error(error)),
            Report::Ready(bits) => Event::Ready(bits),
            Report::PollEnded => Event::PollEnded,
            Report::Admitted(code) => Event::Admitted(admitted(code)),
        };
        Completion {
            key: posted.key,
            event,
            more: posted.more,
        }
    }
}

impl Drop for SimMachine {
    fn drop(&mut self) {
        if let Ok(mut world) = self.world.try_borrow_mut() {
            world.fds -= usize::from(self.spare);
            world.spares -= usize::from(self.spare);
            world.rings[self.worker].gone = true;
        }
    }
}

fn admitted(code: i32) -> Result<(), AdmitErrno> {
    match code {
        0 => Ok(()),
        code => Err(AdmitErrno::from_code(code)),
    }
}

fn told(outcome: Result<usize, i32>) -> io::Result<usize> {
    outcome.map_err(io::Error::from_raw_os_error)
}

impl Machine for SimMachine {
    type Listener = SimListener;
    type Socket = SimSocket;
    type Pipe = SimPipe;

    fn now(&self) -> Instant {
        self.base + self.world.borrow().now
    }

    fn accept(&mut self, listener: &SimListener, watch: Watch, key: Key) -> io::Result<()> {
        let world = &mut *self.world.borrow_mut();
        let ring = &mut world.rings[self.worker];
        ring.arm(key, Target::Listener(listener.queue), watch);
        if watch == Watch::Changes && world.plan.one_accept {
            let refused = Report::AcceptFailed(libc::EINVAL);
            ring.post(key, refused, false, world.now);
        }
        Ok(())
    }

    fn accept_now(&mut self, listener: &SimListener) -> io::Result<SimSocket> {
        let mut world = self.world.borrow_mut();
        let Some(line) = world.queues[listener.queue].backlog.front().copied() else {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        };
        world.take_fds(1).map_err(io::Error::from_raw_os_error)?;
        world.queues[listener.queue].backlog.pop_front();
        evictions::accepted(&mut world, line);
        if world.control.left {
            world.saw("a leaving worker finds a client at its last look");
        }
        drop(world);
        Ok(self.socket(line))
    }

    fn poll(&mut self, socket: &SimSocket, watch: Watch, key: Key) -> io::Result<()> {
        let mut world = self.world.borrow_mut();
        world.rings[self.worker].arm(key, Target::Line(socket.line), watch);
        Ok(())
    }

    fn poll_waker(&mut self, key: Key) -> io::Result<()> {
        let mut world = self.world.borrow_mut();
        world.rings[self.worker].arm(key, Target::Waker, Watch::Once);
        Ok(())
    }

    fn clear_waker(&mut self) {
        let world = &mut *self.world.borrow_mut();
        if let Some(state) = &world.state {
            state.wakers[self.worker].clear();
        }
        world.rings[self.worker].waker_set = false;
    }

    fn admit(
        &mut self,
        client: &SimSocket,
        request: &AdmitRequest,
        key: Key,
    ) -> io::Result<Submitted> {
        let code = request.instance as i32;
        let world = &mut *self.world.borrow_mut();
        let in_flight = !world.random.one_in(world.plan.answered_one_in);
        turns::asked(world, client.line, key, code, in_flight);
        if in_flight {
            operations::admit(world, self.worker, key, client.line, code);
            return Ok(Submitted::InFlight);
        }
        Ok(Submitted::Answered(admitted(code)))
    }

    fn cancel(&mut self, key: Key) -> io::Result<()> {
        let world = &mut *self.world.borrow_mut();
        if let Some(line) = world.rings[self.worker].line_of(key) {
            evictions::given_up(world, line);
        }
        operations::cancel(world, self.worker, key);
        Ok(())
    }

    /// The crew calls a round only when there is something to wait for no more.
    fn wait(&mut self, _timeout: Duration, out: &mut Vec<Completion<SimSocket>>) -> io::Result<()> {
        let world = &mut *self.world.borrow_mut();
        let now = world.now;
        let ring = &mut world.rings[self.worker];
        let taken = ring.take(now, &mut world.random);
        for posted in &taken {
            match posted.report {
                Report::Accepted(line) => evictions::accepted(world, line),
                Report::Admitted(_) => turns::answered(world, self.worker, posted.key),
                Report::Ready(_) if posted.key.kind == Kind::Waker => {
                    world.rings[self.worker].wakes += 1;
                }
                _ => {}
            }
            out.push(self.completion(posted));
        }
        if world.plan.stale
            && world.random.one_in(8)
            && let Some(posted) = world.rings[self.worker].stale(&mut world.random)
        {
            out.push(self.completion(&posted));
        }
        world.note(|| format!("step {}, worker {}: {out:?}", world.round, self.worker));
        Ok(())
    }

    fn connect(&mut self, backend: &Backend, _address: usize) -> io::Result<SimSocket> {
        let line = backend::dial(&mut self.world.borrow_mut(), self.worker, &backend.name);
        line.map(|line| self.socket(line))
            .map_err(io::Error::from_raw_os_error)
    }

    fn connected(&mut self, socket: &SimSocket) -> io::Result<bool> {
        let tcp = &mut self.world.borrow_mut().lines[socket.line].tcp;
        match tcp.ends[GATE].take_error() {
            Some(error) => Err(io::Error::from_raw_os_error(error)),
            None => Ok(tcp.established && !tcp.ends[GATE].dead),
        }
    }

    fn peer(&mut self, socket: &SimSocket) -> Option<SocketAddr> {
        let last = socket.line as u8 % 3;
        Some((Ipv4Addr::new(10, 0, 0, last), 1).into())
    }

    fn receive(&mut self, socket: &SimSocket, buffer: &mut [u8]) -> io::Result<usize> {
        let world = &mut *self.world.borrow_mut();
        let role = world.lines[socket.line].role;
        let outcome = world.lines[socket.line].tcp.ends[GATE].receive(buffer);
        world.note(|| format!("{role:?} receive {outcome:?}"));
        world.settle(socket.line);
        told(outcome)
    }

    fn send(&mut self, socket: &SimSocket, bytes: &[u8], _more: bool) -> io::Result<usize> {
        let world = &mut *self.world.borrow_mut();
        let role = world.lines[socket.line].role;
        // What fits into one segment is taken whole.
        let limit = if bytes.len() > 512 && world.fault() {
            world.random.up_to(bytes.len())
        } else {
            bytes.len()
        };
        let outcome = world.lines[socket.line].tcp.ends[GATE].send(bytes, limit);
        world.note(|| format!("{role:?} send {} {outcome:?}", bytes.len()));
        world.settle(socket.line);
        told(outcome)
    }

    fn widen(&mut self, _socket: &SimSocket) {}

    fn end(&mut self, socket: &SimSocket) {
        let world = &mut *self.world.borrow_mut();
        let role = world.lines[socket.line].role;
        world.note(|| format!("{role:?} end"));
        oracle::gate_ends(world, socket.line);
        let now = world.now;
        world.lines[socket.line].tcp.ends[GATE].end(now);
        world.settle(socket.line);
    }

    fn close(&mut self, socket: SimSocket) {
        drop(socket);
    }

    fn reset(&mut self, socket: SimSocket) {
        socket.reset.set(true);
    }

    fn pipe(&mut self) -> io::Result<SimPipe> {
        let world = &mut *self.world.borrow_mut();
        world.take_fds(2).map_err(io::Error::from_raw_os_error)?;
        world.pipes += 1;
        Ok(SimPipe {
            bytes: RefCell::default(),
            bytes_max: world
                .random
                .pick(&[64 * 1024, PIPE_BYTES_MAX / 4, PIPE_BYTES_MAX]),
            world: Rc::clone(&self.world),
        })
    }

    fn fill(&mut self, source: &SimSocket, pipe: &SimPipe, bytes: usize) -> io::Result<usize> {
        let world = &mut *self.world.borrow_mut();
        let role = world.lines[source.line].role;
        let mut held = pipe.bytes.borrow_mut();
        let room = pipe.bytes_max - held.len();
        let most = bytes.min(room).min(world.random.up_to(bytes));
        if most == 0 {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
        let end = &mut world.lines[source.line].tcp.ends[GATE];
        let outcome = end.readable(most);
        if let Ok(count) = outcome {
            held.extend(end.rx.drain(..count));
            world.spliced += count;
        }
        world.note(|| format!("{role:?} fill {outcome:?}"));
        world.settle(source.line);
        told(outcome)
    }

    fn drain(&mut self, pipe: &SimPipe, sink: &SimSocket, bytes: usize) -> io::Result<usize> {
        let world = &mut *self.world.borrow_mut();
        let role = world.lines[sink.line].role;
        let mut held = pipe.bytes.borrow_mut();
        assert!(bytes <= held.len(), "more than is in the pipe");
        let limit = world.random.up_to(bytes);
        let end = &mut world.lines[sink.line].tcp.ends[GATE];
        let outcome = end.writable(bytes, limit);
        if let Ok(count) = outcome {
            end.tx.extend(held.drain(..count));
        }
        world.note(|| format!("{role:?} drain {outcome:?}"));
        world.settle(sink.line);
        told(outcome)
    }

    fn keep_spare(&mut self) -> bool {
        if !self.spare {
            let world = &mut *self.world.borrow_mut();
            self.spare = world.take_fds(1).is_ok();
            world.spares += usize::from(self.spare);
        }
        self.spare
    }

    fn give_up_spare(&mut self) -> bool {
        let gave = usize::from(std::mem::take(&mut self.spare));
        let world = &mut *self.world.borrow_mut();
        world.fds -= gave;
        world.spares -= gave;
        gave > 0
    }
}
