//! The local form: the ledger's words in the memory of one process.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gate_common::abi::{LISTENERS_MAX, ListenerState, NameKey, SlotRef};
use gate_common::cells::Cells;
use gate_common::limit::{LimitWords, UNLIMITED_TOKENS};
use gate_common::record::{self, SocketRecord, Verdict};
use gate_common::slots::Book;

use super::{Guard, NameTable};

/// All words of a ledger, in memory.
pub struct LocalBook {
    slots: Box<[AtomicU64]>,
    limits: Box<[LimitWords<AtomicU64>]>,
    listener_limits: Box<[LimitWords<AtomicU64>]>,
    listeners: Box<[ListenerState<AtomicU64>]>,
    names: Mutex<HashMap<NameKey, SlotRef>>,
    removal: Mutex<()>,
}

impl LocalBook {
    pub(super) fn new(slots: u32) -> Self {
        Self {
            slots: zeroed(slots),
            limits: zeroed(slots),
            listener_limits: zeroed(LISTENERS_MAX),
            listeners: zeroed(LISTENERS_MAX),
            names: Mutex::default(),
            removal: Mutex::default(),
        }
    }

    /// A connection's record. The ceiling is not enforced in this form, so
    /// every socket finds a token.
    pub(super) fn established(&self, listener: u32) -> Box<SocketRecord<AtomicU64>> {
        let fresh = Box::new(SocketRecord {
            listener,
            ..SocketRecord::default()
        });
        let state = &self.listeners[listener as usize];
        record::established(&fresh, state, &NoCells, || UNLIMITED_TOKENS);
        fresh
    }

    pub(super) fn admit(
        &self,
        socket: &SocketRecord<AtomicU64>,
        listener: u32,
        asked: &[SlotRef; 4],
    ) -> Verdict {
        record::admit(socket, &self.listeners[listener as usize], self, asked)
    }

    pub(super) fn closed(&self, socket: &SocketRecord<AtomicU64>, listener: u32) {
        let state = &self.listeners[listener as usize];
        record::released(socket, state, self);
        record::closed(socket, state, &NoCells);
    }

    pub(super) fn slots(&self) -> &[AtomicU64] {
        &self.slots
    }

    pub(super) fn limits(&self) -> &[LimitWords<AtomicU64>] {
        &self.limits
    }

    pub(super) fn listener_limits(&self) -> &[LimitWords<AtomicU64>] {
        &self.listener_limits
    }

    pub(super) fn listeners(&self) -> &[ListenerState<AtomicU64>] {
        &self.listeners
    }

    fn table(&self) -> MutexGuard<'_, HashMap<NameKey, SlotRef>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book for LocalBook {
    type Word = AtomicU64;

    fn slot(&self, index: u32) -> Option<&AtomicU64> {
        self.slots.get(index as usize)
    }

    fn limit(&self, index: u32) -> Option<&LimitWords<AtomicU64>> {
        self.limits.get(index as usize)
    }
}

impl NameTable for LocalBook {
    fn get(&self, key: &NameKey) -> io::Result<Option<SlotRef>> {
        Ok(self.table().get(key).copied())
    }

    fn insert(&self, key: &NameKey, value: SlotRef) -> io::Result<bool> {
        let mut table = self.table();
        if table.contains_key(key) {
            return Ok(false);
        }
        table.insert(*key, value);
        Ok(true)
    }

    fn remove(&self, key: &NameKey) -> io::Result<()> {
        self.table().remove(key);
        Ok(())
    }

    fn entries(&self) -> io::Result<Vec<(NameKey, SlotRef)>> {
        let table = self.table();
        Ok(table.iter().map(|(key, value)| (*key, *value)).collect())
    }

    fn lock(&self) -> Option<Box<dyn Guard + '_>> {
        let guard = self.removal.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Box::new(guard))
    }
}

/// No cells: every token lies in the pool.
struct NoCells;

impl Cells for NoCells {
    type Word = AtomicU64;

    fn this_cpu(&self) -> u32 {
        0
    }

    fn cell(&self, _cpu: u32) -> Option<&AtomicU64> {
        None
    }
}

fn zeroed<T: Default>(count: u32) -> Box<[T]> {
    (0..count).map(|_| T::default()).collect()
}
