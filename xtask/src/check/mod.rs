//! `cargo xtask check`: everything that can be said about the code without running it.

mod rules;
mod source;

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Result, bail, ensure};

use crate::{bpf, host};

#[derive(clap::Args)]
#[command(
    after_help = "Formatting, clippy with warnings denied on host and BPF code, rustdoc, \
and the house rules.\nAll steps run even if one fails; each failure is named at the end."
)]
pub struct Args {
    /// Run these steps only
    #[arg(value_enum)]
    steps: Vec<Step>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Step {
    /// rustfmt, checked only
    Fmt,
    /// House rules, written as code
    Rules,
    /// clippy on everything that runs on the host, warnings denied
    Clippy,
    /// clippy on the kernel programs, warnings denied
    ClippyEbpf,
    /// rustdoc, warnings denied
    Doc,
}

const ALL: [Step; 5] = [
    Step::Fmt,
    Step::Rules,
    Step::Clippy,
    Step::ClippyEbpf,
    Step::Doc,
];

/// Everything but the kernel programs, which build for their own target only.
const HOST_CODE: [&str; 3] = ["--workspace", "--exclude", "gate-ebpf"];

/// Runs the task.
pub fn main(args: &Args) -> Result<ExitCode> {
    let root = host::root()?;
    let steps = if args.steps.is_empty() {
        &ALL[..]
    } else {
        &args.steps
    };
    let mut failed = Vec::new();
    for step in steps {
        eprintln!("check: {step:?}");
        if let Err(error) = run(*step, &root) {
            eprintln!("{error:#}");
            failed.push(format!("{step:?}"));
        }
    }
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    eprintln!("check: all is well");
    Ok(ExitCode::SUCCESS)
}

fn run(step: Step, root: &Path) -> Result<()> {
    let cargo = |args: &[&str]| -> Command {
        let mut command = host::cargo();
        command.current_dir(root).args(args);
        command
    };
    match step {
        Step::Fmt => host::run(&mut cargo(&["fmt", "--all", "--check"])),
        Step::Rules => rules::check(root),
        Step::Clippy => host::run(
            cargo(&[
                "clippy",
                "--all-targets",
                "--features",
                "xtask/builtin-backend",
            ])
            .args(HOST_CODE)
            .args(["--", "-D", "warnings"]),
        ),
        Step::ClippyEbpf => match bpf::Toolchain::find() {
            Ok(toolchain) => bpf::clippy(root, &toolchain),
            Err(error) if host::in_ci() => bail!("nothing may be skipped in CI: {error:#}"),
            Err(error) => {
                eprintln!("SKIPPED {step:?}: {error:#}");
                Ok(())
            }
        },
        // Written for those who read the source, so that a link to a private item is right.
        Step::Doc => host::run(
            cargo(&[
                "doc",
                "--no-deps",
                "--document-private-items",
                "--keep-going",
            ])
            .args(HOST_CODE)
            .env(
                "RUSTDOCFLAGS",
                "-D warnings -A rustdoc::private-intra-doc-links",
            ),
        ),
    }
}
