//! What gate says of itself, over HTTP and through gatectl.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::binaries;
use crate::gate::Gate;
use crate::host;
use crate::openmetrics::Metrics;

/// Active sessions and the limit of one scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// Sessions that hold a slot.
    pub active: i64,
    /// The limit; 0 is unlimited, `None` is "none": nobody.
    pub limit: Option<i64>,
}

/// The object of `/connections`.
#[derive(Clone, Debug, PartialEq)]
pub struct Connections(pub Value);

impl Connections {
    /// All admitted sessions.
    #[must_use]
    pub fn active(&self) -> i64 {
        self.0["total"]["active"].as_i64().unwrap_or(-1)
    }

    /// Accepted, no valid startup packet yet.
    #[must_use]
    pub fn pending(&self) -> i64 {
        self.0["total"]["pending"].as_i64().unwrap_or(-1)
    }

    /// A user's count; 0 of the default limit if it is not listed.
    #[must_use]
    pub fn user(&self, name: &str) -> Count {
        self.named("by_user", name, "per_user")
    }

    /// A database's count.
    #[must_use]
    pub fn database(&self, name: &str) -> Count {
        self.named("by_database", name, "per_database")
    }

    /// A backend's count.
    #[must_use]
    pub fn backend(&self, name: &str) -> Count {
        self.named("by_backend", name, "per_backend")
    }

    /// Names under `by_user` or `by_database` with a session.
    #[must_use]
    pub fn in_use(&self, group: &str) -> Vec<String> {
        let all = self.0[group].as_object();
        let used = all
            .into_iter()
            .flatten()
            .filter(|(_, count)| count["active"] != 0);
        used.map(|(name, _)| name.clone()).collect()
    }

    /// The sum of a figure of `kernel.listeners`.
    #[must_use]
    pub fn listeners(&self, figure: &str) -> i64 {
        let all = self.0["kernel"]["listeners"].as_array();
        all.into_iter()
            .flatten()
            .filter_map(|one| one[figure].as_i64())
            .sum()
    }

    fn named(&self, group: &str, name: &str, default: &str) -> Count {
        let entry = &self.0[group][name];
        if entry.is_null() {
            let limit = self.0["defaults"][default].as_i64();
            return Count { active: 0, limit };
        }
        Count {
            active: entry["active"].as_i64().unwrap_or(-1),
            limit: entry["limit"].as_i64(),
        }
    }
}

impl Gate {
    /// `GET path` on the admin address: status and body.
    ///
    /// # Errors
    /// When nobody answers within 5 s.
    pub fn http(&self, path: &str) -> Result<(u16, String)> {
        let limit = Duration::from_secs(5);
        let mut stream = TcpStream::connect_timeout(&self.admin_address(), limit)?;
        stream.set_read_timeout(Some(limit))?;
        // 1.0: the answer is not chunked and ends with the connection.
        write!(stream, "GET {path} HTTP/1.0\r\nHost: gate\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP head")?;
        let status = head.split(' ').nth(1).context("no HTTP status")?;
        Ok((status.parse()?, body.to_owned()))
    }

    /// `GET /connections`.
    ///
    /// # Errors
    /// When it is not answered with JSON.
    pub fn connections(&self) -> Result<Connections> {
        let (status, body) = self.http("/connections")?;
        if status != 200 {
            bail!("/connections: {status} {body}");
        }
        Ok(Connections(serde_json::from_str(&body)?))
    }

    /// `GET /metrics`, read strictly.
    ///
    /// # Errors
    /// When it is not answered with valid OpenMetrics.
    pub fn metrics(&self) -> Result<Metrics> {
        let (status, body) = self.http("/metrics")?;
        if status != 200 {
            bail!("/metrics: {status}");
        }
        Metrics::parse(&body).map_err(|error| anyhow::anyhow!("/metrics: {error}\n{body}"))
    }

    /// Runs gatectl on this instance.
    ///
    /// # Errors
    /// When it does not end within 5 s.
    pub fn gatectl_output(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new(binaries::gatectl()?);
        command
            .args(["--instance", self.instance()])
            .arg("--control")
            .arg(self.control())
            .args(arguments);
        host::run(&mut command, Duration::from_secs(5))
    }

    /// Runs gatectl, which must succeed, and returns what it prints.
    ///
    /// # Errors
    /// When it fails.
    pub fn gatectl(&self, arguments: &[&str]) -> Result<String> {
        let output = self.gatectl_output(arguments)?;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        if !output.status.success() {
            let error = String::from_utf8_lossy(&output.stderr);
            bail!("gatectl {arguments:?}: {} {said} {error}", output.status);
        }
        Ok(said)
    }

    /// `gatectl connections --json`, which works without a running gate too.
    ///
    /// # Errors
    /// When it fails or prints something else.
    pub fn gatectl_connections(&self) -> Result<Connections> {
        let said = self.gatectl(&["connections", "--json"])?;
        Ok(Connections(serde_json::from_str(&said)?))
    }

    /// Waits until `/connections` says what the condition wants.
    ///
    /// # Errors
    /// When it does not within `limit`; the last counts are in the error.
    pub fn wait_connections(
        &self,
        limit: Duration,
        what: &str,
        condition: impl Fn(&Connections) -> bool,
    ) -> Result<Connections> {
        host::eventually(limit, what, || {
            let connections = self.connections()?;
            if condition(&connections) {
                return Ok(Some(connections));
            }
            bail!("{}", connections.0)
        })
    }

    /// Waits until nobody holds a slot and nobody is pending, everywhere.
    ///
    /// # Errors
    /// When a count is still above 0 after `limit`, or an impossible count
    /// was seen.
    pub fn wait_empty(&self, limit: Duration) -> Result<()> {
        self.wait_connections(limit, "every count is 0", |now| {
            now.active() == 0
                && now.pending() == 0
                && ["by_user", "by_database", "by_backend"]
                    .iter()
                    .all(|group| now.in_use(group).is_empty())
                && now.listeners("sockets") == 0
        })?;
        let errors = self.metrics()?.sum("gate_ledger_errors_total", &[]);
        if errors != 0.0 {
            bail!("gate_ledger_errors_total is {errors}");
        }
        Ok(())
    }
}
