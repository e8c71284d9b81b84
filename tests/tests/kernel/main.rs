//! The kernel tier: gate's programs on this machine's kernel. Needs root.
//!
//! Each test is a process of its own in a jail (`gate_tests::kernel::jail`);
//! the hidden first argument says which test, or which part of one, to play.

mod ceiling;
mod counting;
mod nic;
mod plane;
mod record;
mod ring;
mod slots;
mod stall;
mod steer;
mod vanish;
mod victim;

use std::process::ExitCode;

use anyhow::Result;
use gate_tests::kernel::jail;
use libtest_mimic::{Arguments, Failed, Trial};

/// A named test.
type Test = (&'static str, fn() -> Result<()>);

const JAILED: &str = "--jailed";

fn tests() -> Vec<Test> {
    [
        plane::TESTS,
        counting::TESTS,
        slots::TESTS,
        ring::TESTS,
        ceiling::TESTS,
        steer::TESTS,
        nic::TESTS,
        record::TESTS,
        vanish::TESTS,
        stall::TESTS,
    ]
    .concat()
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, flag, name] = &arguments[..]
        && flag == JAILED
    {
        return jailed(name);
    }
    if let [_, flag, instance, listener, count] = &arguments[..]
        && flag == victim::FLAG
    {
        return ended(victim::play(instance, listener, count));
    }
    let missing = jail::missing_rights();
    if let Some(reason) = &missing {
        eprintln!("kernel tier: {reason}");
    }
    // In CI nothing may be skipped: what lacks its rights fails.
    let skip = missing.is_some() && std::env::var_os("CI").is_none();
    let trials = tests()
        .into_iter()
        .map(|(name, _)| {
            Trial::test(name, move || {
                jail::run(&[JAILED, name]).map_err(|error| Failed::from(format!("{error:#}")))
            })
            .with_ignored_flag(skip)
        })
        .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn jailed(name: &str) -> ExitCode {
    ended(
        match tests().into_iter().find(|(found, _)| *found == name) {
            Some((_, test)) => jail::enter().and_then(|_| test()),
            None => Err(anyhow::anyhow!("no test of this name")),
        },
    )
}

fn ended(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
