//! The bench: every scenario and every peer for a moment, and what must hold
//! however short it is. Nothing here is about speed.

use std::path::Path;
use std::process::ExitCode;

use gate_tests::suite::Suite;

mod bad_input;
mod burner;
mod comparison;
mod fake_gate;
mod flame;
mod goals;
mod harness;
mod host_settings;
mod instructions;
mod machine;
mod peers;
mod report;
mod runs;
mod scenarios;
mod svg;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let program = arguments.first().map(Path::new).and_then(Path::file_name);
    let program = program.and_then(|name| name.to_str()).unwrap_or_default();
    if let Some(kind) = program.strip_prefix(fake_gate::PREFIX) {
        return fake_gate::play(kind, &arguments);
    }
    if let [_, flag, seconds] = &arguments[..]
        && flag == burner::FLAG
    {
        return burner::play(seconds);
    }
    let mut suite = Suite::one_at_a_time();
    scenarios::register(&mut suite);
    bad_input::register(&mut suite);
    fake_gate::register(&mut suite);
    comparison::register(&mut suite);
    machine::register(&mut suite);
    host_settings::register(&mut suite);
    peers::register(&mut suite);
    flame::register(&mut suite);
    goals::register(&mut suite);
    instructions::register(&mut suite);
    suite.run()
}
