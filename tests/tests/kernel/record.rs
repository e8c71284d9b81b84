//! When there is no memory for a socket's record.

use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gate::kernel::Maps;
use gate_common::abi::{SlotRef, slot};
use gate_common::errno::AdmitErrno;
use gate_tests::kernel::counted::{Counted, Counts, TOTAL, admit, start, used};
use gate_tests::kernel::net::sysctl;

use crate::Test;

pub const TESTS: &[Test] = &[(
    "no_memory_for_a_record_makes_a_socket_over_and_is_logged",
    no_record,
)];

const ANY: &str = "127.0.0.1:0";
const SHORT: Duration = Duration::from_millis(100);

/// Socket storage is charged to the socket's option memory, so a low bound on
/// that leaves room for the listener's tag but not for the record.
fn no_record() -> Result<()> {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_writer(move || writer.clone())
        .init();
    let mut plane = start("norecord")?;
    let kernel_log = plane.take_logger().context("no log")?;
    let maps: Arc<Maps> = plane.maps();
    let listener = Counted::new(&plane, 0, ANY)?;
    let unrecorded = || listener.state().unrecorded_total.load(SeqCst);
    listener.socket.set_read_timeout(Some(SHORT))?;
    let mut found = None;
    for bytes in (100..1200).rev().step_by(20) {
        sysctl("net/core/optmem_max", &bytes.to_string())?;
        let client = listener.connect()?;
        if let Ok(server) = listener.accept()
            && unrecorded() > 0
        {
            found = Some((client, server));
            break;
        }
    }
    let (client, server) = found.context("every socket got its record, or none")?;
    ensure!(maps.record(server.as_fd()).is_none(), "it has a record");
    listener.settles(Counts::NONE)?;
    ensure!(listener.state().over_total.load(SeqCst) == 1, "over_total");
    let absent = SlotRef::ABSENT;
    let answer = admit(&maps, server.as_fd(), [TOTAL, absent, absent, absent]);
    ensure!(answer == Err(AdmitErrno::Over), "{answer:?}");
    ensure!(used(&maps, slot::TOTAL) == 0, "a slot was taken");
    drop((client, server));
    listener.settles(Counts::NONE)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let forward = gate::kernel::forward_log(kernel_log);
    let forever = runtime.block_on(async { tokio::time::timeout(SHORT, forward).await });
    ensure!(forever.is_err(), "forwarding ended: {forever:?}");
    let said = log.text();
    ensure!(
        said.contains("no memory for the record of a socket of listener 0"),
        "log: {said:?}"
    );
    Ok(())
}

/// What is logged, kept to be looked at.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().expect("no panic")).into_owned()
    }
}

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
