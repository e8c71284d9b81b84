//! Which limits are reached: watched, logged when that begins and ends, and
//! timed for the metrics.
//!
//! Refusals are counted one by one but never logged one by one: a storm would
//! be a storm of log lines. Here it is one line when a kind of limit is
//! reached, and one when it has been free for a while.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use gate_common::abi::slot;
use gate_common::limit::Limit;

use super::api;
use crate::config::name;
use crate::ledger::{Ledger, LimitKey};
use crate::session::outcome::Reason;
use crate::state::{KernelState, State};

/// How often the limits are looked at.
pub const PERIOD: Duration = Duration::from_millis(250);
/// How long a limit must be free before its limited state ends: a limit that
/// is reached again and again is one state, not many.
const CALM: Duration = Duration::from_secs(5);
/// How often every name is looked at.
const NAMES_PERIOD: Duration = Duration::from_secs(5);
/// The same while somebody is refused.
const NAMES_PERIOD_BUSY: Duration = Duration::from_secs(1);
/// Names that one log line and one status list.
const NAMES_SHOWN: usize = 5;

/// One kind of limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Scope {
    /// `max_connections`.
    MaxConnections,
    /// `max_pending`.
    MaxPending,
    /// Some user's.
    User,
    /// Some database's.
    Database,
    /// Some backend's.
    Backend,
    /// Some listener's ceiling.
    Ceiling,
}

impl Scope {
    /// All, in the order of their index.
    pub const ALL: [Self; 6] = [
        Self::MaxConnections,
        Self::MaxPending,
        Self::User,
        Self::Database,
        Self::Backend,
        Self::Ceiling,
    ];

    /// The word in logs and metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        self.reason().label()
    }

    /// What clients are refused for.
    const fn reason(self) -> Reason {
        match self {
            Self::MaxConnections => Reason::MaxConnections,
            Self::MaxPending => Reason::MaxPending,
            Self::User => Reason::User,
            Self::Database => Reason::Database,
            Self::Backend => Reason::Backend,
            Self::Ceiling => Reason::OverCeiling,
        }
    }
}

/// What is limited, as last watched. One writer: the control plane.
#[derive(Debug, Default)]
pub struct Limited {
    scopes: [ScopeState; Scope::ALL.len()],
}

#[derive(Debug, Default)]
struct ScopeState {
    limited: AtomicBool,
    limited_ms: AtomicU64,
}

impl Limited {
    /// Whether a kind of limit is reached.
    #[must_use]
    pub fn is_limited(&self, scope: Scope) -> bool {
        self.scopes[scope as usize].limited.load(Ordering::Relaxed)
    }

    /// How long it has been so in all.
    #[must_use]
    pub fn limited_for(&self, scope: Scope) -> Duration {
        Duration::from_millis(
            self.scopes[scope as usize]
                .limited_ms
                .load(Ordering::Relaxed),
        )
    }
}

/// Follows the limits over time.
#[derive(Debug, Default)]
pub struct Watch {
    scopes: [Seen; Scope::ALL.len()],
    reached: Reached,
    since_names: Duration,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    rejected: u64,
    /// Refusals when the limited state began.
    rejected_before: u64,
    calm: Duration,
}

impl Watch {
    /// Looks once, `elapsed` after the last time.
    pub fn look(&mut self, state: &State, limited: &Limited, elapsed: Duration) {
        let rejected = Scope::ALL.map(|scope| state.rejected(scope.reason()));
        self.since_names += elapsed;
        if self.since_names >= self.names_period(limited, &rejected)
            || self.begins(limited, &rejected)
        {
            self.since_names = Duration::ZERO;
            self.reached = names_reached(&state.ledger, state.kernel == KernelState::Active);
        }
        totals_reached(&state.ledger, &mut self.reached);
        for scope in Scope::ALL {
            let names = self.reached[scope as usize].take();
            self.step(
                scope,
                names.as_deref(),
                rejected[scope as usize],
                limited,
                elapsed,
            );
            self.reached[scope as usize] = names;
        }
    }

    /// Whether somebody is refused by a limit that was free so far: the line that
    /// says so is to name whose it is.
    fn begins(&self, limited: &Limited, rejected: &[u64; Scope::ALL.len()]) -> bool {
        Scope::ALL.into_iter().any(|scope| {
            !limited.is_limited(scope)
                && rejected[scope as usize] > self.scopes[scope as usize].rejected
        })
    }

    /// How often every name is looked at: seldom while nothing happens, for
    /// there can be thousands.
    fn names_period(&self, limited: &Limited, rejected: &[u64; Scope::ALL.len()]) -> Duration {
        let busy = Scope::ALL.into_iter().any(|scope| {
            limited.is_limited(scope)
                || rejected[scope as usize] > self.scopes[scope as usize].rejected
        });
        if busy {
            NAMES_PERIOD_BUSY
        } else {
            NAMES_PERIOD
        }
    }

    /// One scope: `names` is `Some` if its limit is reached now.
    fn step(
        &mut self,
        scope: Scope,
        names: Option<&[String]>,
        rejected: u64,
        limited: &Limited,
        elapsed: Duration,
    ) {
        let seen = &mut self.scopes[scope as usize];
        let shared = &limited.scopes[scope as usize];
        let was = shared.limited.load(Ordering::Relaxed);
        if was {
            let elapsed_ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
            shared.limited_ms.fetch_add(elapsed_ms, Ordering::Relaxed);
        }
        let now = names.is_some() || rejected > seen.rejected;
        let rejected_until_now = seen.rejected;
        seen.rejected = rejected;
        seen.calm = if now {
            Duration::ZERO
        } else {
            seen.calm + elapsed
        };
        if now && !was {
            seen.rejected_before = rejected_until_now;
            shared.limited.store(true, Ordering::Relaxed);
            let names = names.unwrap_or_default().join(", ");
            let names = (!names.is_empty()).then_some(names);
            tracing::warn!(scope = scope.label(), names, "limited");
        } else if was && seen.calm >= CALM {
            shared.limited.store(false, Ordering::Relaxed);
            let refused = rejected - seen.rejected_before;
            tracing::info!(scope = scope.label(), refused, "no longer limited");
        }
    }
}

/// What is limited at this moment, for the status.
#[must_use]
pub fn now(ledger: &Ledger, kernel_active: bool) -> Vec<api::Limited> {
    let mut reached = names_reached(ledger, kernel_active);
    totals_reached(ledger, &mut reached);
    let limited = Scope::ALL
        .into_iter()
        .zip(reached)
        .filter_map(|(scope, names)| {
            let scope = scope.label().to_owned();
            names.map(|names| api::Limited { scope, names })
        });
    limited.collect()
}

/// By scope: `None`, or the names at their limit; no names for a total.
type Reached = [Option<Vec<String>>; Scope::ALL.len()];

fn totals_reached(ledger: &Ledger, reached: &mut Reached) {
    let sessions = is_full(ledger.plain_limit(slot::TOTAL), ledger.admitted());
    let pending = is_full(ledger.max_pending(), ledger.pending());
    reached[Scope::MaxConnections as usize] = sessions.then(Vec::new);
    reached[Scope::MaxPending as usize] = pending.then(Vec::new);
}

fn names_reached(ledger: &Ledger, kernel_active: bool) -> Reached {
    let mut reached = Reached::default();
    // A table that cannot be read now will be at the next look.
    for row in ledger.limits().unwrap_or_default() {
        if !is_full(row.limit, row.used) {
            continue;
        }
        let (scope, name) = match &row.key {
            LimitKey::User(user) => (Scope::User, name::escape(user)),
            LimitKey::Database(database) => (Scope::Database, name::escape(database)),
            LimitKey::Backend(backend) => (Scope::Backend, name::escape(backend)),
            LimitKey::Listener(address) if kernel_active => (Scope::Ceiling, address.clone()),
            _ => continue,
        };
        let names = reached[scope as usize].get_or_insert_default();
        match names.len() {
            ..NAMES_SHOWN => names.push(name),
            NAMES_SHOWN => names.push("...".to_owned()),
            _ => {}
        }
    }
    reached
}

/// Whether the next one would be refused. A limit of nobody is not reached:
/// it is meant.
fn is_full(limit: Limit, used: u64) -> bool {
    limit != Limit::None && !limit.allows_one_more(used)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limited_state_begins_at_once_and_ends_after_a_calm() {
        let (mut watch, limited) = (Watch::default(), Limited::default());
        let mut step = |reached: bool, rejected: u64| {
            let names: Option<&[String]> = if reached { Some(&[]) } else { None };
            watch.step(
                Scope::User,
                names,
                rejected,
                &limited,
                Duration::from_secs(1),
            );
            limited.is_limited(Scope::User)
        };
        assert!(!step(false, 0));
        assert!(step(true, 0));
        for _ in 0..4 {
            assert!(step(false, 0), "not calm for long enough");
        }
        assert!(step(false, 1), "a refusal begins the calm anew");
        for _ in 0..4 {
            assert!(step(false, 1));
        }
        assert!(!step(false, 1));
        assert!(step(false, 2), "a refusal between two looks is seen");
        assert_eq!(limited.limited_for(Scope::User), Duration::from_secs(10));
        assert_eq!(limited.limited_for(Scope::Database), Duration::ZERO);
    }
}
