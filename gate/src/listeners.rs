//! The listening sockets: bound, or taken over from another gate.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use socket2::{Domain, Protocol, Socket, Type};

use crate::config::{Config, Pin, TcpOptions};
use crate::host;
use crate::kernel::{Choice, Group, Plane};
use crate::ledger::Ledger;
use crate::placement::Place;
use crate::server::RunError;
use crate::state::{ListenerInfo, State};
use crate::takeover::{Item, Predecessor};
use crate::worker::Listening;

/// Connections the kernel completes before they are accepted; cut by
/// net.core.somaxconn.
const BACKLOG: i32 = 4096;
/// How long an address may stay busy after an earlier gate: the kernel tears a
/// killed process's rings down a little later than the process.
const BIND_PATIENCE: Duration = Duration::from_secs(2);

/// The listening sockets, in the order of the configuration.
pub struct Listeners {
    /// What each listener is.
    pub infos: Vec<ListenerInfo>,
    /// One row for each listener, at least one socket for each worker.
    sockets: Vec<Vec<Socket>>,
}

impl Listeners {
    /// Fails early if an address cannot be had that no predecessor has.
    pub fn probe(config: &Config, predecessor: Option<&Predecessor>) -> Result<(), RunError> {
        config
            .listeners
            .iter()
            .map(|listener| listener.address)
            .filter(|address| !predecessor.is_some_and(|has| has.has_listener(*address)))
            .try_for_each(probe_bind)
    }

    /// Adopts what the predecessor has and binds what is missing: every worker
    /// gets a socket of each listener. A socket that connections may wait at is
    /// never left without a worker, however few workers there are now.
    pub fn open(
        config: &Config,
        places: &[Place],
        plane: Option<&Plane>,
        ledger: &Ledger,
        mut predecessor: Option<&mut Predecessor>,
    ) -> Result<Self, RunError> {
        let mut listeners = Self {
            infos: Vec::new(),
            sockets: Vec::new(),
        };
        for listener in &config.listeners {
            let index = ledger.listener_index(&listener.address.to_string())?;
            let mut address = listener.address;
            let adopted = predecessor.as_mut().map(|has| {
                let wanted = Item::Listener { address };
                has.take_all(&wanted)
            });
            let mut row = Vec::new();
            for socket in adopted.unwrap_or_default() {
                // Tagged as it is already, unless the maps are of another schema.
                if let Some(plane) = plane {
                    plane.tag_listener(socket.as_fd(), index)?;
                }
                let socket = Socket::from(socket);
                host::set_client_options(&socket, &listener.tcp)
                    .with_context(|| format!("{address} cannot be set up"))?;
                row.push(socket);
            }
            while row.len() < places.len() {
                // Port 0: the first socket's port is everybody's.
                if let Some(first) = row.first() {
                    address = bound(first)?;
                }
                row.push(listen(address, &listener.tcp, plane, index)?);
            }
            let address = row.first().map_or(Ok(address), bound)?;
            listeners.infos.push(ListenerInfo { address, index });
            listeners.sockets.push(row);
        }
        Ok(listeners)
    }

    /// Second descriptors of all sockets, by listener.
    pub fn again(&self) -> io::Result<Vec<Vec<OwnedFd>>> {
        let again = |socket: &Socket| socket.as_fd().try_clone_to_owned();
        self.sockets
            .iter()
            .map(|row| row.iter().map(again).collect())
            .collect()
    }

    /// A second descriptor of each socket, to be handed over.
    pub fn clone_all(&self, config: &Config) -> io::Result<Vec<(Item, OwnedFd)>> {
        let mut items = Vec::new();
        for (listener, row) in config.listeners.iter().zip(&self.sockets) {
            let address = listener.address;
            for socket in row {
                items.push((Item::Listener { address }, socket.try_clone()?.into()));
            }
        }
        Ok(items)
    }

    /// What each worker accepts from.
    pub fn into_per_worker(self, workers: usize) -> Vec<Vec<Listening<Socket>>> {
        let mut per_worker: Vec<Vec<Listening<Socket>>> =
            (0..workers).map(|_| Vec::new()).collect();
        for (place, (info, row)) in self.infos.iter().zip(self.sockets).enumerate() {
            for (position, socket) in row.into_iter().enumerate() {
                per_worker[position % workers].push(Listening::new(socket, place, info.index));
            }
        }
        per_worker
    }
}

/// Tells the kernel who chooses the worker of a new connection. Beyond the first
/// socket of each worker, adopted ones get no new connections.
pub fn steer(state: &State, plane: Option<&Plane>) -> Result<(), RunError> {
    let sockets = state.sockets.read().unwrap_or_else(PoisonError::into_inner);
    // Only the CPU that a packet comes in at knows the worker of its queue.
    let by_queue = matches!(state.config().workers.pin, Pin::Nic(_));
    for row in sockets.iter() {
        for (socket, place) in row.iter().zip(state.places.iter().cycle()) {
            // An adopted socket has the preference of the gate that it is of.
            let cpu = place.cpu.filter(|_| by_queue);
            host::prefer_incoming_cpu(socket.as_fd(), cpu).context("SO_INCOMING_CPU is refused")?;
        }
    }
    let Some(plane) = plane else {
        return Ok(());
    };
    let choice = if by_queue {
        Choice::Kernel
    } else {
        Choice::LessLoaded
    };
    let workers = state.stats.len();
    let rows = state.listeners.iter().zip(sockets.iter());
    let groups: Vec<Group<'_>> = rows
        .map(|(info, row)| Group {
            listener: info.index,
            sockets: row.iter().take(workers).map(OwnedFd::as_fd).collect(),
        })
        .collect();
    if let Some(loads) = plane.steer(&groups, choice)? {
        for (worker, stats) in state.stats.iter().enumerate() {
            stats.publish(Arc::clone(&loads), worker);
        }
    }
    Ok(())
}

fn bound(socket: &Socket) -> Result<SocketAddr, RunError> {
    let address = socket.local_addr().context("a socket without an address")?;
    Ok(address
        .as_socket()
        .context("a listening socket that is not of TCP")?)
}

/// Binds alone, without SO_REUSEPORT: another program of the same user could
/// otherwise share the address without an error.
fn probe_bind(address: SocketAddr) -> Result<(), RunError> {
    let started = Instant::now();
    loop {
        let bound = new_socket(address).and_then(|socket| socket.bind(&address.into()));
        match bound {
            Ok(()) => return Ok(()),
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse
                    && started.elapsed() < BIND_PATIENCE =>
            {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => {
                let kind = error.kind();
                let cure = bind_cure(address, kind);
                let text = format!("{address} cannot be listened on: {error}; {cure}");
                return Err(match kind {
                    io::ErrorKind::PermissionDenied => RunError::Host(text),
                    _ => anyhow::anyhow!(text).into(),
                });
            }
        }
    }
}

/// TIME_WAIT counts too, and `ss` shows it with -a only: a port in the range of
/// outgoing connections can be one's own side of such a connection.
fn bind_cure(address: SocketAddr, kind: io::ErrorKind) -> String {
    match kind {
        io::ErrorKind::AddrInUse => format!(
            "`ss -tanp sport = :{0}` shows who has it: stop that program, or choose another port; if \
             those are outgoing connections, put {0} into net.ipv4.ip_local_reserved_ports",
            address.port()
        ),
        io::ErrorKind::AddrNotAvailable => {
            "it is no address of this host (`ip address` lists them): choose one of those"
                .to_owned()
        }
        io::ErrorKind::PermissionDenied => "run as root or with CAP_NET_BIND_SERVICE, or choose a \
             port from net.ipv4.ip_unprivileged_port_start on"
            .to_owned(),
        _ => "choose another address".to_owned(),
    }
}

/// A socket of a listener's group, tagged before the first connection.
fn listen(
    address: SocketAddr,
    tcp: &TcpOptions,
    plane: Option<&Plane>,
    index: u32,
) -> Result<Socket, RunError> {
    let failed = || format!("{address} cannot be listened on");
    let socket = new_socket(address).with_context(failed)?;
    socket.set_reuse_port(true).with_context(failed)?;
    host::set_client_options(&socket, tcp).with_context(failed)?;
    socket.bind(&address.into()).with_context(failed)?;
    if let Some(plane) = plane {
        plane.tag_listener(socket.as_fd(), index)?;
    }
    socket.listen(BACKLOG).with_context(failed)?;
    Ok(socket)
}

fn new_socket(address: SocketAddr) -> io::Result<Socket> {
    let kind = Type::STREAM.nonblocking().cloexec();
    let socket = Socket::new(Domain::for_address(address), kind, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cure(address: &str) -> String {
        let address = address.parse().expect("an address");
        probe_bind(address).expect_err("bound").to_string()
    }

    #[test]
    fn an_address_that_cannot_be_had_is_refused_with_its_own_cure() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
        let address = taken.local_addr().expect("bound").to_string();
        let port = address.replace("127.0.0.1", "sport = ");
        let error = cure(&address);
        assert!(error.contains(&port), "{error}");
        // TEST-NET-1 of RFC 5737: nobody's.
        let error = cure("192.0.2.1:6432");
        assert!(error.contains("no address of this host"), "{error}");
    }
}
