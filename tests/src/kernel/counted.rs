//! A plane with listeners whose counts are looked at.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use gate::kernel::{Maps, Plane, PlaneOptions};
use gate_common::abi::{AdmitRequest, LimitWords, ListenerState, SlotRef, slot};
use gate_common::errno::AdmitErrno;
use gate_common::limit::Setting;
use gate_common::slots;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

/// How long a count may take to come true.
pub const SETTLE: Duration = Duration::from_secs(3);

/// What the kernel's words of a listener say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Sockets that hold a token.
    pub sockets: i64,
    /// Sockets with no admission asked yet.
    pub pending: u64,
    /// Sockets without a token.
    pub over: u64,
    /// Sessions that hold slots.
    pub admitted: u64,
}

impl Counts {
    /// Nothing.
    pub const NONE: Self = Self {
        sockets: 0,
        pending: 0,
        over: 0,
        admitted: 0,
    };

    /// So many sockets that have not asked for admission.
    #[must_use]
    pub const fn pending(sockets: u32) -> Self {
        Self {
            sockets: sockets as i64,
            pending: sockets as u64,
            ..Self::NONE
        }
    }
}

/// Starts the plane of an instance in the cgroup of this process.
///
/// # Errors
/// The plane's.
pub fn start(instance: &str) -> Result<Plane> {
    Ok(Plane::start(&PlaneOptions {
        instance: instance.into(),
        cgroup: None,
    })?)
}

/// A counted listener.
#[derive(Debug)]
pub struct Counted {
    /// Its socket.
    pub socket: Socket,
    /// Where it listens.
    pub address: SocketAddr,
    /// Its index.
    pub index: u32,
    maps: Arc<Maps>,
}

impl Counted {
    /// Listens on a loopback address, for instance `127.0.0.1:0`.
    ///
    /// # Errors
    /// A socket call fails.
    pub fn new(plane: &Plane, index: u32, address: &str) -> Result<Self> {
        Self::with(plane, index, address, 4096, |_| Ok(()))
    }

    /// As [`Counted::new`], with a backlog and options set before bind.
    ///
    /// # Errors
    /// A socket call fails.
    pub fn with(
        plane: &Plane,
        index: u32,
        address: &str,
        backlog: i32,
        options: impl FnOnce(&Socket) -> io::Result<()>,
    ) -> Result<Self> {
        let wanted: SocketAddr = address.parse()?;
        let socket = Socket::new(
            Domain::for_address(wanted),
            Type::STREAM,
            Some(Protocol::TCP),
        )?;
        options(&socket)?;
        socket.bind(&SockAddr::from(wanted))?;
        plane.tag_listener(socket.as_fd(), index)?;
        socket.listen(backlog)?;
        socket.set_read_timeout(Some(SETTLE))?;
        let address = socket.local_addr()?.as_socket().unwrap_or(wanted);
        Ok(Self {
            socket,
            address,
            index,
            maps: plane.maps(),
        })
    }

    /// Connects a client.
    ///
    /// # Errors
    /// The connection's.
    pub fn connect(&self) -> io::Result<TcpStream> {
        TcpStream::connect_timeout(&self.address, SETTLE)
    }

    /// Connects a client to this port at another local address.
    ///
    /// # Errors
    /// The connection's.
    pub fn connect_to(&self, address: [u8; 4]) -> io::Result<TcpStream> {
        TcpStream::connect_timeout(&(address, self.address.port()).into(), SETTLE)
    }

    /// Connects a client and accepts it.
    ///
    /// # Errors
    /// The connection's.
    pub fn pair(&self) -> io::Result<(TcpStream, TcpStream)> {
        let client = self.connect()?;
        Ok((client, self.accept()?))
    }

    /// Accepts one connection, which must come within [`SETTLE`].
    ///
    /// # Errors
    /// The call's.
    pub fn accept(&self) -> io::Result<TcpStream> {
        Ok(self.socket.accept()?.0.into())
    }

    /// The kernel's words.
    #[must_use]
    pub fn state(&self) -> &ListenerState<AtomicU64> {
        &self.maps.listeners[self.index as usize]
    }

    /// What the kernel counts now.
    ///
    /// # Errors
    /// The cells cannot be read.
    pub fn counts(&self) -> Result<Counts> {
        counts(&self.maps, self.index)
    }

    /// Waits until the counts are as expected.
    ///
    /// # Errors
    /// They are not within [`SETTLE`].
    pub fn settles(&self, expected: Counts) -> Result<()> {
        settles(&self.maps, self.index, expected)
    }

    /// Sets this listener's ceiling.
    pub fn ceiling(&self, setting: Setting) {
        set(&self.maps.listener_limits[self.index as usize], setting);
    }
}

/// What the kernel counts for a listener.
///
/// # Errors
/// The cells cannot be read.
pub fn counts(maps: &Maps, index: u32) -> Result<Counts> {
    let state = &maps.listeners[index as usize];
    Ok(Counts {
        sockets: state.in_use(maps.cells_sum(index)?),
        pending: state.pending.load(SeqCst),
        over: state.over.load(SeqCst),
        admitted: state.admitted.load(SeqCst),
    })
}

/// Waits until a listener's counts are as expected, with no impossible count
/// ever seen.
///
/// # Errors
/// They are not within [`SETTLE`].
pub fn settles(maps: &Maps, index: u32, expected: Counts) -> Result<()> {
    let end = Instant::now() + SETTLE;
    loop {
        let found = counts(maps, index)?;
        let errors = maps.listeners[index as usize].errors.load(SeqCst);
        if errors != 0 {
            bail!("{errors} impossible counts, with {found:?}");
        }
        if found == expected {
            return Ok(());
        }
        if Instant::now() > end {
            bail!("counts are {found:?}, expected {expected:?}");
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Sets a limit as gatectl does.
pub fn set(words: &LimitWords<AtomicU64>, setting: Setting) {
    words.runtime.store(setting.encode(), SeqCst);
}

/// The total's slot, which is nobody's to recycle.
pub const TOTAL: SlotRef = SlotRef {
    index: slot::TOTAL,
    generation: 0,
};

/// Asks for slots: total, user, database, backend.
///
/// # Errors
/// The denial.
pub fn admit(maps: &Maps, socket: BorrowedFd<'_>, slots: [SlotRef; 4]) -> Result<(), AdmitErrno> {
    maps.admit(
        socket,
        &AdmitRequest {
            instance: maps.meta().instance,
            slots,
        },
    )
}

/// How many sessions hold a slot.
#[must_use]
pub fn used(maps: &Maps, index: u32) -> u32 {
    slots::used(maps.slots[index as usize].load(SeqCst))
}
