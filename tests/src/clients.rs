//! Real clients with deadlines: psql, pgbench, tokio-postgres.

use std::future::Future;
use std::net::SocketAddr;
use std::process::{Command, Output};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio_postgres::{Client, Config, NoTls};

use crate::host;
use crate::postgres;

/// A libpq program of the cluster's version, pointed at an address.
///
/// # Errors
/// When there is no PostgreSQL.
pub fn libpq(program: &str, address: SocketAddr, user: &str) -> Result<Command> {
    let mut command = Command::new(postgres::binaries()?.join(program));
    command
        .env("PGHOST", address.ip().to_string())
        .env("PGPORT", address.port().to_string())
        .env("PGUSER", user)
        .env("PGCONNECT_TIMEOUT", "10")
        .env("LC_ALL", "C");
    Ok(command)
}

/// Runs one statement with psql.
///
/// # Errors
/// When psql does not end within 15 s.
pub fn psql(address: SocketAddr, user: &str, database: &str, sql: &str) -> Result<Output> {
    let mut command = libpq("psql", address, user)?;
    command.args(["-X", "-A", "-t", "-d", database, "-c", sql]);
    host::run(&mut command, Duration::from_secs(15))
}

/// What psql printed, as text: output and errors.
#[must_use]
pub fn both_streams(output: &Output) -> String {
    let mut all = String::from_utf8_lossy(&output.stdout).into_owned();
    all.push_str(&String::from_utf8_lossy(&output.stderr));
    all
}

/// Logs in with tokio-postgres; the connection runs in the background.
///
/// # Errors
/// The driver's own error.
pub async fn tokio_client(
    address: SocketAddr,
    user: &str,
    database: &str,
    password: Option<&str>,
) -> Result<Client, tokio_postgres::Error> {
    let mut config = Config::new();
    config
        .host(address.ip().to_string())
        .port(address.port())
        .user(user)
        .dbname(database)
        .connect_timeout(Duration::from_secs(10));
    if let Some(password) = password {
        config.password(password);
    }
    let (client, connection) = config.connect(NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// SQLSTATE of a tokio-postgres error, empty if it has none.
#[must_use]
pub fn sqlstate(error: &tokio_postgres::Error) -> &str {
    error.code().map_or("", |code| code.code())
}

/// Runs a future to its end, at most `limit`.
///
/// # Errors
/// When the time is over.
pub fn block_on<T>(limit: Duration, future: impl Future<Output = T>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?
        .block_on(async { tokio::time::timeout(limit, future).await })
        .with_context(|| format!("not done within {limit:?}"))
}
