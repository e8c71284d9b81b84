//! The kernel form: the ledger's words in pinned maps.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use gate_common::abi::{AdmitRequest, NameKey, SlotRef};
use gate_common::record::OVER;

use super::{Guard, NameTable};
use crate::host;
use crate::kernel::{KernelError, Maps};

/// How often a held lock is tried again, a tenth of a millisecond apart. The
/// holder needs microseconds; a stopped holder must not stop the workers.
const LOCK_TRIES: u32 = 50;

/// Whether the kernel marked the socket over. A socket without a record is
/// one for which the kernel had no memory: over as well.
pub(super) fn is_over(maps: &Maps, client: BorrowedFd<'_>) -> bool {
    maps.record(client)
        .is_none_or(|record| record.state & OVER != 0)
}

pub(super) fn request(maps: &Maps, asked: &[SlotRef; 4]) -> AdmitRequest {
    AdmitRequest {
        instance: maps.meta().instance,
        slots: *asked,
    }
}

pub(super) fn cells_sum(maps: &Maps, listener: u32) -> u64 {
    maps.cells_sum(listener).unwrap_or_else(|error| {
        tracing::warn!(%error, listener, "the token cells cannot be read");
        0
    })
}

impl NameTable for Maps {
    fn get(&self, key: &NameKey) -> io::Result<Option<SlotRef>> {
        self.name_get(key).map_err(other)
    }

    fn insert(&self, key: &NameKey, value: SlotRef) -> io::Result<bool> {
        self.name_insert(key, value).map_err(other)
    }

    fn remove(&self, key: &NameKey) -> io::Result<()> {
        self.name_remove(key).map_err(other)
    }

    fn entries(&self) -> io::Result<Vec<(NameKey, SlotRef)>> {
        self.names().map_err(other)
    }

    fn lock(&self) -> Option<Box<dyn Guard + '_>> {
        for _ in 0..LOCK_TRIES {
            match host::try_lock(self.directory()) {
                Ok(Some(lock)) => return Some(Box::new(lock)),
                Ok(None) => std::thread::sleep(Duration::from_micros(100)),
                Err(error) => {
                    tracing::warn!(%error, "the pin directory cannot be locked");
                    return None;
                }
            }
        }
        None
    }
}

fn other(error: KernelError) -> io::Error {
    io::Error::other(error)
}
