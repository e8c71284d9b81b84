//! Which figures are to be what.

use Bound::{AtLeast, AtMost, Reported};
use Named::{Begins, Is};

/// A line of the table.
pub struct Line {
    pub scenario: &'static str,
    pub point: Named,
    /// The key of a measure.
    pub key: &'static str,
    /// Whose figure, as a ratio to whose.
    pub way: &'static str,
    pub to: Option<&'static str>,
    pub bound: Bound,
    /// What would be better still.
    pub stretch: Option<f64>,
}

/// Which point of a scenario. Of several the last one, which is the largest.
#[derive(Clone, Copy)]
pub enum Named {
    /// The one of this name.
    Is(&'static str),
    /// Those whose names begin so.
    Begins(&'static str),
}

/// What a figure is to be.
#[derive(Clone, Copy)]
pub enum Bound {
    /// Less is better.
    AtMost(f64),
    /// More is better.
    AtLeast(f64),
    /// No goal: the figure is of use beside the others.
    Reported,
}

const fn line(
    scenario: &'static str,
    point: Named,
    key: &'static str,
    ways: (&'static str, Option<&'static str>),
    bound: Bound,
) -> Line {
    Line {
        scenario,
        point,
        key,
        way: ways.0,
        to: ways.1,
        bound,
        stretch: None,
    }
}

impl Line {
    const fn stretch(mut self, to: f64) -> Self {
        self.stretch = Some(to);
        self
    }
}

const TO_HAPROXY: (&str, Option<&str>) = ("gate", Some("haproxy"));
const TO_PGBOUNCER: (&str, Option<&str>) = ("gate", Some("pgbouncer"));
const UNIX_TO_TCP: (&str, Option<&str>) = ("gate-unix", Some("gate"));
const UNIX_TO_HAPROXY: (&str, Option<&str>) = ("gate-unix", Some("haproxy-unix"));
const UNIX_TO_PGBOUNCER: (&str, Option<&str>) = ("gate-unix", Some("pgbouncer-unix"));
const TO_DIRECT: (&str, Option<&str>) = ("gate", Some("direct"));
const ALONE: (&str, Option<&str>) = ("gate", None);

/// All of them, in the order in which they are printed.
pub const LINES: &[Line] = &[
    line(
        "relay",
        Is("64 B x 16"),
        "proxy_cpu",
        TO_HAPROXY,
        AtMost(0.85),
    )
    .stretch(0.75),
    line(
        "relay",
        Is("64 B x 256"),
        "proxy_cpu",
        TO_HAPROXY,
        AtMost(0.85),
    )
    .stretch(0.75),
    line(
        "relay",
        Begins("64 B x 16 at "),
        "p99",
        TO_HAPROXY,
        AtMost(1.0),
    ),
    line(
        "relay",
        Begins("64 B x 256 at "),
        "p99",
        TO_HAPROXY,
        AtMost(1.0),
    ),
    line(
        "relay",
        Is("64 B x 16"),
        "proxy_cpu",
        UNIX_TO_HAPROXY,
        Reported,
    ),
    line(
        "mixed",
        Is("pgbench -S"),
        "proxy_cpu",
        TO_HAPROXY,
        AtMost(0.85),
    )
    .stretch(0.75),
    line(
        "mixed",
        Is("pgbench -S"),
        "proxy_cpu",
        TO_PGBOUNCER,
        AtMost(0.85),
    )
    .stretch(0.75),
    line("mixed", Is("pgbench -S"), "rate", TO_HAPROXY, AtLeast(1.05)),
    line(
        "mixed",
        Is("pgbench -S"),
        "rate",
        TO_PGBOUNCER,
        AtLeast(1.05),
    ),
    line(
        "mixed",
        Is("pgbench -S"),
        "proxy_cpu",
        UNIX_TO_TCP,
        AtMost(1.0),
    ),
    line("mixed", Is("pgbench -S"), "rate", UNIX_TO_TCP, AtLeast(1.0)),
    line(
        "mixed",
        Is("pgbench -S"),
        "proxy_cpu",
        UNIX_TO_HAPROXY,
        Reported,
    ),
    line(
        "mixed",
        Is("pgbench -S"),
        "proxy_cpu",
        UNIX_TO_PGBOUNCER,
        Reported,
    ),
    line("mixed", Is("pgbench -S"), "rate", UNIX_TO_HAPROXY, Reported),
    line(
        "mixed",
        Is("pgbench -S"),
        "rate",
        UNIX_TO_PGBOUNCER,
        Reported,
    ),
    line("bulk", Is("1 down"), "proxy_cpu", TO_HAPROXY, AtMost(0.3)),
    line("bulk", Is("1 up"), "proxy_cpu", TO_HAPROXY, AtMost(0.3)),
    line("bulk", Is("8 down"), "proxy_cpu", TO_HAPROXY, AtMost(0.3)),
    line("bulk", Is("8 up"), "proxy_cpu", TO_HAPROXY, AtMost(0.3)),
    line(
        "storm",
        Is("polite, 64 clients"),
        "proxy_cpu",
        TO_PGBOUNCER,
        AtMost(0.5),
    ),
    // The kernel plane's work at the handshake is done in the client's time.
    line(
        "storm",
        Is("polite, 64 clients"),
        "all_cpu",
        TO_PGBOUNCER,
        Reported,
    ),
    line(
        "mixed",
        Is("pgbench -S -C"),
        "rate",
        TO_DIRECT,
        AtLeast(0.9),
    ),
    line("idle", Begins(""), "user_kib", ALONE, AtMost(0.33)),
    line("stall", Begins(""), "p99_ratio", ALONE, AtMost(1.2)),
];

impl Named {
    /// Whether it is the point of this name.
    #[must_use]
    pub fn is(self, name: &str) -> bool {
        match self {
            Is(whole) => name == whole,
            Begins(with) => name.starts_with(with),
        }
    }
}

impl Bound {
    /// `at most 0.85`.
    #[must_use]
    pub fn words(self) -> Option<String> {
        match self {
            AtMost(bound) => Some(format!("at most {bound}")),
            AtLeast(bound) => Some(format!("at least {bound}")),
            Reported => None,
        }
    }

    /// The same with another number.
    #[must_use]
    pub fn of(self, bound: f64) -> Self {
        match self {
            AtMost(_) => AtMost(bound),
            AtLeast(_) => AtLeast(bound),
            Reported => Reported,
        }
    }

    /// Whether the goal is met.
    #[must_use]
    pub fn is_met_by(self, value: f64) -> bool {
        match self {
            AtMost(bound) => value <= bound,
            AtLeast(bound) => value >= bound,
            Reported => true,
        }
    }
}
