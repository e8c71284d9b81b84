//! Many clients at once.

use std::net::SocketAddr;
use std::sync::Barrier;
use std::thread;

use anyhow::{Context, Result, bail};

use crate::gate::Gate;
use crate::session::{OpenError, Session};
use crate::wire::{self, ErrorResponse, Wire};

/// Threads that a storm comes from.
const THREADS: usize = 16;

/// How each login of a storm ended.
#[derive(Debug, Default)]
pub struct Storm {
    /// Those let in, still open.
    pub sessions: Vec<Session>,
    /// Those that were not.
    pub failures: Vec<OpenError>,
}

impl Storm {
    /// Fails unless every client that was not let in got this SQLSTATE.
    ///
    /// # Errors
    /// The first client that saw something else.
    pub fn expect_refusals(&self, code: &str) -> Result<()> {
        match self.failures.iter().find(|failure| failure.code() != code) {
            Some(other) => bail!("a client saw {other} instead of {code}"),
            None => Ok(()),
        }
    }
}

/// Connects `count` clients, then sends all startup packets at once and waits
/// for every answer. Nobody leaves before all were answered.
#[must_use]
pub fn storm(address: SocketAddr, count: usize, user: &str, database: &str) -> Storm {
    let barrier = Barrier::new(THREADS);
    let mut all = Storm::default();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|index| {
                let share = count / THREADS + usize::from(index < count % THREADS);
                let barrier = &barrier;
                scope.spawn(move || {
                    one_thread(address, share, &wire::login(user, database), barrier)
                })
            })
            .collect();
        for thread in threads {
            for answer in thread.join().unwrap_or_default() {
                match answer {
                    Ok(session) => all.sessions.push(session),
                    Err(failure) => all.failures.push(failure),
                }
            }
        }
    });
    all
}

impl Gate {
    /// Opens sessions one after the other; all must be let in.
    ///
    /// # Errors
    /// When one is not.
    pub fn open_all(&self, count: usize, user: &str, database: &str) -> Result<Vec<Session>> {
        (0..count)
            .map(|number| {
                self.open(user, database)
                    .with_context(|| format!("session {number} of {user}@{database}"))
            })
            .collect()
    }

    /// A login that must be refused with an ErrorResponse, then closed.
    ///
    /// # Errors
    /// When it is let in or ends in another way.
    pub fn refused(&self, user: &str, database: &str) -> Result<ErrorResponse> {
        match self.open(user, database) {
            Err(OpenError::Refused(error)) => Ok(error),
            Err(other) => bail!("{user}@{database} was not refused but saw {other}"),
            Ok(_) => bail!("{user}@{database} was let in"),
        }
    }
}

/// Connections that never say a word.
///
/// # Errors
/// When one cannot be made.
pub fn silent(address: SocketAddr, count: usize) -> Result<Vec<Wire>> {
    (0..count)
        .map(|number| Wire::connect(address).with_context(|| format!("silent connection {number}")))
        .collect()
}

fn one_thread(
    address: SocketAddr,
    share: usize,
    packet: &[u8],
    barrier: &Barrier,
) -> Vec<Result<Session, OpenError>> {
    let connected: Vec<_> = (0..share).map(|_| Wire::connect(address)).collect();
    barrier.wait();
    let sent: Vec<_> = connected
        .into_iter()
        .map(|wire| {
            let mut wire = wire?;
            wire.send(packet)?;
            Ok::<_, std::io::Error>(wire)
        })
        .collect();
    sent.into_iter()
        .map(|wire| Session::finish(wire?))
        .collect()
}
