//! The kernel plane: loads gate's programs, attaches and pins them, proves
//! that they count, and opens the maps that they share with userspace.
//!
//! The only module that names aya. The programs and links outlive this process
//! by their pins, so enforcement goes on while gate is away and a new gate
//! finds true counts.

mod error;
mod host;
mod links;
mod log;
mod maps;
mod pins;
mod probe;
mod steer;
mod sys;

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use aya::programs::{CgroupSock, CgroupSockopt, ProgramFd, SockOps};
use aya::{Ebpf, EbpfLoader};
use gate_common::abi::{LISTENER_PROBE, map};

pub use self::error::KernelError;
pub use self::log::{KernelLog, forward_log};
pub use self::maps::{Mapping, Maps};
use self::pins::PinDirectory;
pub use self::pins::unpin;
use self::steer::SharedLoads;
pub use self::steer::{Choice, Group, WorkerLoads};
use self::sys::AttachType;
pub use self::sys::admit;

static OBJECT: &[u8] = aya::include_bytes_aligned!(env!("GATE_BPF_OBJECT"));

const SOCKOPS: &str = "gate_sockops";
const ADMIT: &str = "gate_admit";
const RELEASE: &str = "gate_release";
const STEER: &str = "gate_steer";
/// Global of the object: the listener that a load of [`STEER`] serves.
const STEER_LISTENER: &str = "STEER_LISTENER";
/// Global of the object: from how many workers a load of [`STEER`] chooses.
const STEER_WORKERS: &str = "STEER_WORKERS";

/// How the plane is started.
#[derive(Clone, Debug)]
pub struct PlaneOptions {
    /// Names the pins: `[a-z0-9_-]{1,32}`.
    pub instance: String,
    /// Where the programs are attached; `None`: the cgroup of this process.
    pub cgroup: Option<PathBuf>,
}

/// The running kernel plane. Dropping it leaves the pins, so the programs go
/// on; [`unpin`] ends them.
#[derive(Debug)]
pub struct Plane {
    maps: Arc<Maps>,
    pins: PinDirectory,
    log: Option<KernelLog>,
    loads: Mutex<Option<SharedLoads>>,
}

impl Plane {
    /// Loads and attaches the programs, or replaces those of an earlier gate,
    /// and proves with a probe connection that they count.
    ///
    /// # Errors
    /// Whatever stands in the way, with its cure. The pins of an earlier gate
    /// stay after a failure, new ones do not.
    pub fn start(options: &PlaneOptions) -> Result<Self, KernelError> {
        host::check_kernel()?;
        let cgroup = match &options.cgroup {
            Some(path) => path.clone(),
            None => host::own_cgroup()?,
        };
        host::check_cgroup(&cgroup)?;
        let pins = PinDirectory::new(&host::find_or_mount_bpffs()?, &options.instance)?;
        pins.create()?;
        let _lock = lock(&pins)?;
        let is_new = !pins.has(map::META)?;
        let plane = Self::start_locked(pins.clone(), &cgroup);
        if plane.is_err() && is_new {
            // Half an instance would make gatectl set limits that nobody
            // reads. The first error is the one to tell.
            let _ = pins.remove_all();
        }
        plane
    }

    fn start_locked(pins: PinDirectory, cgroup: &Path) -> Result<Self, KernelError> {
        pins.check_shapes()?;
        let mut object = load(&pins, &Steering::NONE)?;
        maps::name_instance(&pins)?;
        let maps = Arc::new(Maps::open_pins(&pins)?);
        attach(&mut object, &pins, cgroup)?;
        probe::run(&maps)?;
        Ok(Self {
            maps,
            pins,
            log: KernelLog::new(&mut object),
            loads: Mutex::default(),
        })
    }

    /// The shared maps.
    #[must_use]
    pub fn maps(&self) -> Arc<Maps> {
        Arc::clone(&self.maps)
    }

    /// Counts what a listening socket will accept as connections of
    /// `listener`, an index of LISTENER_STATE. Call it before `listen(2)`:
    /// connections established earlier are not counted.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn tag_listener(&self, socket: BorrowedFd<'_>, listener: u32) -> Result<(), KernelError> {
        self.maps.tag(socket, listener)
    }

    /// Proves anew that counting works.
    ///
    /// # Errors
    /// [`KernelError::Probe`] says what was not counted.
    pub fn probe(&self) -> Result<(), KernelError> {
        let _lock = lock(&self.pins)?;
        probe::run(&self.maps)
    }

    /// The programs' log, once; hand it to [`forward_log`].
    pub fn take_logger(&mut self) -> Option<KernelLog> {
        self.log.take()
    }
}

/// One process at a time makes, attaches or probes an instance. The directory
/// below, [`Maps::directory`], has a lock of its own, held for much shorter.
fn lock(pins: &PinDirectory) -> Result<File, KernelError> {
    let doing = || format!("lock {}", pins.instance().display());
    let directory = File::open(pins.instance()).map_err(|error| KernelError::io(doing(), error))?;
    sys::lock(directory.as_fd()).map_err(|error| KernelError::io(doing(), error))?;
    Ok(directory)
}

/// What one load of [`STEER`] is for.
struct Steering {
    /// Index of LISTENER_STATE.
    listener: u32,
    /// Workers that listen there.
    workers: u32,
    /// Whether the program chooses between them.
    chooses: bool,
    /// Whether WORKER_LOADS is the pinned one.
    shares_loads: bool,
}

impl Steering {
    /// Of a load whose [`STEER`] is not attached.
    const NONE: Self = Self {
        listener: LISTENER_PROBE,
        workers: 0,
        chooses: false,
        shares_loads: false,
    };
}

/// Makes the maps, or takes the pinned ones.
fn load(pins: &PinDirectory, steering: &Steering) -> Result<Ebpf, KernelError> {
    let mut loader = EbpfLoader::new();
    for name in map::PINNED {
        loader.map_pin_path(name, pins.join(name));
    }
    if steering.shares_loads {
        loader.map_pin_path(map::WORKER_LOADS, pins.join(map::WORKER_LOADS));
    }
    for name in [map::WORKER_LOADS, map::WORKER_SOCKETS] {
        loader.map_max_entries(name, steering.workers.max(1));
    }
    let chosen_from = if steering.chooses {
        steering.workers
    } else {
        0
    };
    loader
        .override_global(STEER_LISTENER, &steering.listener, true)
        .override_global(STEER_WORKERS, &chosen_from, true)
        .load(OBJECT)
        .map_err(|error| KernelError::object(&error))
}

fn attach(object: &mut Ebpf, pins: &PinDirectory, cgroup: &Path) -> Result<(), KernelError> {
    let sockops: &mut SockOps = program(object, SOCKOPS)?;
    sockops
        .load()
        .map_err(|error| KernelError::program(SOCKOPS, &error))?;
    let sockops = fd(SOCKOPS, sockops.fd())?;
    let admit: &mut CgroupSockopt = program(object, ADMIT)?;
    admit
        .load()
        .map_err(|error| KernelError::program(ADMIT, &error))?;
    let admit = fd(ADMIT, admit.fd())?;
    let release: &mut CgroupSock = program(object, RELEASE)?;
    release
        .load()
        .map_err(|error| KernelError::program(RELEASE, &error))?;
    let release = fd(RELEASE, release.fd())?;
    // Who gives back comes before who takes: nothing is ever taken that
    // nobody will give back.
    links::attach(
        pins,
        (RELEASE, release.as_fd()),
        AttachType::SockRelease,
        cgroup,
    )?;
    links::attach(pins, (ADMIT, admit.as_fd()), AttachType::SetSockOpt, cgroup)?;
    links::attach(
        pins,
        (SOCKOPS, sockops.as_fd()),
        AttachType::SockOps,
        cgroup,
    )
}

fn program<'a, T>(object: &'a mut Ebpf, name: &'static str) -> Result<&'a mut T, KernelError>
where
    &'a mut T: TryFrom<&'a mut aya::programs::Program, Error = aya::programs::ProgramError>,
{
    object
        .program_mut(name)
        .ok_or_else(|| KernelError::Object(format!("it has no program {name}")))?
        .try_into()
        .map_err(|error| KernelError::program(name, &error))
}

fn fd(
    name: &'static str,
    fd: Result<&ProgramFd, aya::programs::ProgramError>,
) -> Result<ProgramFd, KernelError> {
    fd.map_err(|error| KernelError::program(name, &error))?
        .try_clone()
        .map_err(|error| KernelError::io(format!("keep program {name}"), error))
}
