//! One run of pgbench.

use std::net::SocketAddr;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::Serialize;

use crate::peer::shown;

/// Whether connections are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// One connection for each client.
    Keep,
    /// One connection for each transaction (`-C`).
    Reconnect,
}

impl Mode {
    /// What it adds to the command.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Keep => "-S",
            Self::Reconnect => "-S -C",
        }
    }
}

/// What is the same in all runs.
pub struct Pgbench {
    pub program: String,
    pub user: String,
    pub database: String,
    pub seconds: u32,
    pub clients: u32,
    pub jobs: u32,
}

/// What pgbench said.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Transactions per second; under `-C` connecting is part of each.
    pub tps: f64,
    /// The mean.
    pub latency_ms: f64,
    pub transactions: u64,
    pub failed: u64,
}

impl Pgbench {
    /// Runs it once.
    ///
    /// # Errors
    /// It failed, or said something else than we can read.
    pub fn run(&self, mode: Mode, address: SocketAddr) -> Result<Outcome> {
        let text = output(&mut self.command(mode, address))?;
        parse(&text).with_context(|| format!("pgbench said something new:\n{text}"))
    }

    /// The command of a run, as one would type it.
    #[must_use]
    pub fn shown(&self, mode: Mode, address: SocketAddr) -> String {
        shown(&self.command(mode, address))
    }

    /// Makes pgbench's tables.
    ///
    /// # Errors
    /// It failed.
    pub fn initialize(&self, address: SocketAddr, scale: u32) -> Result<()> {
        let mut command = self.base(address);
        command.args(["-i", "-q", "-s", &scale.to_string(), &self.database]);
        output(&mut command).map(drop)
    }

    /// What the server says of its version, or why it does not.
    #[must_use]
    pub fn server_version(&self, address: SocketAddr) -> String {
        let mut command = Command::new("psql");
        self.to(&mut command, address);
        command.args(["-XAtc", "select version()", &self.database]);
        match output(&mut command) {
            Ok(version) => version.trim().to_owned(),
            Err(error) => format!("{error:#}"),
        }
    }

    fn command(&self, mode: Mode, address: SocketAddr) -> Command {
        let mut command = self.base(address);
        command.args(["-S", "-n"]);
        for (flag, number) in [
            ("-c", self.clients),
            ("-j", self.jobs),
            ("-T", self.seconds),
        ] {
            command.args([flag, &number.to_string()]);
        }
        if mode == Mode::Reconnect {
            command.arg("-C");
        }
        command.arg(&self.database);
        command
    }

    fn base(&self, address: SocketAddr) -> Command {
        let mut command = Command::new(&self.program);
        self.to(&mut command, address);
        command
    }

    fn to(&self, command: &mut Command, address: SocketAddr) {
        command
            .args(["-h", &address.ip().to_string()])
            .args(["-p", &address.port().to_string()])
            .args(["-U", &self.user])
            // No TLS on any path: gate has none, and it would drown the rest.
            .env("PGSSLMODE", "disable")
            .env("PGGSSENCMODE", "disable")
            .stdin(Stdio::null());
    }
}

fn output(command: &mut Command) -> Result<String> {
    let shown = shown(command);
    let output = command
        .output()
        .with_context(|| format!("cannot run {shown}"))?;
    ensure!(
        output.status.success(),
        "{shown} failed ({}):\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn parse(text: &str) -> Option<Outcome> {
    let after = |start: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(start))?;
        line.split_ascii_whitespace().next()
    };
    Some(Outcome {
        tps: after("tps = ")?.parse().ok()?,
        latency_ms: after("latency average = ")?.parse().ok()?,
        transactions: after("number of transactions actually processed: ")?
            .parse()
            .ok()?,
        // Before PostgreSQL 15 a failed transaction ended the client.
        failed: after("number of failed transactions: ")
            .unwrap_or("0")
            .parse()
            .ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_of_pgbench_15_is_read() {
        let text = "pgbench (15.18)\n\
            transaction type: <builtin: select only>\n\
            number of transactions actually processed: 1234\n\
            number of failed transactions: 2 (0.162%)\n\
            latency average = 0.521 ms\n\
            average connection time = 0.4 ms\n\
            tps = 30712.5 (including reconnection times)\n";
        let outcome = Outcome {
            tps: 30712.5,
            latency_ms: 0.521,
            transactions: 1234,
            failed: 2,
        };
        assert_eq!(parse(text), Some(outcome));
        assert_eq!(parse("tps = nothing"), None);
    }
}
