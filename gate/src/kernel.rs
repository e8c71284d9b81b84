//! Stand-in until the kernel module lands: the shapes that others code against.
#![allow(missing_docs)]
use gate_common::abi::*;
use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicU64;
pub struct Maps {
    pub slots: Vec<AtomicU64>,
    pub limits: Vec<LimitWords<AtomicU64>>,
    pub listener_limits: Vec<LimitWords<AtomicU64>>,
    pub listeners: Vec<ListenerState<AtomicU64>>,
}
#[derive(Debug, thiserror::Error)]
#[error("no kernel plane")]
pub struct KernelError;
impl Maps {
    pub fn open(_instance: &str) -> Result<Maps, KernelError> { Err(KernelError) }
    pub fn directory(&self) -> &std::path::Path { std::path::Path::new("/") }
    pub fn meta(&self) -> Meta { Meta { magic: 0, schema: 0, instance: 0, boot_id: [0; 16] } }
    pub fn cells_sum(&self, _listener: u32) -> Result<u64, KernelError> { Err(KernelError) }
    pub fn record(&self, _socket: BorrowedFd<'_>) -> Option<SocketRecord<u64>> { None }
    pub fn admit(&self, _socket: BorrowedFd<'_>, _request: &AdmitRequest) -> gate_common::record::Verdict { gate_common::record::Verdict::Over }
    pub fn name_get(&self, _key: &NameKey) -> Result<Option<SlotRef>, KernelError> { Err(KernelError) }
    pub fn name_insert(&self, _key: &NameKey, _value: SlotRef) -> Result<bool, KernelError> { Err(KernelError) }
    pub fn name_remove(&self, _key: &NameKey) -> Result<(), KernelError> { Err(KernelError) }
    pub fn names(&self) -> Result<Vec<(NameKey, SlotRef)>, KernelError> { Err(KernelError) }
}
