//! What a simulated worker has descriptors of. Each is closed when it is dropped.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::OnceLock;

use super::control;
use super::tcp::GATE;
use super::world::World;

/// One of the listening sockets.
pub struct SimListener {
    pub(super) queue: usize,
    pub(super) world: Rc<RefCell<World>>,
}

/// gate's end of a connection.
pub struct SimSocket {
    pub(super) line: usize,
    pub(super) world: Rc<RefCell<World>>,
    pub(super) reset: Cell<bool>,
}

/// A pipe.
pub struct SimPipe {
    pub(super) bytes: RefCell<VecDeque<u8>>,
    pub(super) bytes_max: usize,
    pub(super) world: Rc<RefCell<World>>,
}

impl Drop for SimListener {
    fn drop(&mut self) {
        if !std::thread::panicking()
            && let Ok(mut world) = self.world.try_borrow_mut()
        {
            control::listener_closed(&mut world, self.queue);
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
