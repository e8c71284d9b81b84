//! The pure hot functions, one at a time, for a counter of instructions:
//! `cargo xtask bench instructions` runs each under valgrind's callgrind, which
//! counts inside of [`hot_measured`] alone.
//!
//! `--list` prints the names with the calls that are counted; a name runs that
//! one; without a name each runs once.

mod common;
mod login;
mod rules;
mod waiting;

use std::process::ExitCode;

/// A call with its input prepared. What it does is counted, not its making.
type Call = Box<dyn FnMut()>;

/// One line of the table.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    /// Makes the input.
    prepare: fn() -> Call,
}

/// How many calls are counted: enough for what happens in few of them only,
/// such as the growth of a table.
const CALLS: u32 = 100;

/// The function inside of which is counted.
#[inline(never)]
fn hot_measured(call: &mut dyn FnMut(), calls: u32) {
    for _ in 0..calls {
        call();
    }
}

fn run(case: &Case, calls: u32) {
    let mut call = (case.prepare)();
    // The first call of a program resolves symbols and warms the allocator.
    call();
    hot_measured(&mut *call, calls);
}

fn main() -> ExitCode {
    let cases = [login::CASES, rules::CASES, waiting::CASES].concat();
    // cargo bench adds an argument of its own.
    let wanted = std::env::args().skip(1).find(|word| word != "--bench");
    match wanted.as_deref() {
        Some("--list") => {
            for case in &cases {
                println!("{}\t{CALLS}", case.name);
            }
        }
        Some(name) => {
            let Some(case) = cases.iter().find(|case| case.name == name) else {
                eprintln!("no function {name}: see --list");
                return ExitCode::from(2);
            };
            run(case, CALLS);
        }
        None => {
            for case in &cases {
                run(case, 1);
                println!("{}", case.name);
            }
            eprintln!("`cargo xtask bench instructions` counts what these cost");
        }
    }
    ExitCode::SUCCESS
}
