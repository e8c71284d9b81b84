//! The machine that a simulated worker runs on.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use gate::config::Backend;
use gate::worker::{Completion, Event, Key, Machine, Submitted, Watch};
use gate_common::abi::AdmitRequest;
use gate_common::errno::AdmitErrno;

use super::operations::{self, Posted, Report, Target};
use super::tcp::GATE;
use super::world::World;
use super::{backend, oracle};

/// The largest pipe of a simulated machine.
pub const PIPE_BYTES_MAX: usize = gate::worker::PIPE_BYTES;

/// More steps than any world needs: a worker that spins is a failure.
const STEPS_MAX: u64 = 200_000;

/// See the module.
pub struct SimMachine {
    world: Rc<RefCell<World>>,
    base: Instant,
    step: Rc<Cell<u64>>,
    spare: bool,
}

/// gate's end of a connection.
pub struct SimSocket {
    line: usize,
    world: Rc<RefCell<World>>,
    reset: Cell<bool>,
}

/// A pipe.
pub struct SimPipe {
    bytes: RefCell<VecDeque<u8>>,
    bytes_max: usize,
    world: Rc<RefCell<World>>,
}

impl SimMachine {
    /// A machine in that world, which counts its steps there.
    pub fn new(world: Rc<RefCell<World>>, step: Rc<Cell<u64>>) -> Self {
        Self {
            world,
            base: Instant::now(),
            step,
            spare: false,
        }
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
        if self.spare
            && let Ok(mut world) = self.world.try_borrow_mut()
        {
            world.fds -= 1;
        }
    }
}

impl Drop for SimSocket {
    fn drop(&mut self) {
        if !std::thread::panicking()
            && let Ok(mut world) = self.world.try_borrow_mut()
        {
            world.close(self.line, GATE, self.reset.get());
        }
    }
}

impl Drop for SimPipe {
    fn drop(&mut self) {
        if let Ok(mut world) = self.world.try_borrow_mut() {
            world.fds -= 2;
            world.pipes -= 1;
        }
    }
}

impl std::fmt::Debug for SimSocket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.world.try_borrow() {
            Ok(world) => write!(f, "{:?}", world.lines[self.line].role),
            Err(_) => write!(f, "line {}", self.line),
        }
    }
}

impl std::fmt::Debug for SimPipe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimPipe({})", self.bytes.borrow().len())
    }
}

/// The ledger of a simulation lies in this process and looks at no descriptor.
impl AsFd for SimSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        static ANY: OnceLock<File> = OnceLock::new();
        ANY.get_or_init(|| File::open("/dev/null").expect("it is there"))
            .as_fd()
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
    type Listener = ();
    type Socket = SimSocket;
    type Pipe = SimPipe;

    fn now(&self) -> Instant {
        self.base + self.world.borrow().now
    }

    fn accept(&mut self, (): &(), watch: Watch, key: Key) -> io::Result<()> {
        let mut world = self.world.borrow_mut();
        world.operations.arm(key, Target::Listener, watch);
        if watch == Watch::Changes && world.plan.one_accept {
            let now = world.now;
            let refused = Report::AcceptFailed(libc::EINVAL);
            world.operations.post(key, refused, false, now);
        }
        Ok(())
    }

    fn accept_now(&mut self, (): &()) -> io::Result<SimSocket> {
        let mut world = self.world.borrow_mut();
        let Some(line) = world.backlog.front().copied() else {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        };
        world.take_fds(1).map_err(io::Error::from_raw_os_error)?;
        world.backlog.pop_front();
        drop(world);
        Ok(self.socket(line))
    }

    fn poll(&mut self, socket: &SimSocket, watch: Watch, key: Key) -> io::Result<()> {
        let mut world = self.world.borrow_mut();
        world.operations.arm(key, Target::Line(socket.line), watch);
        Ok(())
    }

    fn poll_waker(&mut self, key: Key) -> io::Result<()> {
        let mut world = self.world.borrow_mut();
        world.operations.arm(key, Target::Waker, Watch::Once);
        Ok(())
    }

    fn clear_waker(&mut self) {
        self.world.borrow_mut().operations.waker_set = false;
    }

    fn admit(
        &mut self,
        client: &SimSocket,
        request: &AdmitRequest,
        key: Key,
    ) -> io::Result<Submitted> {
        let code = request.instance as i32;
        let world = &mut *self.world.borrow_mut();
        if world.random.one_in(4) {
            return Ok(Submitted::Answered(admitted(code)));
        }
        operations::admit(world, key, client.line, code);
        Ok(Submitted::InFlight)
    }

    fn cancel(&mut self, key: Key) -> io::Result<()> {
        operations::cancel(&mut self.world.borrow_mut(), key);
        Ok(())
    }

    fn wait(&mut self, timeout: Duration, out: &mut Vec<Completion<SimSocket>>) -> io::Result<()> {
        self.step.set(self.step.get() + 1);
        assert!(self.step.get() < STEPS_MAX, "the worker spins");
        let world = &mut *self.world.borrow_mut();
        oracle::at_step(world);
        // The worker's own work takes time, too.
        let work = world.random.delay(Duration::from_micros(100));
        world.now += work;
        let until = world.now + timeout;
        loop {
            while world.next_at().is_some_and(|at| at <= world.now) {
                world.happen();
            }
            operations::collect(world);
            let taken = world.operations.take(world.now, &mut world.random);
            if !taken.is_empty() {
                out.extend(taken.iter().map(|posted| self.completion(posted)));
                break;
            }
            let next = world
                .next_at()
                .into_iter()
                .chain(world.operations.next_at());
            match next.min() {
                Some(at) if at <= until => world.now = world.now.max(at),
                _ => {
                    world.now = world.now.max(until);
                    world.rest();
                    break;
                }
            }
        }
        if world.plan.stale
            && world.random.one_in(8)
            && let Some(posted) = world.operations.stale(&mut world.random)
        {
            out.push(self.completion(&posted));
        }
        world.note(|| format!("step {}: {out:?}", self.step.get()));
        Ok(())
    }

    fn connect(&mut self, backend: &Backend, _address: usize) -> io::Result<SimSocket> {
        let line = backend::dial(&mut self.world.borrow_mut(), &backend.name);
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
            self.spare = self.world.borrow_mut().take_fds(1).is_ok();
        }
        self.spare
    }

    fn give_up_spare(&mut self) -> bool {
        let gave = std::mem::take(&mut self.spare);
        self.world.borrow_mut().fds -= usize::from(gave);
        gave
    }
}
