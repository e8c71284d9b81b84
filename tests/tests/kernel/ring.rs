//! Admission as gate asks for it: as an operation of the worker's ring.

use std::net::TcpStream;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::Ordering::SeqCst;

use anyhow::{Context as _, Result, ensure};
use gate::kernel::Maps;
use gate_common::abi::{AdmitRequest, SO_GATE_ADMIT, SOL_GATE, SlotKind, SlotRef, slot};
use gate_common::errno::AdmitErrno;
use gate_common::limit::Setting;
use gate_tests::kernel::counted::{Counted, Counts, set, start};

use crate::Test;
use crate::slots::{ANY, BACKEND, DATABASE, USER, all_slots, ensure_uses, ok};

pub const TESTS: &[Test] = &[("admission_by_io_uring_needs_no_worker_thread", by_ring)];

fn by_ring() -> Result<()> {
    let plane = start("ring")?;
    let maps = plane.maps();
    let slots = all_slots(&maps)?;
    let listener = Counted::new(&plane, 0, ANY)?;
    let mut ring: io_uring::IoUring = io_uring::IoUring::builder()
        .setup_single_issuer()
        .setup_coop_taskrun()
        .setup_defer_taskrun()
        .build(8)?;
    let (_client, server) = listener.pair()?;
    let mut ask = || ring_admit(&mut ring, &maps, &server, slots);
    for (index, kind) in [
        (slot::TOTAL, SlotKind::Total),
        (USER, SlotKind::User),
        (DATABASE, SlotKind::Database),
        (BACKEND, SlotKind::Backend),
    ] {
        set(&maps.limits[index as usize], Setting::None);
        let answer = ask()?;
        ensure!(
            answer == Err(AdmitErrno::Full(kind)),
            "{answer:?} for {kind:?}"
        );
        set(&maps.limits[index as usize], Setting::Inherit);
    }
    ok(ask()?)?;
    ensure!(ask()? == Err(AdmitErrno::Already), "a second admission");
    ensure_uses(&maps, [1; 4])?;
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    ensure!(threads == 1, "{threads} threads: the ring went to a worker");
    drop(server);
    listener.settles(Counts::NONE)?;
    ensure!(
        listener.state().errors.load(SeqCst) == 0,
        "impossible counts"
    );
    ensure_uses(&maps, [0; 4])
}

fn ring_admit(
    ring: &mut io_uring::IoUring,
    maps: &Maps,
    socket: &TcpStream,
    slots: [SlotRef; 4],
) -> Result<Result<(), AdmitErrno>> {
    let request = AdmitRequest {
        instance: maps.meta().instance,
        slots,
    }
    .to_bytes();
    let entry = io_uring::opcode::SetSockOpt::new(
        io_uring::types::Fd(socket.as_raw_fd()),
        SOL_GATE.cast_unsigned(),
        SO_GATE_ADMIT.cast_unsigned(),
        request.as_ptr().cast(),
        request.len() as u32,
    )
    .build();
    // SAFETY: `request` outlives the wait for its completion below.
    unsafe { ring.submission().push(&entry) }?;
    ring.submit_and_wait(1)?;
    let result = ring.completion().next().context("no completion")?.result();
    Ok(match result {
        0.. => Ok(()),
        error => Err(AdmitErrno::from_code(-error)),
    })
}
