//! What kind of world a seed makes: limits, deadlines, sizes, faults.

use std::collections::BTreeMap;
use std::time::Duration;

use gate::config::{Config, WaitPolicy, Waits};
use gate_common::limit::Setting;

use super::control::Control;
use super::random::Random;

/// See the module.
#[derive(Debug)]
pub struct Plan {
    /// Workers of gate.
    pub workers: usize,
    /// Listening sockets; a worker may have several.
    pub queues: usize,
    /// Half of all clients come to the first of them.
    pub lopsided: bool,
    /// A round of a worker takes at most so long.
    pub work_max: Duration,
    /// A wake-up comes at most so much later.
    pub wake_late: Duration,
    /// Many clients want few slots.
    pub crowded: bool,
    /// Users of this world.
    pub users: usize,
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
    /// What the control plane does, and when.
    pub control: Vec<(Duration, Control)>,
    /// Names that the ledger has room for.
    pub names_max: u32,
    /// Completions for earlier owners of an index are thrown in.
    pub stale: bool,
    /// The ledger's answers come by the machine, as those of a kernel.
    pub asks: bool,
    /// Once in so many they come at once; else as completions.
    pub answered_one_in: usize,
    /// The kernel accepts one connection at a time only.
    pub one_accept: bool,
    /// What gate runs with.
    pub config: Config,
}

/// The longest that a client may wait for a slot in any world.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// Databases of this world; the last lives on the second backend, which has three addresses.
pub const DATABASES: usize = 3;

impl Plan {
    /// The plan of a seed.
    pub fn new(random: &mut Random) -> Self {
        let bulk = random.one_in(16);
        let scarce = random.one_in(5);
        let crowded = !bulk && random.one_in(3);
        let workers = random.pick(&[1, 2, 2, 3, 3]);
        Self {
            workers,
            queues: workers + usize::from(random.one_in(6)),
            lopsided: random.one_in(3),
            work_max: random.pick(&[100, 100, 2_000].map(Duration::from_micros)),
            wake_late: random.pick(&[0, 100, 2_000].map(Duration::from_micros)),
            crowded,
            users: if crowded { random.up_to(3) } else { 3 },
            clients: random.up_to(match (bulk, crowded) {
                (true, _) => 3,
                (_, true) => 20,
                (_, false) => 14,
            }),
            arrival: random.delay(Duration::from_secs(if crowded { 3 } else { 20 })),
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
            control: control(random),
            names_max: if random.one_in(8) {
                NAMES_SET + 1 + random.below(4) as u32
            } else {
                64
            },
            stale: random.one_in(4),
            asks: !random.one_in(4),
            answered_one_in: random.pick(&[1, 4]),
            one_accept: random.one_in(8),
            config: config(crowded, random),
        }
    }

    /// Within so long a worker has done what it was woken for.
    pub fn reaction(&self) -> Duration {
        self.late + self.wake_late + 2 * self.work_max + Duration::from_millis(1)
    }

    /// After so long without an event nothing can be waiting any more: whatever a
    /// deadline ends is an event, but for a dial of the next address.
    pub fn rest(&self) -> Duration {
        let times = &self.config.timeouts;
        let all = [
            times.startup,
            times.auth,
            times.cancel,
            times.idle,
            times.half_close,
            times.abandoned,
            WAIT_MAX,
        ];
        let longest = all.into_iter().max().unwrap_or_default();
        longest + 3 * times.connect + Duration::from_secs(5)
    }
}

fn control(random: &mut Random) -> Vec<(Duration, Control)> {
    let mut all = Vec::new();
    for (what, one_in, within, most) in [
        (Control::Stop, 4, 40, 1),
        (Control::Drain, 6, 20, 1),
        (Control::Leave, 6, 20, 1),
        (Control::Reload, 3, 10, 3),
        (Control::Set, 6, 10, 3),
        (Control::List, 3, 10, 4),
    ] {
        if random.one_in(one_in) {
            for _ in 0..random.up_to(most) {
                all.push((random.delay(Duration::from_secs(within)), what));
            }
        }
    }
    all
}

fn config(crowded: bool, random: &mut Random) -> Config {
    let text = "[backend.default]\naddress = \"127.0.0.1:2\"\n\
        [backend.other]\naddresses = [\"127.0.0.1:3\", \"127.0.0.1:4\", \"127.0.0.1:5\"]\n\
        [database.d2]\nbackend = \"other\"\n";
    let mut config = Config::from_toml(text).expect("a valid configuration");
    limits(&mut config, crowded, random);
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

/// Names that have a limit of their own in every configuration.
const NAMES_SET: u32 = 4;

/// Other limits; for the same names, as those have slots.
pub fn limits(config: &mut Config, crowded: bool, random: &mut Random) {
    let mut some = |one_in: usize, most: usize| {
        if random.one_in(one_in) {
            Setting::AtMost(random.up_to(most) as u64)
        } else {
            Setting::Unlimited
        }
    };
    let [total, few] = if crowded { [1, 2] } else { [3, 4] };
    config.limits.max_connections = some(total, if crowded { 4 } else { 8 });
    config.limits.max_pending = some(4, 4);
    config.limits.default_user = some(4, few);
    config.limits.default_database = some(4, few);
    config.limits.user = BTreeMap::from([(b"u0".to_vec(), some(2, few))]);
    config.limits.database = BTreeMap::from([(b"d0".to_vec(), some(2, few))]);
    for backend in &mut config.backends {
        backend.max_connections = some(4, 5);
    }
    config.limits.waits = Waits::default();
    if crowded || random.one_in(2) {
        let mut wait = || WaitPolicy {
            wait: random.delay(if crowded {
                WAIT_MAX
            } else {
                Duration::from_secs(4)
            }),
            max_waiting: random.below(if crowded { 20 } else { 6 }) as u32,
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
}
