//! End to end: the real gate in front of a real PostgreSQL.

use gate_tests::suite::Suite;

mod harness;

fn main() {
    let mut suite = Suite::default();
    harness::register(&mut suite);
    suite.run();
}
