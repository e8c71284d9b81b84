//! All automation of the project, as one program: `cargo xtask --help`.

mod bench;
mod bpf;
mod check;
mod child;
mod cluster;
mod fingerprint;
mod host;
mod run;
mod scratch;
mod setup;
mod sys;
mod test;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// gate's automation: set up a machine, build the kernel object, run, test and check
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what tests, the kernel object and the bench need (Debian packages and bpf-linker)
    Setup(setup::Args),
    /// Build the kernel object from source and renew the committed one with its fingerprint
    BuildEbpf(bpf::Args),
    /// Build gate and run it in front of a PostgreSQL, for trying it out
    Run(run::Args),
    /// Run every tier of tests and add them up in one last line
    Test(test::Args),
    /// Measure gate beside its peers, two commits beside each other, or count instructions
    Bench(bench::Args),
    /// Formatting, lints (host and BPF), documentation and the house rules
    Check(check::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().task {
        Task::Setup(args) => setup::main(&args),
        Task::BuildEbpf(args) => bpf::main(&args),
        Task::Run(args) => run::main(args),
        Task::Test(args) => test::main(&args),
        Task::Bench(args) => bench::main(args),
        Task::Check(args) => check::main(&args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
