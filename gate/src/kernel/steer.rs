//! Who chooses the worker of a new connection.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant};

use aya::Ebpf;
use aya::maps::{MapError, ReusePortSockArray};
use aya::programs::SkReuseport;
use gate_common::abi::map;
use gate_common::steer::{WORKERS_MAX, WorkerLoad};

use super::error::KernelError;
use super::maps::{Access, Mapping, errno};
use super::{Plane, STEER, Steering, load, lock, pins::PinDirectory, program};

/// What each worker has to do, as the program reads it.
pub type WorkerLoads = Mapping<WorkerLoad<AtomicU64>>;

/// How long the sockets may still belong to the program of an earlier gate: the
/// kernel frees it a little after it is replaced.
const PATIENCE: Duration = Duration::from_secs(5);

/// Who chooses the worker of a new connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The program: the less loaded of two.
    LessLoaded,
    /// The kernel: by SO_INCOMING_CPU where the sockets have it, else by hash.
    Kernel,
}

/// The listening sockets of one address.
#[derive(Clone, Debug)]
pub struct Group<'a> {
    /// Index of LISTENER_STATE.
    pub listener: u32,
    /// All that listen there, by worker.
    pub sockets: Vec<BorrowedFd<'a>>,
}

impl Plane {
    /// Attaches the program to SO_REUSEPORT groups: it resets SYNs while too many
    /// of a listener's sockets are over its ceiling, and chooses the worker if it
    /// is to. The program of an earlier gate on the same sockets is replaced; it
    /// lives as long as the group. The loads, if the program chooses, are for the
    /// workers to write.
    ///
    /// # Errors
    /// The program is refused, a socket does not listen or is in no such group.
    pub fn steer(
        &self,
        groups: &[Group<'_>],
        choice: Choice,
    ) -> Result<Option<Arc<WorkerLoads>>, KernelError> {
        let _lock = lock(&self.pins)?;
        let shared = Shared::new(&self.pins)?;
        let mut workers = 0;
        for group in groups {
            let count = group.sockets.len().min(WORKERS_MAX as usize) as u32;
            workers = count;
            steer_group(&shared, group, choice, count)?;
        }
        if choice == Choice::Kernel || workers == 0 {
            return Ok(None);
        }
        let loads = Mapping::new(shared.pins, map::WORKER_LOADS, workers, Access::Write)?;
        Ok(Some(Arc::new(loads)))
    }
}

/// While it lives WORKER_LOADS is pinned, so that all loads of the program get
/// the same one: the loader takes maps by their pins only. Afterwards the
/// programs hold it, and nothing of it outlives them.
struct Shared<'a> {
    pins: &'a PinDirectory,
}

impl<'a> Shared<'a> {
    fn new(pins: &'a PinDirectory) -> Result<Self, KernelError> {
        // Left by a gate that was killed just here.
        if pins.has(map::WORKER_LOADS)? {
            pins.remove(map::WORKER_LOADS)?;
        }
        Ok(Self { pins })
    }
}

impl Drop for Shared<'_> {
    fn drop(&mut self) {
        // Not there if nothing was loaded.
        let _ = self.pins.remove(map::WORKER_LOADS);
    }
}

fn steer_group(
    shared: &Shared<'_>,
    group: &Group<'_>,
    choice: Choice,
    workers: u32,
) -> Result<(), KernelError> {
    let Some(first) = group.sockets.first() else {
        return Ok(());
    };
    let steering = Steering {
        listener: group.listener,
        workers,
        chooses: choice == Choice::LessLoaded,
        shares_loads: true,
    };
    let mut object = load(shared.pins, &steering)?;
    let steer: &mut SkReuseport = program(&mut object, STEER)?;
    steer
        .load()
        .and_then(|()| steer.attach(first))
        .map_err(|error| KernelError::program(STEER, &error))?;
    if steering.chooses {
        fill(&mut object, group)?;
    }
    Ok(())
}

/// Tells the program which socket is whose. After it is attached: a socket is in
/// one such map only, and the old program's goes with that program.
fn fill(object: &mut Ebpf, group: &Group<'_>) -> Result<(), KernelError> {
    let failed = |error: &MapError| KernelError::map(map::WORKER_SOCKETS, error);
    let map = object
        .map_mut(map::WORKER_SOCKETS)
        .ok_or_else(|| KernelError::Object(format!("it has no map {}", map::WORKER_SOCKETS)))?;
    let mut sockets = ReusePortSockArray::try_from(map).map_err(|error| failed(&error))?;
    let end = Instant::now() + PATIENCE;
    for (worker, socket) in (0..WORKERS_MAX).zip(&group.sockets) {
        loop {
            match sockets.set(worker, &socket.as_raw_fd(), 0) {
                Ok(()) => break,
                Err(error) if errno(&error) == Some(libc::EBUSY) && Instant::now() < end => {
                    thread::sleep(Duration::from_millis(2));
                }
                Err(error) if errno(&error) == Some(libc::EBUSY) => {
                    return Err(KernelError::io(
                        "choose between workers whose sockets another program still chooses from",
                        io::Error::from_raw_os_error(libc::EBUSY),
                    ));
                }
                Err(error) => return Err(failed(&error)),
            }
        }
    }
    Ok(())
}
