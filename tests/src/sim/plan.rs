//! What kind of world a seed makes: limits, deadlines, sizes, faults.

use std::collections::BTreeMap;
use std::time::Duration;

use gate::config::{Config, WaitPolicy};
use gate_common::limit::Setting;

use super::random::Random;

/// See the module.
#[derive(Debug)]
pub struct Plan {
    /// Clients in all.
    pub clients: usize,
    /// They come within this time.
    pub arrival: Duration,
    /// Every socket buffer has at most so many bytes.
    pub buffer_max: usize,
    /// Bytes that a stream has at most.
    pub stream_max: usize,
    /// The network takes at most so long.
    pub latency: Duration,
    /// A completion comes at most so much later.
    pub late: Duration,
    /// A multishot ends once in so many completions; never with 0.
    pub ends_one_in: usize,
    /// Descriptors of the process beyond those that it has at rest.
    pub fds_max: usize,
    /// Descriptors that the budget of sessions has.
    pub session_fds_max: u64,
    /// A call on a socket fails for want of something once in so many; never with 0.
    pub fault_one_in: usize,
    /// From then on the first backend accepts nothing, and its backlog is full: a unix
    /// socket's dial is told so, and no poll tells when that changes.
    pub full_after: Option<Duration>,
    /// The control plane stops gate after so long.
    pub stop_after: Option<Duration>,
    /// It drains gate before that.
    pub drain_after: Option<Duration>,
    /// Completions for earlier owners of an index are thrown in.
    pub stale: bool,
    /// The ledger's answers come as completions, as those of a kernel.
    pub asks: bool,
    /// The kernel accepts one connection at a time only.
    pub one_accept: bool,
    /// What gate runs with.
    pub config: Config,
}

/// Users of this world.
pub const USERS: usize = 3;
/// Databases of this world; the last lives on the second backend, which has three addresses.
pub const DATABASES: usize = 3;

impl Plan {
    /// The plan of a seed.
    pub fn new(random: &mut Random) -> Self {
        let bulk = random.one_in(16);
        let scarce = random.one_in(5);
        Self {
            clients: random.up_to(if bulk { 3 } else { 14 }),
            arrival: random.delay(Duration::from_secs(20)),
            buffer_max: if bulk {
                600_000
            } else {
                random.pick(&[700, 3_000, 20_000])
            },
            stream_max: if bulk {
                900_000
            } else {
                random.pick(&[300, 5_000, 30_000])
            },
            latency: random.pick(&[100, 5_000, 300_000].map(Duration::from_micros)),
            late: random.pick(&[0, 0, 200, 20_000].map(Duration::from_micros)),
            ends_one_in: random.pick(&[0, 100, 4]),
            fds_max: if scarce { 4 + random.below(16) } else { 1000 },
            session_fds_max: if random.one_in(5) {
                2 + random.below(12) as u64
            } else {
                u64::MAX
            },
            fault_one_in: random.pick(&[0, 0, 200, 15]),
            full_after: random
                .one_in(12)
                .then(|| random.delay(Duration::from_secs(10))),
            stop_after: random
                .one_in(4)
                .then(|| random.delay(Duration::from_secs(40))),
            drain_after: random
                .one_in(6)
                .then(|| random.delay(Duration::from_secs(20))),
            stale: random.one_in(4),
            asks: random.one_in(2),
            one_accept: random.one_in(8),
            config: config(random),
        }
    }

    /// After so long without an event nothing can be waiting any more.
    pub fn rest(&self) -> Duration {
        let times = &self.config.timeouts;
        let all = [
            times.startup,
            times.connect,
            times.auth,
            times.cancel,
            times.idle,
            times.half_close,
            times.abandoned,
        ];
        all.into_iter().sum::<Duration>() + Duration::from_secs(5)
    }
}

fn config(random: &mut Random) -> Config {
    let text = "[backend.default]\naddress = \"127.0.0.1:2\"\n\
        [backend.other]\naddresses = [\"127.0.0.1:3\", \"127.0.0.1:4\", \"127.0.0.1:5\"]\n\
        [database.d2]\nbackend = \"other\"\n";
    let mut config = Config::from_toml(text).expect("a valid configuration");
    let mut some = |one_in: usize, most: usize| {
        if random.one_in(one_in) {
            Setting::AtMost(random.up_to(most) as u64)
        } else {
            Setting::Unlimited
        }
    };
    config.limits.max_connections = some(3, 8);
    config.limits.max_pending = some(4, 4);
    config.limits.default_user = some(4, 4);
    config.limits.default_database = some(4, 4);
    config.limits.user = BTreeMap::from([(b"u0".to_vec(), some(2, 3))]);
    config.limits.database = BTreeMap::from([(b"d0".to_vec(), some(2, 3))]);
    for backend in &mut config.backends {
        backend.max_connections = some(4, 5);
    }
    if random.one_in(2) {
        let mut wait = || WaitPolicy {
            wait: random.delay(Duration::from_secs(4)),
            max_waiting: random.below(6) as u32,
            promised: 0,
        };
        let waits = &mut config.limits.waits;
        waits.max_connections = wait();
        waits.default_user = wait();
        waits.default_database = wait();
        waits.user = BTreeMap::from([(b"u0".to_vec(), wait())]);
        waits.database = BTreeMap::from([(b"d0".to_vec(), wait())]);
        waits.backend = BTreeMap::from([(b"default".to_vec(), wait())]);
    }
    let seconds = |number| Duration::from_secs(number);
    config.timeouts.startup = random.pick(&[2, 15].map(seconds));
    config.timeouts.connect = random.pick(&[1, 5].map(seconds));
    config.timeouts.auth = random.pick(&[3, 60].map(seconds));
    config.timeouts.cancel = random.pick(&[1, 10].map(seconds));
    config.timeouts.idle = random.pick(&[0, 0, 0, 4].map(seconds));
    config.timeouts.half_close = random.pick(&[0, 0, 0, 1].map(seconds));
    config.timeouts.abandoned = random.pick(&[2, 60].map(seconds));
    config
}
