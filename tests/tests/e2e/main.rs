//! End to end: the real gate in front of a real PostgreSQL.

use gate_tests::suite::Suite;

mod backends;
mod bulk;
mod crowds;
mod deadlines;
mod descriptors;
mod drivers;
mod halfclose;
mod harness;
mod life;
mod limits;
mod login;
mod machine;
mod pending;
mod race;
mod reading;
mod refusal;
mod relay;
mod sessions;
mod spread;
mod startup;
mod statistics;
mod upgrade;
mod wait;

fn main() {
    let mut suite = Suite::default();
    harness::register(&mut suite);
    limits::register(&mut suite);
    statistics::register(&mut suite);
    refusal::register(&mut suite);
    drivers::register(&mut suite);
    reading::register(&mut suite);
    startup::register(&mut suite);
    login::register(&mut suite);
    relay::register(&mut suite);
    halfclose::register(&mut suite);
    bulk::register(&mut suite);
    backends::register(&mut suite);
    pending::register(&mut suite);
    deadlines::register(&mut suite);
    wait::register(&mut suite);
    race::register(&mut suite);
    spread::register(&mut suite);
    life::register(&mut suite);
    sessions::register(&mut suite);
    crowds::register(&mut suite);
    descriptors::register(&mut suite);
    upgrade::register(&mut suite);
    machine::register(&mut suite);
    suite.run();
}
