//! The maps, as `gate_common::abi` lays them out, and the two views of them
//! that the rules are written against.

use core::ptr;

use aya_ebpf::bindings::{
    BPF_F_CLONE, BPF_F_MMAPABLE, BPF_F_NO_PREALLOC, BPF_SK_STORAGE_GET_F_CREATE, bpf_map_type,
};
use aya_ebpf::btf_maps::{Array, HashMap, PerCpuArray, ReusePortSockArray};
use aya_ebpf::cty::c_void;
use aya_ebpf::helpers::generated::{
    bpf_get_smp_processor_id, bpf_map_lookup_percpu_elem, bpf_sk_storage_get,
};
use aya_ebpf::macros::btf_map;
use gate_common::abi::{
    LISTENERS_MAX, ListenerState, ListenerTag, Meta, NameKey, SLOTS_MAX, SlotRef, slot,
};
use gate_common::cells::{self, Cells, Sweep};
use gate_common::limit::{
    Limit, LimitWords, Setting, resolve, resolve_ceiling, resolve_over_headroom,
};
use gate_common::record::SocketRecord;
use gate_common::slots::Book;
use gate_common::steer::{WORKERS_MAX, WorkerLoad};
use gate_common::word::Word;

use crate::word::MapWord;

const MAPPED: usize = BPF_F_MMAPABLE as usize;
const SLOTS_LEN: usize = SLOTS_MAX as usize;
const LISTENERS_LEN: usize = LISTENERS_MAX as usize;
const WORKERS_LEN: usize = WORKERS_MAX as usize;
const NAMES_LEN: usize = SLOTS_LEN + LISTENERS_LEN;
const STORAGE: usize = BPF_F_NO_PREALLOC as usize;
const STORAGE_CLONED: usize = (BPF_F_NO_PREALLOC | BPF_F_CLONE) as usize;

#[btf_map]
pub static META: Array<Meta, 1> = Array::new();
/// No program reads it: the object declares it so that every pinned map is
/// made in one place.
#[btf_map]
pub static NAMES: HashMap<NameKey, SlotRef, NAMES_LEN> = HashMap::new();
#[btf_map]
pub static LIMITS: Array<LimitWords<MapWord>, SLOTS_LEN, MAPPED> = Array::new();
#[btf_map]
pub static SLOTS: Array<MapWord, SLOTS_LEN, MAPPED> = Array::new();
#[btf_map]
pub static LISTENER_LIMITS: Array<LimitWords<MapWord>, LISTENERS_LEN, MAPPED> = Array::new();
#[btf_map]
pub static LISTENER_STATE: Array<ListenerState<MapWord>, LISTENERS_LEN, MAPPED> = Array::new();
#[btf_map]
pub static CELLS: PerCpuArray<MapWord, LISTENERS_LEN> = PerCpuArray::new();
#[btf_map]
pub static RECORDS: SocketStorage<SocketRecord<MapWord>, STORAGE> = SocketStorage::new();
#[btf_map]
pub static LISTENER_TAGS: SocketStorage<ListenerTag, STORAGE_CLONED> = SocketStorage::new();
/// One for all loads of `gate_steer` of a process; the loader cuts it to the
/// number of workers.
#[btf_map]
pub static WORKER_LOADS: Array<WorkerLoad<MapWord>, WORKERS_LEN, MAPPED> = Array::new();
/// One for each load of `gate_steer`.
#[btf_map]
pub static WORKER_SOCKETS: ReusePortSockArray<WORKERS_LEN> = ReusePortSockArray::new();

/// Socket storage with flags: aya's own type cannot declare BPF_F_CLONE, and
/// its safe getter takes one kind of context only. The fields are read by the
/// loader from the type information, never at run time.
#[repr(C)]
pub struct SocketStorage<T, const FLAGS: usize> {
    r#type: *const [i32; bpf_map_type::BPF_MAP_TYPE_SK_STORAGE as usize],
    key: *const i32,
    value: *const T,
    max_entries: *const [i32; 0],
    map_flags: *const [i32; FLAGS],
}

// SAFETY: nothing dereferences the fields.
unsafe impl<T, const FLAGS: usize> Sync for SocketStorage<T, FLAGS> {}

impl<T, const FLAGS: usize> SocketStorage<T, FLAGS> {
    const fn new() -> Self {
        Self {
            r#type: ptr::null(),
            key: ptr::null(),
            value: ptr::null(),
            max_entries: ptr::null(),
            map_flags: ptr::null(),
        }
    }

    /// The value of a socket.
    ///
    /// # Safety
    /// `socket` is what this program type passes to `bpf_sk_storage_get`.
    #[inline(always)]
    pub unsafe fn get(&'static self, socket: *mut c_void) -> Option<&'static T> {
        // SAFETY: the caller's promise. The kernel keeps the value while the
        // program runs.
        unsafe {
            bpf_sk_storage_get(self.as_ptr(), socket, ptr::null_mut(), 0)
                .cast::<T>()
                .as_ref()
        }
    }

    /// The value of a socket, made from `first` if there is none. `None` if
    /// there is no memory for it.
    ///
    /// # Safety
    /// As for [`Self::get`].
    #[inline(always)]
    pub unsafe fn get_or_create(
        &'static self,
        socket: *mut c_void,
        first: &mut T,
    ) -> Option<&'static T> {
        let flags = u64::from(BPF_SK_STORAGE_GET_F_CREATE);
        // SAFETY: as above; the kernel copies `first`.
        unsafe {
            bpf_sk_storage_get(self.as_ptr(), socket, ptr::from_mut(first).cast(), flags)
                .cast::<T>()
                .as_ref()
        }
    }

    #[inline(always)]
    fn as_ptr(&'static self) -> *mut c_void {
        ptr::from_ref(self).cast_mut().cast()
    }
}

/// The limits and slots of this instance.
pub struct Maps;

// A missing value is handed on as `None`, never turned into a setting: of an
// enum made in two places LLVM copies the payload that one of them does not
// have, and the verifier refuses to read it ("!read_ok").
impl Maps {
    /// The ceiling in force for a listener.
    #[inline(always)]
    pub fn ceiling(&self, listener: u32) -> Option<Limit> {
        Some(resolve_ceiling(
            LISTENER_LIMITS.get(listener)?.setting(),
            self.setting(slot::CEILING)?,
            self.limit_of(slot::TOTAL)?,
            self.limit_of(slot::MAX_PENDING)?,
            self.limit_of(slot::FD_CAP)?,
        ))
    }

    /// How many sockets may be over a listener's ceiling.
    #[inline(always)]
    pub fn over_headroom(&self, listener: u32) -> Option<u64> {
        let ceiling = self.ceiling(listener)?;
        Some(resolve_over_headroom(
            self.setting(slot::OVER_HEADROOM)?,
            ceiling,
        ))
    }

    #[inline(always)]
    fn setting(&self, index: u32) -> Option<Setting> {
        Some(LIMITS.get(index)?.setting())
    }

    #[inline(always)]
    fn limit_of(&self, index: u32) -> Option<Limit> {
        Some(resolve(self.setting(index)?, Setting::Inherit))
    }
}

impl Book for Maps {
    type Word = MapWord;

    #[inline(always)]
    fn slot(&self, index: u32) -> Option<&MapWord> {
        SLOTS.get(index)
    }

    #[inline(always)]
    fn limit(&self, index: u32) -> Option<&LimitWords<MapWord>> {
        LIMITS.get(index)
    }
}

/// One listener's token cells.
pub struct ListenerCells(pub u32);

// The two functions below are global: the verifier follows each once, for any
// argument, instead of once for every path of every caller. Inlined, the loops
// over all CPUs times the ways to resolve a limit are more than it accepts.

/// [`Sweep::encode`] of one look into all cells of a listener.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn gate_sweep(listener: u32) -> u64 {
    let Some(state) = LISTENER_STATE.get(listener) else {
        return Sweep::Disturbed.encode();
    };
    cells::sweep(state, &ListenerCells(listener)).encode()
}

/// The ceiling of a listener in tokens. None to be read, which cannot be, lets
/// nobody in.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn gate_ceiling(listener: u32) -> u64 {
    Maps.ceiling(listener).map_or(0, Limit::tokens)
}

impl Cells for ListenerCells {
    type Word = MapWord;

    #[inline(always)]
    fn sweep<W: Word>(&self, _state: &ListenerState<W>) -> Sweep {
        Sweep::decode(gate_sweep(self.0))
    }

    #[inline(always)]
    fn this_cpu(&self) -> u32 {
        // SAFETY: a helper without arguments.
        unsafe { bpf_get_smp_processor_id() }
    }

    #[inline(always)]
    fn cell(&self, cpu: u32) -> Option<&MapWord> {
        let map = ptr::from_ref(&CELLS).cast_mut().cast();
        let key = ptr::from_ref(&self.0).cast();
        // SAFETY: a map of this object and a key of its size; the value is one
        // word that lives as long as the map.
        unsafe {
            bpf_map_lookup_percpu_elem(map, key, cpu)
                .cast::<MapWord>()
                .as_ref()
        }
    }
}
