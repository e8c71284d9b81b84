//! Names and their slots.
//!
//! A name gets a slot when it first comes, from whoever sees it first: a
//! worker, `gatectl`, a second gate. Inserting needs no lock. Removing does:
//! a name is taken out of the table only under the table's lock, by whoever
//! holds it, so that no two slots ever serve one name. Only a slot without use
//! and without a limit of its own is ever taken away.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::Ordering;

use gate_common::abi::{LISTENER_PROBE, NameKey, NameKind, SLOTS_MAX, SlotRef, slot};
use gate_common::limit::Setting;
use gate_common::slots;
use std::sync::atomic::Ordering::SeqCst;

use super::{Applicant, Ledger};

/// Names that one worker remembers; past it, it starts anew.
const CACHE_NAMES_MAX: usize = 4096;
/// Slots freed in one go when the table is full.
const RECYCLE_BATCH: usize = 1024;
/// Races lost against other processes before giving up.
const ATTEMPTS: usize = 8;

/// Why a name has no slot.
#[derive(Debug, thiserror::Error)]
pub enum NamesError {
    /// All slots are in use or have a limit of their own.
    #[error(
        "the table of names is full: every one of its {SLOTS_MAX} slots is in use or has a limit of its own; unset limits that are not needed"
    )]
    Full,
    /// Another process holds the table's lock.
    #[error("the table of names is locked by another process; try again")]
    Locked,
    /// The table itself failed.
    #[error("the table of names cannot be used: {0}")]
    Table(#[from] io::Error),
}

/// One worker's memory of names: saves the table's lookup.
#[derive(Debug, Default)]
pub struct NameCache {
    slots: HashMap<NameKey, SlotRef>,
}

impl NameCache {
    /// The slot of a name, made if there is none.
    ///
    /// # Errors
    /// See [`NamesError`].
    pub fn find(&mut self, ledger: &Ledger, key: &NameKey) -> Result<SlotRef, NamesError> {
        if let Some(known) = self.slots.get(key) {
            return Ok(*known);
        }
        let found = ledger.find_or_make(key)?;
        if self.slots.len() >= CACHE_NAMES_MAX {
            self.slots.clear();
        }
        self.slots.insert(*key, found);
        Ok(found)
    }

    /// Forgets an applicant's names: their slots were recycled.
    pub fn forget(&mut self, who: &Applicant<'_>) {
        self.slots.remove(&NameKey::new(NameKind::User, who.user));
        self.slots
            .remove(&NameKey::new(NameKind::Backend, who.backend));
        if let Some(database) = who.database {
            self.slots
                .remove(&NameKey::new(NameKind::Database, database));
        }
    }
}

impl Ledger {
    /// The slot of a user, database or backend, made if there is none.
    ///
    /// # Errors
    /// See [`NamesError`].
    pub fn find_or_make(&self, key: &NameKey) -> Result<SlotRef, NamesError> {
        for _ in 0..ATTEMPTS {
            if let Some(found) = self.names().get(key)? {
                if self.is_current(found) {
                    return Ok(found);
                }
                self.remove_stale(key)?;
            }
            let Some(fresh) = self.claim_free() else {
                match self.recycle_unused() {
                    Ok(0) => return Err(NamesError::Full),
                    // Another is at it, and slots are about to come free.
                    Ok(_) | Err(NamesError::Locked) => continue,
                    Err(error) => return Err(error),
                }
            };
            match self.names().insert(key, fresh) {
                Ok(true) => return Ok(fresh),
                Ok(false) => self.free(fresh),
                Err(error) => {
                    self.free(fresh);
                    return Err(error.into());
                }
            }
        }
        Err(NamesError::Locked)
    }

    /// The listener index of an address: the same one after each restart, so
    /// that sockets of an earlier gate stay counted where they were.
    ///
    /// # Errors
    /// See [`NamesError`].
    pub fn listener_index(&self, address: &str) -> Result<u32, NamesError> {
        let key = NameKey::new(NameKind::Listener, address.as_bytes());
        let _lock = self.names().lock().ok_or(NamesError::Locked)?;
        if let Some(found) = self.names().get(&key)? {
            return Ok(found.index);
        }
        let taken = self.names().entries()?;
        let listeners: Vec<_> = taken
            .iter()
            .filter(|(key, _)| key.kind == NameKind::Listener as u8)
            .collect();
        let free = (0..LISTENER_PROBE)
            .find(|index| listeners.iter().all(|(_, slot)| slot.index != *index));
        let index = match free {
            Some(index) => index,
            None => self.abandon_listener(&listeners)?,
        };
        let value = SlotRef {
            index,
            generation: 0,
        };
        self.names().insert(&key, value)?;
        Ok(index)
    }

    /// All names with their slots.
    ///
    /// # Errors
    /// The table could not be read.
    pub fn all_names(&self) -> io::Result<Vec<(NameKey, SlotRef)>> {
        let mut names = self.names().entries()?;
        names.retain(|(key, slot)| key.kind == NameKind::Listener as u8 || self.is_current(*slot));
        names.sort_unstable_by_key(|(key, _)| *key);
        names.dedup_by_key(|(key, _)| *key);
        Ok(names)
    }

    pub(super) fn is_current(&self, found: SlotRef) -> bool {
        let word = self.words().get(found.index as usize);
        word.is_some_and(|word| slots::generation(word.load(SeqCst)) == found.generation)
    }

    fn claim_free(&self) -> Option<SlotRef> {
        let named = self.words().len() as u32 - slot::FIRST_NAMED;
        let start = self.next_free.load(Ordering::Relaxed);
        (0..named).find_map(|step| {
            let index = slot::FIRST_NAMED + (start.wrapping_add(step)) % named;
            let generation = slots::claim(&self.words()[index as usize])?;
            self.next_free
                .store(index - slot::FIRST_NAMED + 1, Ordering::Relaxed);
            Some(SlotRef { index, generation })
        })
    }

    fn free(&self, slot: SlotRef) {
        slots::recycle(&self.words()[slot.index as usize], slot.generation);
    }

    /// Takes out a name whose slot has gone to another owner: left by a
    /// process that died between freeing the slot and removing the name.
    fn remove_stale(&self, key: &NameKey) -> Result<(), NamesError> {
        let _lock = self.names().lock().ok_or(NamesError::Locked)?;
        if let Some(found) = self.names().get(key)?
            && !self.is_current(found)
        {
            self.names().remove(key)?;
        }
        Ok(())
    }

    /// Frees slots without use and without a limit. Returns how many.
    fn recycle_unused(&self) -> Result<usize, NamesError> {
        // The long walk is done without the lock: others wait for it.
        let seen = self.names().entries()?;
        let _lock = self.names().lock().ok_or(NamesError::Locked)?;
        let mut freed = 0;
        for (key, found) in seen {
            if freed == RECYCLE_BATCH {
                break;
            }
            if key.kind != NameKind::Listener as u8
                && self.is_unused(found)
                && self.names().get(&key)? == Some(found)
                && self.recycle(found)
            {
                self.names().remove(&key)?;
                freed += 1;
            }
        }
        if freed == 0 {
            freed = self.free_orphans(&self.names().entries()?);
        }
        Ok(freed)
    }

    /// Whether nobody holds a slot and no limit was set for it; also if it has
    /// gone to another owner already.
    fn is_unused(&self, found: SlotRef) -> bool {
        let Some(word) = self.words().get(found.index as usize) else {
            return true;
        };
        let unused = word.load(SeqCst) == slots::unused(found.generation);
        !self.is_current(found) || unused && !self.has_limit(found.index)
    }

    /// Takes a slot from its name. Returns whether the name has it no more.
    fn recycle(&self, found: SlotRef) -> bool {
        let word = self.words().get(found.index as usize);
        word.is_some_and(|word| slots::recycle(word, found.generation)) || !self.is_current(found)
    }

    /// Frees slots that were claimed by a process that died before it could
    /// insert their name. A live claimer that loses its slot this way finds
    /// its generation gone and asks again.
    fn free_orphans(&self, names: &[(NameKey, SlotRef)]) -> usize {
        let mut owned = vec![false; self.words().len()];
        for (key, found) in names {
            if key.kind != NameKind::Listener as u8
                && let Some(owned) = owned.get_mut(found.index as usize)
            {
                *owned = true;
            }
        }
        let named = slot::FIRST_NAMED as usize..self.words().len();
        named
            .filter(|index| {
                let word = &self.words()[*index];
                let generation = slots::generation(word.load(SeqCst));
                !owned[*index] && !generation.is_multiple_of(2) && slots::recycle(word, generation)
            })
            .count()
    }

    fn has_limit(&self, index: u32) -> bool {
        self.limit_words()
            .get(index as usize)
            .is_some_and(|words| words.setting() != Setting::Inherit)
    }

    /// Every index is taken: reuses one whose listener has no socket left.
    fn abandon_listener(&self, listeners: &[&(NameKey, SlotRef)]) -> Result<u32, NamesError> {
        let idle = listeners.iter().find(|(_, slot)| {
            let state = self.state(slot.index);
            self.sockets(slot.index) == 0
                && state.admitted.load(SeqCst) == 0
                && state.over.load(SeqCst) == 0
        });
        let (key, slot) = idle.ok_or(NamesError::Full)?;
        self.names().remove(key)?;
        let limits = &self.listener_limit_words()[slot.index as usize];
        limits.runtime.store(Setting::Inherit.encode(), SeqCst);
        limits.config.store(Setting::Inherit.encode(), SeqCst);
        Ok(slot.index)
    }
}
