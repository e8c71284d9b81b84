//! The layout of the pinned maps: names, indices, sizes.
//!
//! Any change of a layout here raises [`SCHEMA`], which is part of the pin
//! path, so that two versions of gate never read each other's words. Words
//! are native-endian 64-bit: a pinned map never leaves the machine.

use core::mem::{align_of, offset_of, size_of};

use crate::cells::tokens;
pub use crate::limit::LimitWords;
pub use crate::record::SocketRecord;
use crate::word::Word;

/// Version of everything in this file. Part of the pin path.
pub const SCHEMA: u32 = 1;
/// First word of [`Meta`]: "gate" in ASCII.
pub const MAGIC: u32 = u32::from_be_bytes(*b"gate");

/// Slots in all, the reserved ones included: at most so many names at once.
pub const SLOTS_MAX: u32 = 16_384;
/// Listeners in all; the last one belongs to the start-up probe.
pub const LISTENERS_MAX: u32 = 64;
/// The listener that the start-up probe uses.
pub const LISTENER_PROBE: u32 = LISTENERS_MAX - 1;
/// CPUs whose token cells are swept before a refusal.
pub const CPUS_MAX: u32 = 256;
/// Bytes of a name: PostgreSQL cuts user and database to NAMEDATALEN - 1
/// (`src/include/pg_config_manual.h`).
pub const NAME_BYTES_MAX: usize = 63;

/// `setsockopt` level of the admission request. No kernel protocol uses it:
/// without gate's program on the socket the answer is ENOPROTOOPT.
pub const SOL_GATE: i32 = 0x6761_7465;
/// `setsockopt` option at [`SOL_GATE`]: take the slots of an [`AdmitRequest`].
pub const SO_GATE_ADMIT: i32 = 1;

/// Names of the maps in the object and of their pins.
pub mod map {
    /// Array of one [`super::Meta`].
    pub const META: &str = "META";
    /// Hash of [`super::NameKey`] to [`super::SlotRef`]; userspace only.
    pub const NAMES: &str = "NAMES";
    /// Array of [`super::SLOTS_MAX`] [`super::LimitWords`]; written by userspace only, mappable.
    pub const LIMITS: &str = "LIMITS";
    /// Array of [`super::SLOTS_MAX`] slot words ([`crate::slots`]), mappable.
    pub const SLOTS: &str = "SLOTS";
    /// Array of [`super::LISTENERS_MAX`] [`super::LimitWords`]; written by userspace only, mappable.
    pub const LISTENER_LIMITS: &str = "LISTENER_LIMITS";
    /// Array of [`super::LISTENERS_MAX`] [`super::ListenerState`]; written by the kernel only, mappable.
    pub const LISTENER_STATE: &str = "LISTENER_STATE";
    /// Per-CPU array of [`super::LISTENERS_MAX`] token cells ([`crate::cells`]), one word each.
    pub const CELLS: &str = "CELLS";
    /// Socket storage: the one [`super::SocketRecord`] of each accepted socket.
    pub const RECORDS: &str = "RECORDS";
    /// Socket storage with BPF_F_CLONE: a [`super::ListenerTag`] that userspace
    /// sets on the listening socket and the kernel copies to each child.
    pub const LISTENER_TAGS: &str = "LISTENER_TAGS";

    /// Array of one [`crate::steer::WorkerLoad`] for each worker of a process, mappable. Not
    /// pinned: it ends with the listeners.
    pub const WORKER_LOADS: &str = "WORKER_LOADS";
    /// The sockets of one listener's SO_REUSEPORT group, by worker. Not pinned.
    pub const WORKER_SOCKETS: &str = "WORKER_SOCKETS";

    /// All pinned maps.
    pub const PINNED: [&str; 9] = [
        META,
        NAMES,
        LIMITS,
        SLOTS,
        LISTENER_LIMITS,
        LISTENER_STATE,
        CELLS,
        RECORDS,
        LISTENER_TAGS,
    ];
}

/// Indices with a meaning of their own in the LIMITS and SLOTS arrays.
pub mod slot {
    /// All admitted sessions; its limit is `max_connections`.
    pub const TOTAL: u32 = 0;
    /// Limit of users without one of their own.
    pub const DEFAULT_USER: u32 = 1;
    /// Limit of databases without one of their own.
    pub const DEFAULT_DATABASE: u32 = 2;
    /// Limit of backends without one of their own: never set, unlimited.
    pub const DEFAULT_BACKEND: u32 = 3;
    /// Limit of pending connections.
    pub const MAX_PENDING: u32 = 4;
    /// Ceiling of listeners without one of their own.
    pub const CEILING: u32 = 5;
    /// Sockets over a ceiling before new SYNs are reset.
    pub const OVER_HEADROOM: u32 = 6;
    /// Sockets per source address.
    pub const PER_SOURCE: u32 = 7;
    /// What the file descriptors allow: caps an automatic ceiling.
    pub const FD_CAP: u32 = 8;
    /// The start-up probe's own slot.
    pub const PROBE: u32 = 9;
    /// Clients that the configuration lets wait for a slot: what the descriptors
    /// allow is for them too. For userspace alone.
    pub const WAITING: u32 = 10;
    /// The first index that a name can get.
    pub const FIRST_NAMED: u32 = 16;
}

/// What a name in [`map::NAMES`] names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum NameKind {
    /// A user: an index of SLOTS.
    User = 1,
    /// A database: an index of SLOTS.
    Database = 2,
    /// A backend of the configuration: an index of SLOTS.
    Backend = 3,
    /// A listener's address: an index of LISTENER_STATE.
    Listener = 4,
}

/// Key of [`map::NAMES`]: bytes after `length` are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(C)]
pub struct NameKey {
    /// A [`NameKind`].
    pub kind: u8,
    /// How many of `bytes` count.
    pub length: u8,
    /// The name as PostgreSQL would use it.
    pub bytes: [u8; NAME_BYTES_MAX],
}

impl NameKey {
    /// The key of a name, cut to [`NAME_BYTES_MAX`] bytes as PostgreSQL does.
    #[must_use]
    pub fn new(kind: NameKind, name: &[u8]) -> Self {
        let cut = &name[..name.len().min(NAME_BYTES_MAX)];
        let mut bytes = [0; NAME_BYTES_MAX];
        bytes[..cut.len()].copy_from_slice(cut);
        Self {
            kind: kind as u8,
            length: cut.len() as u8,
            bytes,
        }
    }

    /// The name's bytes.
    #[must_use]
    pub fn name(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length).min(NAME_BYTES_MAX)]
    }
}

/// A slot and the generation it was seen in. A slot whose name was recycled
/// has another generation, so a late user is told (ESTALE), not miscounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[repr(C)]
pub struct SlotRef {
    /// Index in SLOTS and LIMITS, or [`SlotRef::ABSENT`]'s.
    pub index: u32,
    /// Generation of the slot word.
    pub generation: u32,
}

impl SlotRef {
    /// Nothing asked.
    pub const ABSENT: Self = Self {
        index: u32::MAX,
        generation: 0,
    };
}

/// The slots of one admission, in the order in which a denial is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum SlotKind {
    /// `max_connections`.
    Total = 0,
    /// The user's.
    User = 1,
    /// The database's.
    Database = 2,
    /// The backend's.
    Backend = 3,
}

impl SlotKind {
    /// All kinds, in the order in which a denial is told.
    pub const ALL: [Self; 4] = [Self::Total, Self::User, Self::Database, Self::Backend];

    /// Index of the limit that a slot of this kind inherits.
    #[inline(always)]
    #[must_use]
    pub const fn default_limit(self) -> u32 {
        match self {
            Self::Total => slot::TOTAL,
            Self::User => slot::DEFAULT_USER,
            Self::Database => slot::DEFAULT_DATABASE,
            Self::Backend => slot::DEFAULT_BACKEND,
        }
    }
}

/// The optval of [`SO_GATE_ADMIT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct AdmitRequest {
    /// [`Meta::instance`]: two instances in one cgroup both see the call.
    pub instance: u64,
    /// By [`SlotKind`].
    pub slots: [SlotRef; 4],
}

impl AdmitRequest {
    /// The bytes as they cross into the kernel.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; size_of::<Self>()] {
        let mut bytes = [0; size_of::<Self>()];
        bytes[..8].copy_from_slice(&self.instance.to_ne_bytes());
        for (slot, out) in self.slots.iter().zip(bytes[8..].chunks_exact_mut(8)) {
            out[..4].copy_from_slice(&slot.index.to_ne_bytes());
            out[4..].copy_from_slice(&slot.generation.to_ne_bytes());
        }
        bytes
    }
}

/// What userspace sets on a listening socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct ListenerTag {
    /// Index in LISTENER_STATE.
    pub listener: u32,
    /// Zero.
    pub reserved: u32,
}

/// The one value of [`map::META`]; written once, by whoever made the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Meta {
    /// [`MAGIC`].
    pub magic: u32,
    /// [`SCHEMA`].
    pub schema: u32,
    /// Drawn at random when the map is made; names this instance in an
    /// [`AdmitRequest`].
    pub instance: u64,
    /// `/proc/sys/kernel/random/boot_id`, as 16 bytes.
    pub boot_id: [u8; 16],
}

/// The kernel's words of one listener. Signed values are stored wrapping.
#[derive(Debug, Default)]
#[repr(C)]
pub struct ListenerState<W> {
    /// The ceiling that the pool and cells were last brought to.
    pub applied: W,
    /// Free tokens that lie in no cell; negative after a lowering below use.
    pub pool: W,
    /// 1 while one CPU applies a new ceiling.
    pub resizing: W,
    /// Sockets alive that found no token.
    pub over: W,
    /// Counted sockets with no admission asked yet.
    pub pending: W,
    /// Sessions that hold slots.
    pub admitted: W,
    /// Sockets ever marked over.
    pub over_total: W,
    /// SYNs ever reset.
    pub reset_total: W,
    /// Sockets without a record, for want of memory: treated as over.
    pub unrecorded_total: W,
    /// Impossible counts seen; must stay 0.
    pub errors: W,
    /// CPUs that move tokens from a cell to a negative pool just now.
    pub moving: W,
    /// Zero: keeps two listeners off one cache line.
    pub reserved: [u64; 5],
}

impl<W: Word> ListenerState<W> {
    /// Sockets that hold a token of the ceiling, given the wrapping sum of all
    /// cells' words.
    #[inline(always)]
    pub fn in_use(&self, cells_sum: u64) -> i64 {
        self.applied
            .load()
            .wrapping_sub(self.pool.load())
            .wrapping_sub(tokens(cells_sum))
            .cast_signed()
    }
}

const _: () = {
    assert!(size_of::<NameKey>() == 65 && align_of::<NameKey>() == 1);
    assert!(size_of::<SlotRef>() == 8 && align_of::<SlotRef>() == 4);
    assert!(size_of::<AdmitRequest>() == 40 && align_of::<AdmitRequest>() == 8);
    assert!(offset_of!(AdmitRequest, slots) == 8);
    assert!(size_of::<ListenerTag>() == 8);
    assert!(size_of::<Meta>() == 32 && offset_of!(Meta, boot_id) == 16);
    assert!(size_of::<LimitWords<u64>>() == 16);
    assert!(size_of::<ListenerState<u64>>() == 128);
    assert!(offset_of!(ListenerState<u64>, over) == 24);
    assert!(offset_of!(ListenerState<u64>, errors) == 72);
    assert!(size_of::<SocketRecord<u64>>() == 48 && align_of::<SocketRecord<u64>>() == 8);
    assert!(offset_of!(SocketRecord<u64>, slots) == 16);
};

#[cfg(feature = "user")]
mod pod {
    //! SAFETY (all): `repr(C)` with explicit padding, no references, and every
    //! bit pattern is a value; the asserts above hold the sizes.
    use super::{ListenerTag, Meta, NameKey, SlotRef, SocketRecord};

    // SAFETY: see the module.
    unsafe impl aya::Pod for NameKey {}
    // SAFETY: see the module.
    unsafe impl aya::Pod for SlotRef {}
    // SAFETY: see the module.
    unsafe impl aya::Pod for ListenerTag {}
    // SAFETY: see the module.
    unsafe impl aya::Pod for Meta {}
    // SAFETY: see the module.
    unsafe impl aya::Pod for SocketRecord<u64> {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_cut_to_63_bytes_and_padded_with_zeroes() {
        let long = NameKey::new(NameKind::User, &[b'x'; 80]);
        assert_eq!(long.name(), &[b'x'; 63]);
        let short = NameKey::new(NameKind::User, b"app");
        assert_eq!(short.name(), b"app");
        assert!(short.bytes[3..].iter().all(|byte| *byte == 0));
        assert_ne!(short, NameKey::new(NameKind::Database, b"app"));
    }

    #[test]
    fn the_request_crosses_as_its_layout() {
        let request = AdmitRequest {
            instance: 0x0102_0304_0506_0708,
            slots: [
                SlotRef {
                    index: 1,
                    generation: 2,
                },
                SlotRef::ABSENT,
                SlotRef::ABSENT,
                SlotRef::ABSENT,
            ],
        };
        let bytes = request.to_bytes();
        assert_eq!(bytes[..8], 0x0102_0304_0506_0708_u64.to_ne_bytes());
        assert_eq!(bytes[8..12], 1_u32.to_ne_bytes());
        assert_eq!(bytes[12..16], 2_u32.to_ne_bytes());
        assert_eq!(bytes[16..20], u32::MAX.to_ne_bytes());
    }
}
