//! Which addresses of each backend are up, shared by workers and the control
//! plane.
//!
//! Sessions that fail to connect and the checks of the control plane both write here;
//! a dial reads in which order to try the addresses. An address that is taken
//! for down is tried last, never left out: a wrong belief makes no outage.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::config::{ADDRESSES_MAX, Address, Backend};
use crate::session::outcome::ConnectFailure;

/// Failures in a row after which an address is down, where one is not enough.
const FAILURES_DOWN: u32 = 2;

/// The state of every address. Backends and addresses are known by their
/// places in the configuration that gate started with.
#[derive(Debug)]
pub struct Backends {
    backends: Vec<BackendState>,
    started: Instant,
}

#[derive(Debug)]
struct BackendState {
    name: String,
    addresses: Vec<AddressState>,
    /// Somebody looks at the addresses that are down.
    checked: bool,
}

#[derive(Debug)]
struct AddressState {
    address: Address,
    /// Milliseconds since the start, twice, plus one if it is up: state and
    /// time change in one step.
    since: AtomicU64,
    failures_in_a_row: AtomicU32,
    connected: AtomicU64,
    failed: AtomicU64,
}

/// The places of a backend's addresses in the order in which to try them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    places: [u8; ADDRESSES_MAX],
    next: u8,
    count: u8,
}

impl Order {
    fn push(&mut self, place: usize) {
        self.places[usize::from(self.count)] = place as u8;
        self.count += 1;
    }
}

impl Iterator for Order {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let place = *self.places[..usize::from(self.count)].get(usize::from(self.next))?;
        self.next += 1;
        Some(usize::from(place))
    }
}

/// One address as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressReport<'a> {
    /// Where.
    pub address: &'a Address,
    /// Whether it is taken for up.
    pub up: bool,
    /// For how long.
    pub lasted: Duration,
    /// Sessions and CancelRequests that were connected.
    pub connected: u64,
    /// Those that could not be.
    pub failed: u64,
}

impl Backends {
    /// Every address is taken for up.
    #[must_use]
    pub fn new(backends: &[Backend], now: Instant) -> Self {
        let address = |address: &Address| AddressState {
            address: address.clone(),
            since: AtomicU64::new(1),
            failures_in_a_row: AtomicU32::new(0),
            connected: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        };
        let backend = |backend: &Backend| BackendState {
            name: backend.name.clone(),
            addresses: backend
                .addresses
                .iter()
                .take(ADDRESSES_MAX)
                .map(address)
                .collect(),
            checked: !backend.check.is_zero(),
        };
        Self {
            backends: backends.iter().map(backend).collect(),
            started: now,
        }
    }

    /// The order in which a dial tries the addresses: those that are up, then
    /// those that are down, each in the order of the configuration. Without
    /// checks that of the configuration alone: nobody would see an address
    /// come back.
    #[must_use]
    pub fn order(&self, backend: usize) -> Order {
        let mut order = Order::default();
        let Some(backend) = self.backends.get(backend) else {
            return order;
        };
        let mut down = Order::default();
        for (place, address) in backend.addresses.iter().enumerate() {
            if address.is_up() || !backend.checked {
                order.push(place);
            } else {
                down.push(place);
            }
        }
        down.for_each(|place| order.push(place));
        order
    }

    /// A dial succeeded. That of a cancel says nothing of the address: it goes to
    /// those that are down too, and the kernel of a server that hangs accepts.
    pub fn connected(&self, backend: usize, address: usize, is_cancel: bool, now: Instant) {
        if let Some((backend, address)) = self.find(backend, address) {
            address.connected.fetch_add(1, Ordering::Relaxed);
            if !is_cancel {
                self.succeeded(backend, address, now);
            }
        }
    }

    /// A dial failed. The address is down at once if the backend has another,
    /// so that the next session goes there; else after two in a row.
    pub fn failed(&self, backend: usize, address: usize, failure: ConnectFailure, now: Instant) {
        let Some((backend, address)) = self.find(backend, address) else {
            return;
        };
        address.failed.fetch_add(1, Ordering::Relaxed);
        // This machine's want says nothing about the other.
        if failure != ConnectFailure::Host {
            let enough = if backend.addresses.len() > 1 {
                1
            } else {
                FAILURES_DOWN
            };
            self.failed_once(backend, address, enough, failure.label(), now);
        }
    }

    /// A check of the control plane ended; an error is the reason in a word
    /// or two.
    pub fn checked(&self, backend: usize, address: usize, result: Result<(), &str>, now: Instant) {
        if let Some((backend, address)) = self.find(backend, address) {
            match result {
                Ok(()) => self.succeeded(backend, address, now),
                Err(reason) => self.failed_once(backend, address, FAILURES_DOWN, reason, now),
            }
        }
    }

    /// Whether the next check of an address would tell anything: of several
    /// addresses always, of a single one while it is down.
    #[must_use]
    pub fn wants_check(&self, backend: usize, address: usize) -> bool {
        let found = self.find(backend, address);
        found.is_some_and(|(backend, address)| backend.addresses.len() > 1 || !address.is_up())
    }

    /// The addresses of a backend as they are now.
    pub fn report(
        &self,
        backend: usize,
        now: Instant,
    ) -> impl Iterator<Item = AddressReport<'_>> + use<'_> {
        let now_ms = self.millis(now);
        let addresses = self
            .backends
            .get(backend)
            .map_or(&[][..], |backend| &backend.addresses);
        addresses.iter().map(move |address| {
            let since = address.since.load(Ordering::Relaxed);
            AddressReport {
                address: &address.address,
                up: since & 1 == 1,
                lasted: Duration::from_millis(now_ms.saturating_sub(since >> 1)),
                connected: address.connected.load(Ordering::Relaxed),
                failed: address.failed.load(Ordering::Relaxed),
            }
        })
    }

    fn find(&self, backend: usize, address: usize) -> Option<(&BackendState, &AddressState)> {
        let backend = self.backends.get(backend)?;
        Some((backend, backend.addresses.get(address)?))
    }

    fn millis(&self, now: Instant) -> u64 {
        let elapsed = now.saturating_duration_since(self.started).as_millis();
        u64::try_from(elapsed).unwrap_or(u64::MAX >> 1)
    }

    fn succeeded(&self, backend: &BackendState, address: &AddressState, now: Instant) {
        // Read first: in good times nobody writes a word that all share.
        if address.failures_in_a_row.load(Ordering::Relaxed) != 0 {
            address.failures_in_a_row.store(0, Ordering::Relaxed);
        }
        if address.turn(true, self.millis(now)) {
            tracing::info!(backend = backend.name, address = %address.address, "backend address up");
        }
    }

    fn failed_once(
        &self,
        backend: &BackendState,
        address: &AddressState,
        enough: u32,
        reason: &str,
        now: Instant,
    ) {
        let before = address.failures_in_a_row.fetch_add(1, Ordering::Relaxed);
        if before.saturating_add(1) >= enough && address.turn(false, self.millis(now)) {
            tracing::warn!(
                backend = backend.name,
                address = %address.address,
                reason,
                "backend address down"
            );
        }
    }
}

impl AddressState {
    fn is_up(&self) -> bool {
        self.since.load(Ordering::Relaxed) & 1 == 1
    }

    /// Turns it up or down. Of several that do so at once one gets `true`.
    fn turn(&self, up: bool, now_ms: u64) -> bool {
        let seen = self.since.load(Ordering::Relaxed);
        let new = (now_ms << 1) | u64::from(up);
        // No data is published with the word: relaxed is enough.
        (seen & 1 == 1) != up
            && self
                .since
                .compare_exchange(seen, new, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    const SECOND: Duration = Duration::from_secs(1);

    fn backends(settings: &str, now: Instant) -> Backends {
        let config = Config::from_toml(&format!("[backend.default]\n{settings}")).expect("valid");
        Backends::new(&config.backends, now)
    }

    const THREE: &str = "addresses = [\"127.0.0.1:1\", \"127.0.0.1:2\", \"/x/.s.PGSQL.3\"]";

    fn order(backends: &Backends) -> Vec<usize> {
        backends.order(0).collect()
    }

    #[test]
    fn an_address_that_fails_is_tried_last_until_it_is_up() {
        let now = Instant::now();
        let backends = backends(THREE, now);
        assert_eq!(order(&backends), [0, 1, 2]);
        backends.failed(0, 0, ConnectFailure::Refused, now);
        assert_eq!(order(&backends), [1, 2, 0], "at once: there are others");
        backends.failed(0, 2, ConnectFailure::Timeout, now);
        assert_eq!(order(&backends), [1, 0, 2]);
        backends.failed(0, 1, ConnectFailure::Reset, now);
        assert_eq!(order(&backends), [0, 1, 2], "all down: as configured");
        backends.checked(0, 2, Ok(()), now);
        assert_eq!(order(&backends), [2, 0, 1]);
        backends.connected(0, 0, false, now);
        assert_eq!(order(&backends), [0, 2, 1]);
    }

    #[test]
    fn want_of_this_machine_is_no_fault_of_the_address() {
        let now = Instant::now();
        let backends = backends(THREE, now);
        backends.failed(0, 0, ConnectFailure::Host, now);
        assert_eq!(order(&backends), [0, 1, 2]);
    }

    #[test]
    fn a_check_must_fail_twice_in_a_row() {
        let now = Instant::now();
        let backends = backends(THREE, now);
        for _ in 0..3 {
            backends.checked(0, 0, Err("refused"), now);
            assert_eq!(order(&backends), [0, 1, 2]);
            backends.checked(0, 0, Ok(()), now);
        }
        backends.checked(0, 0, Err("refused"), now);
        backends.checked(0, 0, Err("refused"), now);
        assert_eq!(order(&backends), [1, 2, 0]);
        backends.checked(0, 0, Ok(()), now);
        assert_eq!(order(&backends), [0, 1, 2], "one success is enough");
    }

    #[test]
    fn a_single_address_is_checked_only_while_it_is_down() {
        let now = Instant::now();
        let backends = backends("address = \"127.0.0.1:1\"", now);
        backends.failed(0, 0, ConnectFailure::Refused, now);
        assert!(!backends.wants_check(0, 0), "it may be a moment's trouble");
        backends.failed(0, 0, ConnectFailure::Refused, now);
        assert!(backends.wants_check(0, 0));
        assert_eq!(order(&backends), [0], "there is no other");
        backends.connected(0, 0, false, now);
        assert!(!backends.wants_check(0, 0));
    }

    #[test]
    fn without_checks_the_order_is_that_of_the_configuration() {
        let now = Instant::now();
        let backends = backends(&format!("{THREE}\ncheck = \"0s\""), now);
        backends.failed(0, 0, ConnectFailure::Refused, now);
        assert_eq!(order(&backends), [0, 1, 2]);
        assert!(!backends.report(0, now).next().expect("three").up);
    }

    #[test]
    fn a_report_says_for_how_long_and_how_often() {
        let start = Instant::now();
        let backends = backends(THREE, start);
        backends.connected(0, 0, false, start + SECOND);
        backends.failed(0, 0, ConnectFailure::Refused, start + 3 * SECOND);
        // The second failure is no transition.
        backends.failed(0, 0, ConnectFailure::Refused, start + 4 * SECOND);
        let reports: Vec<_> = backends.report(0, start + 5 * SECOND).collect();
        let [down, up, _] = reports.as_slice() else {
            panic!("three addresses: {reports:?}");
        };
        assert_eq!((down.up, down.lasted), (false, 2 * SECOND));
        assert_eq!((down.connected, down.failed), (1, 2));
        assert_eq!((up.up, up.lasted), (true, 5 * SECOND));
        assert_eq!(up.address.to_string(), "127.0.0.1:2");
    }

    #[test]
    fn of_many_that_see_it_go_down_one_says_so() {
        let now = Instant::now();
        let backends = backends(THREE, now);
        let turned: usize = std::thread::scope(|scope| {
            let address = &backends.backends[0].addresses[0];
            let threads: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| usize::from(address.turn(false, 1))))
                .collect();
            let turned = threads.into_iter().map(|thread| thread.join());
            turned.map(|one| one.expect("no panic")).sum()
        });
        assert_eq!(turned, 1);
    }

    #[test]
    fn a_place_that_is_not_there_is_no_panic() {
        let now = Instant::now();
        let backends = backends(THREE, now);
        backends.failed(1, 0, ConnectFailure::Refused, now);
        backends.connected(0, 3, false, now);
        assert_eq!(backends.order(7).count(), 0);
        assert_eq!(backends.report(7, now).count(), 0);
    }
}
