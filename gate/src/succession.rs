//! What a gate takes over at its start, and leaves to the next one at its end.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::config::Config;
use crate::control::{self, Handle, Sockets};
use crate::host::{InstanceLock, InstanceLockError, PinsLock, SocketFile, mail};
use crate::kernel::Plane;
use crate::listeners::Listeners;
use crate::server::{RunError, Start};
use crate::state::State;
use crate::takeover::{self, Estate, Heir, Item, Owner, Predecessor, TakeoverError};

/// For the workers to close their listening sockets. One that takes longer
/// accepts a little longer, which loses nobody.
const CLOSE_PATIENCE: Duration = Duration::from_secs(5);

/// Takes the instance's name: from the running gate, or free.
pub fn succeed(
    config: &Config,
    start: Start,
) -> Result<(InstanceLock, Option<Predecessor>), RunError> {
    let path = takeover::path(&config.control, &config.instance);
    let predecessor = match start {
        Start::Fresh => None,
        Start::TakeOver => takeover::ask(&path)?,
    };
    if let Some(mut predecessor) = predecessor {
        tracing::info!(
            pid = predecessor.pid,
            version = predecessor.version,
            "taking over"
        );
        let lock = predecessor.take(&Item::InstanceLock);
        let lock = lock.context("the running gate did not pass its lock")?;
        return Ok((InstanceLock::inherit(lock), Some(predecessor)));
    }
    let directory = config.control.parent().unwrap_or(Path::new("/"));
    match InstanceLock::take(directory, &config.instance) {
        Err(InstanceLockError::Held { holder, .. }) if start == Start::TakeOver => {
            let holder = holder.unwrap_or_else(|| "unknown".to_owned());
            Err(TakeoverError::Unaware { holder, path }.into())
        }
        lock => {
            if start == Start::TakeOver {
                tracing::info!("no gate runs as this instance: nothing to take over");
            }
            Ok((lock?, None))
        }
    }
}

/// The lock of the pins: the predecessor's, or free.
pub fn lock_pins(
    plane: &Plane,
    predecessor: Option<&mut Predecessor>,
) -> Result<PinsLock, RunError> {
    match predecessor.and_then(|has| has.take(&Item::PinsLock)) {
        Some(lock) => Ok(PinsLock::inherit(lock)),
        None => Ok(PinsLock::take(plane.maps().directory())?),
    }
}

/// The control plane's sockets, and whether its predecessor's control socket is
/// among them.
pub fn control_sockets(
    config: &Config,
    predecessor: Option<&mut Predecessor>,
) -> Result<(Sockets, bool), RunError> {
    let Some(has) = predecessor else {
        return Ok((Sockets::bind(config, None, None)?, false));
    };
    let admin = config
        .admin
        .and_then(|address| has.take(&Item::Admin { address }));
    let path = config.control.clone();
    let control = has.take(&Item::Control { path });
    let keeps_control = control.is_some();
    let sockets = Sockets::bind(config, admin.map(Into::into), control.map(Into::into))?;
    Ok((sockets, keeps_control))
}

/// What is left to the next gate.
pub struct Testament {
    /// Second descriptors of all sockets.
    pub estate: Estate,
    /// The place where the next gate asks, if there is one.
    socket: Option<OwnedFd>,
    file: Option<SocketFile>,
}

impl Testament {
    /// Collects descriptors. They count as held by gate, not by sessions: make it
    /// before the budget is drawn up.
    pub fn new(
        config: &Config,
        listeners: &Listeners,
        sockets: &Sockets,
        predecessor: Option<&mut Predecessor>,
    ) -> Result<Self, RunError> {
        let inherited = predecessor.and_then(|has| has.take(&Item::Takeover));
        let path = takeover::path(&config.control, &config.instance);
        let (socket, file) = match open(&path, inherited) {
            Ok((socket, file)) => (Some(socket), Some(file)),
            Err(error) => {
                tracing::warn!(
                    path = %path.display(),
                    %error,
                    "the takeover socket cannot be made: no other gate can take over from this one"
                );
                (None, None)
            }
        };
        let collect = || -> std::io::Result<_> {
            let mut items = listeners.clone_all(config)?;
            if let (Some(admin), Some(address)) = (sockets.clone_admin()?, config.admin) {
                items.push((Item::Admin { address }, admin));
            }
            let path = config.control.clone();
            items.push((Item::Control { path }, sockets.clone_control()?));
            if let Some(socket) = &socket {
                items.push((Item::Takeover, socket.try_clone()?));
            }
            Ok(items)
        };
        let items = collect().context("no descriptor is left for those to be handed over")?;
        Ok(Self {
            estate: Estate {
                items,
                kernel: false,
            },
            socket,
            file,
        })
    }

    /// Signs the locks, which are this gate's own now, and waits for a
    /// successor from here on. The estate lives until then.
    pub fn deposit(&mut self, lock: InstanceLock, pins: Option<PinsLock>, owner: impl Owner) {
        if let Err(error) = lock.sign() {
            tracing::warn!(%error, "the lock file names another process");
        }
        if let Some(file) = &mut self.file {
            file.own();
        }
        let mut estate = std::mem::take(&mut self.estate);
        estate.items.push((Item::InstanceLock, lock.into()));
        estate
            .items
            .extend(pins.map(|lock| (Item::PinsLock, lock.into())));
        let waits = match self.socket.take() {
            Some(socket) => takeover::serve(socket, estate, owner),
            None => {
                self.estate = estate;
                return;
            }
        };
        if let Err(error) = waits {
            tracing::warn!(%error, "no other gate can take over from this one");
        }
    }

    /// Removes the takeover socket's file, unless another gate has it.
    pub fn close(self, has_left: bool) {
        if let Some(mut file) = self.file
            && has_left
        {
            file.keep();
        }
    }
}

/// A file whose socket was inherited stays until this gate is the one in charge.
fn open(path: &Path, inherited: Option<OwnedFd>) -> std::io::Result<(OwnedFd, SocketFile)> {
    if let Some(socket) = inherited {
        let mut file = SocketFile::of(path)?;
        file.keep();
        return Ok((socket, file));
    }
    if !SocketFile::remove_stale(path, mail::Mailbox::connect)? {
        return Err(std::io::ErrorKind::AddrInUse.into());
    }
    let socket = mail::listen_at(path)?;
    let file = SocketFile::of(path)?;
    Ok((socket, file))
}

/// The gate that runs.
pub struct Running(pub Arc<State>, pub Handle);

impl Owner for Running {
    fn leave(&self, heir: Heir) {
        // While this one is still the main process, whose word systemd takes.
        control::notify_systemd(sd_notify::NotifyState::MainPid(heir.pid));
        self.1.leave(heir.keeps_control);
        self.0.leave();
        let asked = Instant::now();
        while self.0.accepting() > 0 && asked.elapsed() < CLOSE_PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn stay(&self) {
        // The other one may have written the limits of its configuration.
        let ledger = &self.0.ledger;
        if let Err(error) = ledger.apply_config(&self.0.config()) {
            tracing::error!(%error, "the limits of the configuration are not in force again");
        }
        ledger.set_fd_cap(self.0.session_fds_max);
    }
}
