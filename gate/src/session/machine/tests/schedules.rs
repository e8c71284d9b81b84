//! The session machine against random schedules.

use super::*;

/// xorshift64: a schedule is its seed.
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// A client's script: what it will send, in pieces.
fn script(random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..random.below(3) {
        bytes.extend_from_slice(SSL_REQUEST);
    }
    match random.below(8) {
        0 => bytes.extend_from_slice(&cancel_packet()),
        1 => bytes.extend_from_slice(b"GET / HTTP/1.1\r\n"),
        2 => bytes.extend_from_slice(&startup_packet()[..20]),
        _ => bytes.extend_from_slice(&startup_packet()),
    }
    bytes
}

fn random_step(driver: &mut Driver, random: &mut Random, rest: &mut Vec<u8>) {
    let ledger = match random.below(4) {
        0 => Err(Reason::User),
        _ => Ok(()),
    };
    let login = login_bytes();
    let reads_client = driver.session.is_pending();
    let dialling = driver.dialled && !driver.connected && !driver.client_told;
    let backend_alive = driver.relaying && !driver.backend_closed;
    match random.below(12) {
        0..=4 if reads_client && !rest.is_empty() => {
            let count = 1 + random.below(rest.len() as u64) as usize;
            let piece: Vec<u8> = rest.drain(..count).collect();
            driver.feed(Input::ClientData(&piece), ledger);
        }
        5 => driver.feed(Input::ClientEnded, ledger),
        6 => driver.feed(Input::ClientLost, ledger),
        7 if driver.armed => driver.feed(Input::DeadlinePassed, ledger),
        8 if dialling => driver.feed(Input::ConnectFailed(ConnectFailure::Refused), ledger),
        9 if backend_alive => driver.feed(Input::BackendLost, ledger),
        10 if backend_alive => driver.feed(Input::BackendEnded, ledger),
        11 if driver.session.is_pending() => driver.feed(Input::Evict, ledger),
        _ if driver.waiting && random.below(20) == 0 => driver.session.doom(Reason::Draining),
        _ if driver.waiting => driver.feed(Input::Turn, ledger),
        _ if dialling => driver.feed(Input::Connected, ledger),
        _ if backend_alive && driver.session.watches_backend() => {
            let count = 1 + random.below(login.len() as u64) as usize;
            driver.feed(Input::BackendData(&login[..count]), ledger);
        }
        _ => {}
    }
}

#[test]
fn random_schedules_hold_every_invariant_and_come_to_an_end() {
    for seed in 1..=50_000 {
        let mut random = Random::new(seed);
        let doomed = (random.below(6) == 0).then_some(Reason::OverCeiling);
        let mut driver = Driver::new(doomed);
        driver.waits = random.below(2) == 0;
        let mut rest = script(&mut random);
        for _ in 0..random.below(40) {
            random_step(&mut driver, &mut random, &mut rest);
        }
        // Whatever came before, deadlines and the backend's end finish it.
        for _ in 0..4 {
            if driver.armed {
                driver.feed(Input::DeadlinePassed, Ok(()));
            } else if !driver.closed {
                driver.feed(Input::BackendEnded, Ok(()));
            }
        }
        assert!(
            driver.closed,
            "seed {seed} never ends: {:?}",
            driver.actions
        );
    }
}

#[test]
fn a7_all_ends_at_once_close_exactly_once() {
    let ends = [
        Input::ClientEnded,
        Input::ClientLost,
        Input::BackendEnded,
        Input::BackendLost,
        Input::DeadlinePassed,
        Input::Stop,
    ];
    for seed in 1..=10_000_u64 {
        let mut random = Random::new(seed);
        let mut driver = established();
        let mut order: Vec<_> = ends.to_vec();
        for index in (1..order.len()).rev() {
            order.swap(index, random.below(index as u64 + 1) as usize);
        }
        for input in order {
            // The worker does not report what it was told to close.
            let backend = matches!(input, Input::BackendEnded | Input::BackendLost);
            if !(backend && driver.backend_closed) {
                driver.feed(input, Ok(()));
            }
        }
        let closes = driver.actions.iter();
        let closes = closes.filter(|action| matches!(action, Action::Close { .. }));
        assert_eq!(closes.count(), 1, "seed {seed}");
    }
}
