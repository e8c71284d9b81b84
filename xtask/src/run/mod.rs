//! `cargo xtask run`: gate in front of a PostgreSQL, for trying it out; leaves nothing behind.

mod backend;
mod gate;
mod leftovers;

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::scratch::Scratch;
use crate::{host, setup, sys};
use backend::Backend;
use gate::Gate;
use leftovers::Leftovers;

#[derive(clap::Args, Debug)]
#[command(
    after_help = "Builds gate (release), starts it on 127.0.0.1:6432 and prints the lines to try.\n\
The backend is --backend if given; else a throw-away cluster made from the PostgreSQL programs\n\
on this machine, with trust authentication and pgbench tables; else a small built-in server\n\
that answers `select` of constants.\n\n\
Loading kernel programs needs root: without it, sudo is asked, and if that is refused gate runs\n\
with --kernel=off. Ctrl-C ends everything, SIGTERM drains first; nothing is left behind.\n\n\
Examples:\n  cargo xtask run\n  cargo xtask run --backend 10.0.0.7:5432 --listen 0.0.0.0:6432\n  \
cargo xtask run --kernel off --workers 1"
)]
pub struct Args {
    /// PostgreSQL to stand in front of: host:port, IPv6 addresses in brackets, or the path of a unix
    /// socket or of its directory
    #[arg(long, value_name = "ADDR")]
    backend: Option<String>,

    /// Take the built-in server even if PostgreSQL is installed
    #[arg(long, conflicts_with = "backend")]
    builtin: bool,

    /// Use the programs that were built before
    #[arg(long)]
    no_build: bool,

    /// Passed to gate as they are; see `gate --help`
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "GATE ARGS"
    )]
    gate: Vec<OsString>,
}

/// Runs the task until gate ends or a signal comes.
pub fn main(mut args: Args) -> Result<ExitCode> {
    let root = host::root()?;
    args.find_backend_among_gate_args();
    let builtin_wanted =
        args.builtin || (args.own_backend_needed() && setup::postgresql_bin().is_none());
    if !args.no_build {
        build(&root, builtin_wanted)?;
    }
    if builtin_wanted && !args.builtin {
        eprintln!("run: no PostgreSQL on this machine, so a small built-in server takes its place");
    }
    let kernel_off = args
        .value_of("--kernel")
        .is_some_and(|kernel| kernel == "off");
    if !host::is_root() && !kernel_off {
        become_root(&args)?;
    }
    sys::note_signals();
    let scratch = Scratch::new("run")?;
    let leftovers = Leftovers::note(args.value_of("--instance").as_deref().unwrap_or("default"));
    let result = serve(&args, &scratch, builtin_wanted);
    // Whatever happened above, gate and the backend have ended here.
    leftovers.remove();
    result
}

fn serve(args: &Args, scratch: &Scratch, builtin_wanted: bool) -> Result<ExitCode> {
    let mut backend = match &args.backend {
        Some(address) => Backend::given(address),
        None if !args.own_backend_needed() => Backend::configured(),
        None if builtin_wanted => Backend::builtin()?,
        None => Backend::cluster(scratch)?,
    };
    let Some(mut gate) = Gate::start(args, &backend, scratch)? else {
        return Ok(ExitCode::SUCCESS);
    };
    print!("{}", gate.lines_to_try(args, &backend));
    let code = gate.wait(&mut backend)?;
    // Sessions end before their server does.
    drop(gate);
    drop(backend);
    Ok(code)
}

impl Args {
    /// `cargo xtask run --workers 1 --backend ADDR`: from the first flag that is gate's own,
    /// everything is among gate's.
    fn find_backend_among_gate_args(&mut self) {
        if self.backend.is_none()
            && let Some(address) = self.value_of("--backend")
        {
            self.backend = Some(address);
            let mut kept = Vec::new();
            let mut words = std::mem::take(&mut self.gate).into_iter();
            while let Some(word) = words.next() {
                if word == "--backend" {
                    words.next();
                } else if !word.to_string_lossy().starts_with("--backend=") {
                    kept.push(word);
                }
            }
            self.gate = kept;
        }
    }

    /// Neither the command line nor a configuration file names a backend.
    fn own_backend_needed(&self) -> bool {
        self.backend.is_none() && self.value_of("--config").is_none()
    }

    /// The value that gate's arguments give to `flag`.
    fn value_of(&self, flag: &str) -> Option<String> {
        let mut words = self.gate.iter().map(|word| word.to_string_lossy());
        while let Some(word) = words.next() {
            if word == flag {
                return words.next().map(|value| value.into_owned());
            }
            if let Some(value) = word
                .strip_prefix(flag)
                .and_then(|rest| rest.strip_prefix('='))
            {
                return Some(value.to_owned());
            }
        }
        None
    }
}

fn build(root: &Path, builtin_wanted: bool) -> Result<()> {
    let cargo = |words: &[&str]| -> Result<()> {
        host::run(host::cargo().current_dir(root).arg("build").args(words))
    };
    cargo(&["--release", "--package", "gate", "--bins"])?;
    if builtin_wanted {
        let features = ["--features", "builtin-backend", "--bin", "builtin-backend"];
        cargo(&[&["--package", "xtask"][..], &features].concat())?;
    }
    Ok(())
}

/// Replaces this program by itself under sudo. Returns if that cannot be: gate then runs without
/// the kernel plane.
fn become_root(args: &Args) -> Result<()> {
    eprintln!("run: loading kernel programs needs root, asking sudo");
    let Some(mut sudo) = setup::sudo() else {
        return Ok(());
    };
    sudo.arg(std::env::current_exe().context("cannot find this program's own path")?);
    sudo.args(["run", "--no-build"]);
    if args.builtin {
        sudo.arg("--builtin");
    }
    if let Some(backend) = &args.backend {
        sudo.args(["--backend", backend]);
    }
    Err(sudo.args(&args.gate).exec()).context("cannot start sudo")
}

/// A program of this workspace, built in the given profile's folder.
fn built_program(profile: &str, name: &str) -> Result<PathBuf> {
    let program = host::target_dir()?.join(profile).join(name);
    anyhow::ensure!(
        host::is_executable(&program),
        "there is no {}: run without --no-build",
        program.display()
    );
    Ok(program)
}

/// The users who may type the printed lines: this one, and who called sudo.
fn session_users() -> Vec<String> {
    let current = host::output(Command::new("id").arg("-un")).unwrap_or_default();
    let mut users = vec![current.trim().to_owned()];
    users.extend(behind_sudo());
    users.retain(|user| !user.is_empty());
    users.dedup();
    users
}

/// The user who called sudo, if this is root by sudo.
fn behind_sudo() -> Option<String> {
    std::env::var("SUDO_USER")
        .ok()
        .filter(|user| user != "root")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parse(words: &[&str]) -> Args {
        let mut args = Cli::parse_from([&["run"], words].concat()).args;
        args.find_backend_among_gate_args();
        args
    }

    #[test]
    fn gate_arguments_pass_and_the_backend_is_found_among_them() {
        for words in [
            &["--backend", "h:1", "--workers", "2"][..],
            &["--workers", "2", "--backend", "h:1"],
            &["--workers", "2", "--backend=h:1"],
        ] {
            let args = parse(words);
            assert_eq!(args.backend.as_deref(), Some("h:1"));
            assert_eq!(args.gate, ["--workers", "2"]);
        }
    }

    #[test]
    fn values_of_gate_arguments_are_read() {
        let args = parse(&["--instance=a", "--listen", "[::1]:6432"]);
        assert_eq!(args.value_of("--instance").as_deref(), Some("a"));
        assert_eq!(args.value_of("--listen").as_deref(), Some("[::1]:6432"));
        assert_eq!(args.value_of("--control"), None);
        assert!(args.own_backend_needed());
        assert!(!parse(&["--config", "x.toml"]).own_backend_needed());
    }
}
