//! An instance's maps, as both gate and gatectl use them.

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::slice;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};

use aya::maps::{Array, HashMap, Map, MapData, MapError, PerCpuArray, SkStorage};
use gate_common::abi::{
    AdmitRequest, LISTENERS_MAX, ListenerState, ListenerTag, MAGIC, Meta, NameKey, SCHEMA,
    SLOTS_MAX, SlotRef, SocketRecord, map,
};
use gate_common::errno::AdmitErrno;
use gate_common::limit::LimitWords;

use super::error::KernelError;
use super::host;
use super::pins::PinDirectory;
use super::sys;

const BPF_ANY: u64 = 0;
const BPF_NOEXIST: u64 = 1;

/// The maps of one instance.
///
/// Userspace writes `limits` and `listener_limits`, names, and of `slots` only
/// by claim and recycle; everything else belongs to the kernel.
pub struct Maps {
    /// By slot index: sessions that hold it, and its generation.
    pub slots: Mapping<AtomicU64>,
    /// By slot index: its limit.
    pub limits: Mapping<LimitWords<AtomicU64>>,
    /// By listener: its own ceiling.
    pub listener_limits: Mapping<LimitWords<AtomicU64>>,
    /// By listener: the kernel's counts. Mapped read-only: a store faults.
    pub listeners: Mapping<ListenerState<AtomicU64>>,
    pins: PinDirectory,
    meta: Meta,
    cells: PerCpuArray<MapData, u64>,
    records: SkStorage<MapData, SocketRecord<u64>>,
    /// Looked up and walked without a lock: a walk over all names must not
    /// keep a worker from one.
    names: HashMap<MapData, NameKey, SlotRef>,
    /// The same map: aya wants it exclusively to change it.
    names_changed: Mutex<HashMap<MapData, NameKey, SlotRef>>,
    tags: Mutex<SkStorage<MapData, ListenerTag>>,
}

impl Maps {
    /// Opens the maps of a running or past instance.
    ///
    /// # Errors
    /// [`KernelError::NoInstance`] if there are no pins;
    /// [`KernelError::Shape`] if another version made them.
    pub fn open(instance: &str) -> Result<Self, KernelError> {
        let none = || KernelError::NoInstance {
            instance: instance.to_owned(),
        };
        let bpffs = host::find_bpffs()?.ok_or_else(none)?;
        let pins = PinDirectory::new(&bpffs, instance)?;
        if !pins.has(map::META)? {
            return Err(none());
        }
        pins.check_shapes()?;
        let maps = Self::open_pins(&pins)?;
        // Made, but its maker has not got as far as to name it.
        if maps.meta.magic == 0 {
            return Err(none());
        }
        Ok(maps)
    }

    /// Opens pinned maps whose shapes were checked.
    pub(super) fn open_pins(pins: &PinDirectory) -> Result<Self, KernelError> {
        let meta = Array::try_from(Map::Array(open(pins, map::META)?))
            .and_then(|array: Array<MapData, Meta>| array.get(&0, BPF_ANY))
            .map_err(failed(map::META))?;
        if meta.magic != 0 && (meta.magic != MAGIC || meta.schema != SCHEMA) {
            return Err(KernelError::Shape {
                map: map::META,
                expected: format!("magic {MAGIC:#x} and schema {SCHEMA}"),
                found: format!("magic {:#x} and schema {}", meta.magic, meta.schema),
                pins: pins.path().to_owned(),
            });
        }
        Ok(Self {
            slots: Mapping::new(pins, map::SLOTS, SLOTS_MAX, Access::Write)?,
            limits: Mapping::new(pins, map::LIMITS, SLOTS_MAX, Access::Write)?,
            listener_limits: Mapping::new(
                pins,
                map::LISTENER_LIMITS,
                LISTENERS_MAX,
                Access::Write,
            )?,
            listeners: Mapping::new(pins, map::LISTENER_STATE, LISTENERS_MAX, Access::Read)?,
            pins: pins.clone(),
            meta,
            cells: PerCpuArray::try_from(Map::PerCpuArray(open(pins, map::CELLS)?))
                .map_err(failed(map::CELLS))?,
            records: SkStorage::try_from(Map::SkStorage(open(pins, map::RECORDS)?))
                .map_err(failed(map::RECORDS))?,
            names: HashMap::try_from(Map::HashMap(open(pins, map::NAMES)?))
                .map_err(failed(map::NAMES))?,
            names_changed: HashMap::try_from(Map::HashMap(open(pins, map::NAMES)?))
                .map(Mutex::new)
                .map_err(failed(map::NAMES))?,
            tags: SkStorage::try_from(Map::SkStorage(open(pins, map::LISTENER_TAGS)?))
                .map(Mutex::new)
                .map_err(failed(map::LISTENER_TAGS))?,
        })
    }

    /// The directory of the pins; whoever changes names holds its `flock`.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.pins.path()
    }

    /// Who made the maps; names this instance in an [`AdmitRequest`].
    #[must_use]
    pub const fn meta(&self) -> Meta {
        self.meta
    }

    /// Wrapping sum of a listener's cells over all possible CPUs, as
    /// [`ListenerState::in_use`] takes it.
    ///
    /// # Errors
    /// No such listener, or the kernel's refusal.
    pub fn cells_sum(&self, listener: u32) -> Result<u64, KernelError> {
        let cells = self
            .cells
            .get(&listener, BPF_ANY)
            .map_err(failed(map::CELLS))?;
        Ok(cells.iter().fold(0, |sum, cell| cell.wrapping_add(sum)))
    }

    /// The record of an accepted socket, as it is now.
    #[must_use]
    pub fn record(&self, socket: BorrowedFd<'_>) -> Option<SocketRecord<u64>> {
        self.records.get(&socket.as_raw_fd(), BPF_ANY).ok()
    }

    /// Takes the slots of a request on an accepted socket: all, or none.
    ///
    /// # Errors
    /// The first denial; [`AdmitErrno::NotOurs`] if no program of this
    /// instance owns the socket.
    pub fn admit(&self, socket: BorrowedFd<'_>, request: &AdmitRequest) -> Result<(), AdmitErrno> {
        sys::admit(socket, request)
    }

    /// The slot of a name.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn name_get(&self, key: &NameKey) -> Result<Option<SlotRef>, KernelError> {
        match self.names.get(key, BPF_ANY) {
            Ok(slot) => Ok(Some(slot)),
            Err(MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(KernelError::map(map::NAMES, &error)),
        }
    }

    /// Gives a name its slot, unless it has one. Returns whether it did.
    ///
    /// # Errors
    /// The kernel's refusal; the map cannot be full before the slots are.
    pub fn name_insert(&self, key: &NameKey, value: SlotRef) -> Result<bool, KernelError> {
        match self.lock_names().insert(key, value, BPF_NOEXIST) {
            Ok(()) => Ok(true),
            Err(error) if errno(&error) == Some(libc::EEXIST) => Ok(false),
            Err(error) => Err(KernelError::map(map::NAMES, &error)),
        }
    }

    /// Takes a name's slot from it. No fault if it has none.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn name_remove(&self, key: &NameKey) -> Result<(), KernelError> {
        match self.lock_names().remove(key) {
            Err(error) if errno(&error) != Some(libc::ENOENT) => {
                Err(KernelError::map(map::NAMES, &error))
            }
            _ => Ok(()),
        }
    }

    /// All names. One that comes or goes meanwhile may be missed, and others
    /// may occur twice then.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn names(&self) -> Result<Vec<(NameKey, SlotRef)>, KernelError> {
        self.names
            .iter()
            .collect::<Result<_, _>>()
            .map_err(failed(map::NAMES))
    }

    /// Makes every connection that `socket` will accept one of `listener`.
    pub(super) fn tag(&self, socket: BorrowedFd<'_>, listener: u32) -> Result<(), KernelError> {
        let tag = ListenerTag {
            listener,
            reserved: 0,
        };
        self.tags
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(&socket.as_raw_fd(), tag, BPF_ANY)
            .map_err(failed(map::LISTENER_TAGS))
    }

    fn lock_names(&self) -> MutexGuard<'_, HashMap<MapData, NameKey, SlotRef>> {
        // A panic elsewhere cannot have left a descriptor half-changed.
        self.names_changed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Maps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Maps")
            .field("directory", &self.directory())
            .field("meta", &self.meta)
            .finish_non_exhaustive()
    }
}

/// Writes META if nobody has. The caller holds the instance's lock.
pub(super) fn name_instance(pins: &PinDirectory) -> Result<(), KernelError> {
    let mut array: Array<MapData, Meta> =
        Array::try_from(Map::Array(open(pins, map::META)?)).map_err(failed(map::META))?;
    let found = array.get(&0, BPF_ANY).map_err(failed(map::META))?;
    if found.magic != 0 {
        return Ok(());
    }
    let instance =
        sys::random_u64().map_err(|error| KernelError::io("draw a random number", error))?;
    let meta = Meta {
        magic: MAGIC,
        schema: SCHEMA,
        // 0 is what an unnamed map reads as: the programs answer nobody then.
        instance: instance.max(1),
        boot_id: host::boot_id()?,
    };
    array.set(0, meta, BPF_ANY).map_err(failed(map::META))
}

/// The values of a pinned mappable array, shared with the kernel.
#[derive(Debug)]
pub struct Mapping<T> {
    start: NonNull<T>,
    entries: usize,
    bytes: usize,
    owned: PhantomData<T>,
}

// SAFETY: the mapping belongs to no thread, and it is reached through shared
// references to T only.
unsafe impl<T: Sync> Send for Mapping<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Mapping<T> {}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
}

impl<T> Mapping<T> {
    /// `T` is made of atomic words alone and is as large as the map's values,
    /// which `check_shapes` has compared.
    pub(super) fn new(
        pins: &PinDirectory,
        name: &'static str,
        entries: u32,
        access: Access,
    ) -> Result<Self, KernelError> {
        // Array elements lie 8 bytes aligned, one after the other
        // (kernel/bpf/arraymap.c, elem_size), from the start of a page on.
        const { assert!(size_of::<T>().is_multiple_of(8) && align_of::<T>() >= 8) };
        const { assert!(align_of::<T>() <= 4096) };
        let array = open(pins, name)?;
        let entries = entries as usize;
        let bytes = entries * size_of::<T>();
        let fd = array.fd().as_fd().as_raw_fd();
        let start = sys::map_shared(fd, bytes, access == Access::Write)
            .map_err(|error| KernelError::io(format!("map {name} into memory"), error))?;
        Ok(Self {
            start: start.cast(),
            entries,
            bytes,
            owned: PhantomData,
        })
    }
}

impl<T> Deref for Mapping<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the mapping holds that many values of T until it is dropped,
        // page-aligned; they are atomic words, for which every bit pattern is
        // a value and which the kernel may change at any time.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.entries) }
    }
}

impl<T> Drop for Mapping<T> {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and no reference outlives `self`.
        unsafe { sys::unmap(self.start.cast(), self.bytes) };
    }
}

fn open(pins: &PinDirectory, name: &'static str) -> Result<MapData, KernelError> {
    MapData::from_pin(pins.join(name)).map_err(|error| match errno(&error) {
        Some(cause) => KernelError::io(
            format!("open {}", pins.join(name).display()),
            io::Error::from_raw_os_error(cause),
        ),
        None => KernelError::map(name, &error),
    })
}

fn failed(name: &'static str) -> impl FnOnce(MapError) -> KernelError {
    move |error| KernelError::map(name, &error)
}

pub(super) fn errno(error: &MapError) -> Option<i32> {
    match error {
        MapError::SyscallError(call) => call.io_error.raw_os_error(),
        MapError::IoError(io) => io.raw_os_error(),
        _ => None,
    }
}
