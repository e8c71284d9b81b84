//! `cargo xtask test`: every tier of tests, added up in one last line.

mod programs;
mod report;

use std::env;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;

use crate::{bpf, host, setup};
use programs::{TestProgram, Watched};
use report::{Outcome, Report};

/// The test programs of `tests/tests` that a tier runs; `cargo xtask check` knows no others.
pub const KNOWN_TEST_TARGETS: [&str; 3] = ["kernel", "e2e", "bench"];

/// The test programs of `tests/tests` that belong to the unit tier: they need no rights.
pub const UNIT_TEST_TARGETS: [&str; 1] = ["sim"];

/// What is built for tests, with one selection of packages and features: with another one, cargo
/// would compile shared dependencies again.
pub const PACKAGES: [&str; 5] = [
    "--workspace",
    "--exclude",
    "gate-ebpf",
    "--features",
    "xtask/builtin-backend",
];

/// No test program runs longer; one that does has hung.
const PROGRAM_TIME_MAX: Duration = Duration::from_secs(20 * 60);

#[derive(clap::Args)]
#[command(
    after_help = "Installs what the tests need (cargo xtask setup), then runs the tiers:\n\n  \
unit:   unit, property and documentation tests of all crates, 10,000 simulated worlds, the\n          \
model check of the token arithmetic (loom), and the reproducible build of the kernel object\n  \
kernel: the kernel programs on this machine's kernel; needs root\n  \
e2e:    gate in front of a real PostgreSQL, with psql, pgbench and tokio-postgres\n  \
bench:  the bench itself, with every scenario and peer, in moments (three and a half minutes);\n          \
says nothing of speed; needs root, HAProxy, PgBouncer, nginx, perf and valgrind\n\n\
What cannot run here is skipped by name. With CI=true a skipped test is a failure.\n\
The last line of the output is the sum: N passed, N failed, N skipped."
)]
pub struct Args {
    /// Run one tier only
    #[arg(long, value_enum)]
    tier: Option<Tier>,

    /// Install nothing
    #[arg(long)]
    skip_setup: bool,

    /// Run only tests whose name contains this text
    filter: Option<String>,
}

/// A tier: tests that need the same of the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Tier {
    Unit,
    Kernel,
    E2e,
    Bench,
}

/// Runs the task. Its last line on standard output is the sum, whatever happens before.
pub fn main(args: &Args) -> Result<ExitCode> {
    let root = host::root()?;
    let tiers = match args.tier {
        Some(tier) => vec![tier],
        None => vec![Tier::Unit, Tier::Kernel, Tier::E2e, Tier::Bench],
    };
    if !args.skip_setup {
        set_up(args.tier);
    }
    let mut sum = Report::default();
    match programs::build(&root) {
        Ok(programs) => {
            for tier in tiers {
                println!("\n== {tier:?} tests");
                let report = run_tier(tier, &root, &programs, args.filter.as_deref());
                println!("== {tier:?} tests: {report}");
                sum.add(report);
            }
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            sum.record("the tests do not build", Outcome::Failed);
        }
    }
    let ok = tell(&mut sum, host::in_ci());
    println!("{sum}");
    Ok(if ok {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// A machine that cannot be prepared runs what it can; the rest is skipped by name.
fn set_up(tier: Option<Tier>) {
    let what: &[setup::What] = match tier {
        None => &[setup::What::All],
        Some(Tier::Unit) => &[setup::What::Ebpf],
        Some(Tier::Kernel | Tier::E2e) => &[setup::What::Tests],
        Some(Tier::Bench) => &[setup::What::Tests, setup::What::Bench],
    };
    for what in what {
        if let Err(error) = setup::install(*what) {
            eprintln!("setup: {error:#}\nsetup: going on with what is there");
        }
    }
}

/// Names what failed and what was skipped. In CI a skipped test counts as failed.
fn tell(sum: &mut Report, in_ci: bool) -> bool {
    println!();
    for name in &sum.failed {
        println!("FAILED  {name}");
    }
    for name in &sum.skipped {
        println!("SKIPPED {name}");
    }
    let forbidden = in_ci && !sum.skipped.is_empty();
    if forbidden {
        println!("In CI nothing may be skipped: what was skipped above is a failure.");
    }
    sum.failed.is_empty() && !forbidden
}

fn run_tier(tier: Tier, root: &Path, programs: &[TestProgram], filter: Option<&str>) -> Report {
    let mut report = Report::default();
    let name = match tier {
        Tier::Unit => None,
        Tier::Kernel => Some(KNOWN_TEST_TARGETS[0]),
        Tier::E2e => Some(KNOWN_TEST_TARGETS[1]),
        Tier::Bench => Some(KNOWN_TEST_TARGETS[2]),
    };
    let wanted = |program: &&TestProgram| match name {
        Some(name) => program.is_tier(name),
        // The model has nothing to run without `--cfg loom`: model_check builds it with that.
        None => {
            !(program.is_model() || KNOWN_TEST_TARGETS.iter().any(|name| program.is_tier(name)))
        }
    };
    let mut found = false;
    for program in programs.iter().filter(wanted) {
        found = true;
        report.add(program.run(filter, PROGRAM_TIME_MAX));
    }
    if !found {
        report.record(
            &format!("{tier:?}: there is no such test program"),
            Outcome::Failed,
        );
    }
    if tier == Tier::Unit {
        report.add(doc_tests(root, filter));
        report.add(model_check(root, filter));
        if filter.is_none() {
            object_check(root, &mut report);
        }
    }
    report
}

fn doc_tests(root: &Path, filter: Option<&str>) -> Report {
    let mut command = host::cargo();
    command
        .current_dir(root)
        .args(["test", "--doc", "--workspace"])
        .args(["--exclude", "gate-ebpf", "--no-fail-fast"])
        .arg("--")
        .args(filter);
    Watched::new("documentation", PROGRAM_TIME_MAX).run(&mut command)
}

/// Explores every interleaving of the token arithmetic. `--cfg loom` swaps the atomics of the
/// whole crate graph, so these builds keep to a target folder of their own.
fn model_check(root: &Path, filter: Option<&str>) -> Report {
    let mut command = host::cargo();
    command
        .current_dir(root)
        .args(["test", "--release", "--package", "gate-common"])
        .args(["--test", "model"])
        .env("RUSTFLAGS", with_cfg_loom())
        .arg("--target-dir");
    match host::target_dir() {
        Ok(target) => command.arg(target.join("loom")),
        Err(_) => command.arg("target/loom"),
    };
    command.arg("--").args(filter);
    Watched::new("model check", PROGRAM_TIME_MAX).run(&mut command)
}

fn with_cfg_loom() -> String {
    let flags = env::var("RUSTFLAGS").unwrap_or_default();
    format!("{flags} --cfg loom").trim_start().to_owned()
}

/// Builds the kernel object twice, in two folders.
fn object_check(root: &Path, report: &mut Report) {
    let name = "kernel object: fresh, and the same bytes from two folders";
    let toolchain = bpf::Toolchain::find();
    let (outcome, why) = match toolchain.map(|toolchain| bpf::check(root, &toolchain)) {
        Ok(Ok(_)) => (Outcome::Passed, String::new()),
        Ok(Err(error)) => (Outcome::Failed, format!("{error:#}\n")),
        Err(error) => (Outcome::Skipped, format!("{error:#}\n")),
    };
    println!("{why}test {name} ... {outcome:?}");
    report.record(name, outcome);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skipped_tests_fail_in_ci_alone() {
        let mut sum = Report::default();
        sum.record("a", Outcome::Passed);
        assert!(tell(&mut sum, true));
        sum.record("b", Outcome::Skipped);
        assert!(tell(&mut sum, false));
        assert!(!tell(&mut sum, true));
        sum.record("c", Outcome::Failed);
        assert!(!tell(&mut sum, false));
    }
}
