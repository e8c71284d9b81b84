//! `cargo xtask bench`: builds what is measured, and hands on to `gate-bench run`.

mod build;
mod compare;
mod instructions;
mod output;
mod postgres;
mod words;
mod worktree;

use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{Result, ensure};

use crate::child::{self, Reach};
use crate::scratch::Scratch;
use crate::{host, setup, sys};
use output::Output;
use words::Words;

/// What is said before `gate-bench` explains its own options.
const HELP: &str = "\
Measures what gate costs, beside what a user would run in its place.

Usage: cargo xtask bench [SCENARIO]... [OPTIONS]     one run of gate-bench, on this checkout
       cargo xtask bench goals [OPTIONS]             what gate is to reach, and whether it does: ten
                                                     minutes, the table is the end of the report
       cargo xtask bench compare BASE [...]          this checkout beside another commit
       cargo xtask bench instructions [...]          instructions of the pure hot functions

Builds gate and gate-bench (release) and runs `gate-bench run` with the words given here and with:

  --gate-bin PATH      the gate just built
  --commit TEXT        the commit of this checkout, with -dirty if files differ from it
  --out DIR            target/bench/<time>; target/bench/latest leads to it afterwards
  --postgres ADDR      if a scenario needs a real PostgreSQL (mixed, storm's direct row, all,
  --postgres-pid PID   goals): a throw-away cluster on 127.0.0.1 and a unix socket, made from the
  --postgres-socket P  PostgreSQL programs of this machine: max_connections=300, pgbench tables of
  --postgres-about T   scale 10, commits that do not wait for the disk. Without such programs the
                       rows are named as missing
  --pgbench PATH       for mixed: the pgbench of those programs, not a wrapper on PATH

Each of them that is given here stands. Ctrl-C ends everything in order. The kernel plane and the
preparation of the host need root. What follows are the options of gate-bench, handed on as they are.
";

#[derive(clap::Args, Debug)]
#[command(disable_help_flag = true)]
pub struct Args {
    /// `compare`, `instructions`, or the words for `gate-bench run`; --help explains
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGS"
    )]
    words: Vec<OsString>,
}

/// Runs the task. The exit code is that of gate-bench.
pub fn main(args: Args) -> Result<ExitCode> {
    let root = host::root()?;
    match args.words.first().and_then(|word| word.to_str()) {
        Some("compare") => compare::main(&root, &args.words),
        Some("instructions") => instructions::main(&root, &args.words),
        _ => run(&root, Words::new(args.words)),
    }
}

fn run(root: &Path, mut words: Words) -> Result<ExitCode> {
    sys::note_signals();
    if words.ask_for_help() {
        println!("{HELP}");
        return help_of_gate_bench(root);
    }
    let output = Output::new()?;
    if words.have("--gate-bin") {
        build::release(root, &["gate-bench"])?;
    } else {
        build::release(root, &["gate", "gate-bench"])?;
        words.push("--gate-bin", build::program("gate")?);
    }
    measure(root, words, &output)
}

/// What gate-bench says of its options.
fn help_of_gate_bench(root: &Path) -> Result<ExitCode> {
    let mut gate_bench = Command::new(build::for_help(root)?);
    let gate_bench = gate_bench.args(["run", "--help"]);
    let status = child::follow(gate_bench, Reach::Child, sys::KILL)?;
    Ok(child::exit_code(status))
}

/// Runs gate-bench with these words, to which commit, output and PostgreSQL are added.
fn measure(root: &Path, mut words: Words, output: &Output) -> Result<ExitCode> {
    if !words.have("--commit") {
        words.push("--commit", build::commit(root));
    }
    let own_folder = !words.have("--out");
    if own_folder {
        words.push("--out", &output.folder);
    }
    let scratch = Scratch::new("bench")?;
    // Apart from the cluster's files: PgBouncer and PostgreSQL are two users here.
    let sockets = Scratch::new("bench-sockets")?;
    fs::set_permissions(&sockets.path, Permissions::from_mode(0o1777))?;
    let cluster = if !words.need_postgresql() {
        None
    } else if setup::postgresql_bin().is_none() {
        eprintln!(
            "bench: no PostgreSQL on this machine: the report names the rows that need one as \
             missing; `cargo xtask setup --what tests` installs it"
        );
        None
    } else {
        Some(postgres::start(&scratch, &sockets.path)?)
    };
    if let Some(cluster) = &cluster {
        words.push("--postgres", cluster.address());
        words.push("--postgres-pid", cluster.pid().to_string());
        if !words.have("--postgres-socket") {
            words.push("--postgres-socket", cluster.socket(&sockets.path));
        }
        if !words.have("--postgres-about") {
            words.push("--postgres-about", postgres::about(&cluster.version));
        }
    }
    if words.need_pgbench()
        && !words.have("--pgbench")
        && let Some(pgbench) = postgres::pgbench()
    {
        words.push("--pgbench", pgbench);
    }
    ensure!(sys::signals().0 == 0, "interrupted");
    let mut gate_bench = Command::new(build::program("gate-bench")?);
    gate_bench.arg("run").args(words.all());
    eprintln!("+ {}", host::command_line(&gate_bench));
    // A signal is gate-bench's to follow: it ends its children and puts the host back.
    let status = child::follow(&mut gate_bench, Reach::Child, sys::INTERRUPT)?;
    if own_folder {
        output.keep()?;
    }
    Ok(child::exit_code(status))
}
