//! Proof that counting works here: one connection to a private listener.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::{Duration, Instant};

use gate_common::abi::{AdmitRequest, LISTENER_PROBE, SlotRef, slot};
use gate_common::limit::Setting;
use gate_common::slots;
use socket2::{Domain, Protocol, Socket, Type};

use super::error::KernelError;
use super::maps::Maps;

const TIMEOUT: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(1);

/// Connects to a listener of its own and follows the connection through the
/// maps: counted, admitted, released. The caller holds the instance's lock.
pub fn run(maps: &Maps) -> Result<(), KernelError> {
    open_limits(maps);
    let before = Counts::read(maps)?;
    let listener = listen(maps)?;
    let address = listener
        .local_addr()
        .map_err(failed("read the probe's address"))?
        .as_socket()
        .ok_or_else(|| KernelError::Probe("its listener has no address".into()))?;
    let client = TcpStream::connect_timeout(&address, TIMEOUT).map_err(failed(
        "connect over loopback; is `lo` up and not filtered?",
    ))?;
    let (accepted, _) = listener.accept().map_err(failed("accept over loopback"))?;
    before.expect(
        maps,
        &Counts {
            sockets: 1,
            pending: 1,
            ..Counts::NONE
        },
        "after accept",
    )?;
    if maps.record(accepted.as_fd()).is_none() {
        return Err(KernelError::Probe("its socket has no record".into()));
    }
    admit(maps, &accepted)?;
    let admitted = Counts {
        sockets: 1,
        admitted: 1,
        used: 1,
        ..Counts::NONE
    };
    before.expect(maps, &admitted, "after admission")?;
    // A reset: nothing stays behind in TIME_WAIT.
    accepted
        .set_linger(Some(Duration::ZERO))
        .map_err(failed("set SO_LINGER"))?;
    drop(accepted);
    drop(client);
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match before.expect(maps, &Counts::NONE, "after close") {
            Err(_) if Instant::now() < deadline => thread::sleep(POLL),
            result => return result,
        }
    }
}

/// The probe must not depend on the limits that people set.
fn open_limits(maps: &Maps) {
    let unlimited = Setting::Unlimited.encode();
    maps.listener_limits[LISTENER_PROBE as usize]
        .config
        .store(unlimited, SeqCst);
    maps.limits[slot::PROBE as usize]
        .config
        .store(unlimited, SeqCst);
}

fn listen(maps: &Maps) -> Result<Socket, KernelError> {
    let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))
        .map_err(failed("make a socket"))?;
    listener
        .bind(&any_port.into())
        .map_err(failed("bind to loopback; is `lo` up?"))?;
    maps.tag(listener.as_fd(), LISTENER_PROBE)?;
    listener.listen(1).map_err(failed("listen on loopback"))?;
    listener
        .set_read_timeout(Some(TIMEOUT))
        .map_err(failed("set SO_RCVTIMEO"))?;
    Ok(listener)
}

fn admit(maps: &Maps, accepted: &Socket) -> Result<(), KernelError> {
    let word = maps.slots[slot::PROBE as usize].load(SeqCst);
    let total = SlotRef {
        index: slot::PROBE,
        generation: slots::generation(word),
    };
    let request = AdmitRequest {
        instance: maps.meta().instance,
        slots: [total, SlotRef::ABSENT, SlotRef::ABSENT, SlotRef::ABSENT],
    };
    maps.admit(accepted.as_fd(), &request)
        .map_err(|refusal| KernelError::Probe(format!("admission answered {refusal:?}")))
}

/// What the maps say of the probe's listener and slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counts {
    sockets: i64,
    pending: i64,
    admitted: i64,
    used: i64,
}

impl Counts {
    const NONE: Self = Self {
        sockets: 0,
        pending: 0,
        admitted: 0,
        used: 0,
    };

    fn read(maps: &Maps) -> Result<Self, KernelError> {
        let state = &maps.listeners[LISTENER_PROBE as usize];
        Ok(Self {
            sockets: state.in_use(maps.cells_sum(LISTENER_PROBE)?),
            pending: state.pending.load(SeqCst).cast_signed(),
            admitted: state.admitted.load(SeqCst).cast_signed(),
            used: i64::from(slots::used(maps.slots[slot::PROBE as usize].load(SeqCst))),
        })
    }

    /// Compares with what was there before, left by a probe that died.
    fn expect(&self, maps: &Maps, more: &Self, when: &str) -> Result<(), KernelError> {
        let now = Self::read(maps)?;
        let found = Self {
            sockets: now.sockets - self.sockets,
            pending: now.pending - self.pending,
            admitted: now.admitted - self.admitted,
            used: now.used - self.used,
        };
        if found == *more {
            return Ok(());
        }
        let hint = if found.sockets == 0 && more.sockets > 0 {
            "; gate must run inside the cgroup that the programs are attached to"
        } else {
            ""
        };
        Err(KernelError::Probe(format!(
            "{when} the maps say {found:?} instead of {more:?}{hint}"
        )))
    }
}

fn failed(doing: &'static str) -> impl FnOnce(io::Error) -> KernelError {
    move |error| KernelError::Probe(format!("cannot {doing}: {error}"))
}
