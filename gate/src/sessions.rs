//! What a worker tells the control plane of its sessions.
//!
//! Nobody keeps a table of sessions. Whoever wants one puts an [`Inquiry`] into
//! each worker's [`Inbox`] and wakes it; the worker looks through its
//! connections, a bounded part in each round of its loop, and sends what fits. That
//! never blocks the worker, and between inquiries it costs nothing.
#![forbid(unsafe_code)]

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;

use crate::proto::first_packet::Identity;
use crate::session::outcome::SessionState;

/// A client's address, in a third less than a [`SocketAddr`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    address: [u8; 16],
    port: u16,
}

impl Source {
    /// Of a connection without a client, or without an address.
    pub const NOWHERE: Self = Self {
        address: [0; 16],
        port: 0,
    };

    /// Its address; IPv4 as IPv4, however it came.
    #[must_use]
    pub fn ip(self) -> IpAddr {
        Ipv6Addr::from(self.address).to_canonical()
    }
}

impl From<SocketAddr> for Source {
    fn from(address: SocketAddr) -> Self {
        let ip = match address.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        Self {
            address: ip.octets(),
            port: address.port(),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        SocketAddr::new(self.ip(), self.port).fmt(out)
    }
}

/// The number of a session: short to type, and of one session only, until a
/// worker has had four billion more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SessionId(pub u64);

impl SessionId {
    /// The session that is `generation` of one of so many workers.
    #[must_use]
    pub const fn new(worker: usize, workers: usize, generation: u32) -> Self {
        Self(generation as u64 * workers as u64 + worker as u64)
    }

    /// Its worker and its generation there; none if there is no such session.
    #[must_use]
    pub fn place(self, workers: usize) -> Option<(usize, u32)> {
        let worker = self.0.checked_rem(workers as u64)?;
        let generation = u32::try_from(self.0 / workers as u64).ok()?;
        Some((worker as usize, generation))
    }
}

/// Which sessions are asked for: those that fit everything that is given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    /// Of this user.
    pub user: Option<Vec<u8>>,
    /// Of this database.
    pub database: Option<Vec<u8>>,
    /// In this state.
    pub state: Option<SessionState>,
    /// From this address.
    pub source: Option<IpAddr>,
}

impl Filter {
    /// Whether a session is asked for.
    #[must_use]
    pub fn fits(&self, who: Option<&Identity>, state: SessionState, source: Source) -> bool {
        let user = who.map(|who| &who.user);
        let database = who.and_then(|who| who.database.as_ref());
        self.state.is_none_or(|wanted| wanted == state)
            && self.source.is_none_or(|wanted| wanted == source.ip())
            && self.user.as_ref().is_none_or(|name| user == Some(name))
            && (self.database.as_ref()).is_none_or(|name| database == Some(name))
    }
}

/// A session as its worker knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its number.
    pub id: SessionId,
    /// Its user, once it has said.
    pub user: Option<Vec<u8>>,
    /// Its database, if it has one.
    pub database: Option<Vec<u8>>,
    /// Its client's address; none if it has no client, or one that is gone.
    pub source: Option<Source>,
    /// Its backend's place in the configuration and the address's place there,
    /// once it is to have one.
    pub backend: Option<(usize, usize)>,
    /// What it does.
    pub state: SessionState,
    /// Since accept.
    pub age: Duration,
    /// Since bytes last went either way.
    pub idle: Duration,
    /// Bytes passed on, by [`crate::stats::Direction`].
    pub bytes: [u64; 2],
}

/// What a worker sends.
#[derive(Debug)]
pub enum Answer {
    /// Some of its sessions.
    Sessions(Vec<Record>),
    /// This worker has sent all of its own.
    Done(usize),
}

/// A question to one worker.
#[derive(Debug)]
pub struct Inquiry {
    /// Which sessions are asked for.
    pub filter: Arc<Filter>,
    /// Where answers go.
    pub answers: UnboundedSender<Answer>,
}

/// Questions that wait for a worker.
#[derive(Debug, Default)]
pub struct Inbox(Mutex<Vec<Inquiry>>);

impl Inbox {
    /// Adds one. Those whose asker has gone make room: there are never more than
    /// requests that the control plane serves at once.
    pub fn put(&self, inquiry: Inquiry) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.retain(|one| !one.answers.is_closed());
        waiting.push(inquiry);
    }

    /// Takes all.
    #[must_use]
    pub fn take(&self) -> Vec<Inquiry> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(address: &str) -> Source {
        address.parse::<SocketAddr>().expect("an address").into()
    }

    #[test]
    fn a_source_shows_as_it_came() {
        for address in ["10.1.2.3:5000", "[2001:db8::7]:65535"] {
            assert_eq!(source(address).to_string(), address);
        }
        assert_eq!(source("[::ffff:10.1.2.3]:5").to_string(), "10.1.2.3:5");
        assert_eq!(source("[::ffff:10.1.2.3]:5"), source("10.1.2.3:5"));
        assert_eq!(size_of::<Source>(), 18);
    }

    #[test]
    fn a_number_leads_back_to_its_worker() {
        let mut seen = std::collections::BTreeSet::new();
        for workers in [1, 3, 256] {
            seen.clear();
            for worker in 0..workers {
                for generation in [0, 1, 2, 77, u32::MAX] {
                    let id = SessionId::new(worker, workers, generation);
                    assert_eq!(id.place(workers), Some((worker, generation)));
                    assert!(seen.insert(id.0), "{id:?} twice");
                    // JSON numbers are exact up to here.
                    assert!(id.0 < 1 << 53);
                }
            }
        }
        assert_eq!(SessionId(u64::MAX).place(2), None);
        assert_eq!(SessionId(7).place(0), None);
    }

    #[test]
    fn a_filter_fits_all_that_it_names() {
        let app = Identity {
            user: b"app".to_vec(),
            database: Some(b"prod".to_vec()),
        };
        let walsender = Identity {
            user: b"app".to_vec(),
            database: None,
        };
        let from = source("10.0.0.1:1");
        let fits =
            |filter: &Filter, who: Option<&Identity>| filter.fits(who, SessionState::Active, from);
        assert!(fits(&Filter::default(), None));
        let user = Filter {
            user: Some(b"app".to_vec()),
            ..Filter::default()
        };
        assert!(fits(&user, Some(&app)) && fits(&user, Some(&walsender)));
        assert!(!fits(&user, None));
        let mut filter = Filter {
            database: Some(b"prod".to_vec()),
            state: Some(SessionState::Active),
            source: Some("10.0.0.1".parse().expect("an address")),
            ..user
        };
        assert!(fits(&filter, Some(&app)) && !fits(&filter, Some(&walsender)));
        filter.state = Some(SessionState::Login);
        assert!(!fits(&filter, Some(&app)));
        filter.state = None;
        filter.source = Some("10.0.0.2".parse().expect("an address"));
        assert!(!fits(&filter, Some(&app)));
    }

    #[test]
    fn an_inbox_does_not_fill_up_with_askers_that_have_gone() {
        let inbox = Inbox::default();
        let mut askers = Vec::new();
        for _ in 0..100 {
            let (answers, heard) = tokio::sync::mpsc::unbounded_channel();
            inbox.put(Inquiry {
                filter: Arc::default(),
                answers,
            });
            askers = vec![heard];
        }
        assert!(inbox.take().len() <= 2);
        assert!(inbox.take().is_empty());
        drop(askers);
    }
}
