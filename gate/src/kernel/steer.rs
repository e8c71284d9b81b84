//! Who chooses the worker of a new connection.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use aya::Ebpf;
use aya::maps::{MapError, ReusePortSockArray};
use aya::programs::SkReuseport;
use gate_common::abi::map;
use gate_common::steer::{WORKERS_MAX, WorkerLoad};

use super::error::KernelError;
use super::maps::{Access, Mapping, errno};
use super::{Plane, STEER, Steering, load, lock, pins::PinDirectory, program, sys};

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
    /// is to. The program of another gate on the same sockets is replaced; it
    /// lives as long as the group. The loads, if the program chooses, are for the
    /// workers to write; they are the same ones at each call for as many workers.
    ///
    /// # Errors
    /// The program is refused, a socket does not listen or is in no such group.
    pub fn steer(
        &self,
        groups: &[Group<'_>],
        choice: Choice,
    ) -> Result<Option<Arc<WorkerLoads>>, KernelError> {
        let _lock = lock(&self.pins)?;
        let count = |group: &Group<'_>| group.sockets.len().min(WORKERS_MAX as usize) as u32;
        let workers = groups.last().map_or(0, count);
        let mut kept = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
        kept.take_if(|loads| loads.workers != workers);
        let shared = Shared::new(&self.pins, kept.as_ref())?;
        for group in groups {
            steer_group(&shared, group, choice, count(group))?;
        }
        if choice == Choice::Kernel || workers == 0 {
            return Ok(None);
        }
        let loads = match kept.take() {
            Some(loads) => loads,
            None => SharedLoads::open(&self.pins, workers)?,
        };
        Ok(Some(Arc::clone(&kept.insert(loads).loads)))
    }
}

/// The loads of this gate's workers. Should another gate steer its sockets for a
/// while, this one steers them by these again: the workers never stopped
/// writing them.
#[derive(Debug)]
pub(super) struct SharedLoads {
    map: OwnedFd,
    workers: u32,
    loads: Arc<WorkerLoads>,
}

impl SharedLoads {
    /// Those that are pinned.
    fn open(pins: &PinDirectory, workers: u32) -> Result<Self, KernelError> {
        let map = sys::object_get(&pins.join(map::WORKER_LOADS));
        Ok(Self {
            map: map
                .map_err(|error| KernelError::io(format!("open {}", map::WORKER_LOADS), error))?,
            workers,
            loads: Arc::new(Mapping::new(
                pins,
                map::WORKER_LOADS,
                workers,
                Access::Write,
            )?),
        })
    }
}

/// While it lives WORKER_LOADS is pinned, so that all loads of the program get
/// the same one: the loader takes maps by their pins only. Afterwards the
/// programs hold it, and nothing of it outlives them.
struct Shared<'a> {
    pins: &'a PinDirectory,
}

impl<'a> Shared<'a> {
    /// With the loads that there are already, if there are.
    fn new(pins: &'a PinDirectory, loads: Option<&SharedLoads>) -> Result<Self, KernelError> {
        // Left by a gate that was killed just here.
        if pins.has(map::WORKER_LOADS)? {
            pins.remove(map::WORKER_LOADS)?;
        }
        if let Some(loads) = loads {
            sys::object_pin(loads.map.as_fd(), &pins.join(map::WORKER_LOADS))
                .map_err(|error| KernelError::io(format!("pin {}", map::WORKER_LOADS), error))?;
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
