//! The PostgreSQL behind gate: somebody's own, a throw-away cluster, or the built-in server.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};

use super::{built_program, session_users};
use crate::cluster::Cluster;
use crate::scratch::Scratch;
use crate::{child, sys};

/// More than the pgbench lines use, few enough to meet the server's own limit on purpose.
/// fsync is off: nothing in there is meant to last.
const CLUSTER_SETTINGS: [&str; 2] = ["max_connections=300", "fsync=off"];

/// A backend, which ends when it is dropped if this program started it.
pub struct Backend {
    /// For gate's `--backend`; none if gate's configuration file says it.
    pub address: Option<String>,
    /// One line for people.
    pub description: String,
    /// Whether the roles and pgbench tables of the throw-away cluster are there.
    pub is_cluster: bool,
    process: Process,
}

/// What was started; only to be dropped.
enum Process {
    None,
    Cluster(Cluster),
    Builtin(Builtin),
}

impl Backend {
    /// The one named on the command line.
    pub fn given(address: &str) -> Self {
        Self {
            address: Some(address.to_owned()),
            description: format!("the PostgreSQL at {address}"),
            is_cluster: false,
            process: Process::None,
        }
    }

    /// The one of gate's configuration file.
    pub fn configured() -> Self {
        Self {
            address: None,
            description: "as the configuration file says".to_owned(),
            is_cluster: false,
            process: Process::None,
        }
    }

    /// A new cluster in the scratch folder.
    pub fn cluster(scratch: &Scratch) -> Result<Self> {
        let cluster = Cluster::start(scratch, &CLUSTER_SETTINGS)?;
        fill(&cluster, &session_users())?;
        Ok(Self {
            address: Some(cluster.address()),
            description: format!(
                "a throw-away {} in {}",
                cluster.version,
                scratch.path.display()
            ),
            is_cluster: true,
            process: Process::Cluster(cluster),
        })
    }

    /// The server of this package.
    pub fn builtin() -> Result<Self> {
        let builtin = Builtin::start()?;
        Ok(Self {
            address: Some(builtin.address.clone()),
            description: "the built-in server, which answers `select` of constants".to_owned(),
            is_cluster: false,
            process: Process::Builtin(builtin),
        })
    }

    /// Whether the server that this program started is still there.
    pub fn is_alive(&mut self) -> bool {
        match &mut self.process {
            Process::None => true,
            Process::Cluster(cluster) => cluster.is_alive(),
            Process::Builtin(builtin) => matches!(builtin.child.try_wait(), Ok(None)),
        }
    }
}

/// The roles and databases that the printed lines use: each of `users` is a superuser with a
/// database of that name, so that `psql` without `-U` works. The pgbench tables are made in
/// template1, so that every database has them, whatever name a client connects under.
fn fill(cluster: &Cluster, users: &[String]) -> Result<()> {
    cluster.make_pgbench_tables("template1", 1)?;
    cluster.sql(
        "template1",
        &[
            "grant select, insert, update, delete on all tables in schema public to public",
            "drop database postgres",
            "create database postgres",
            "create role app login",
            "create database app owner app",
        ],
    )?;
    for user in users
        .iter()
        .filter(|user| !["postgres", "app"].contains(&user.as_str()))
    {
        let name = format!("\"{}\"", user.replace('"', "\"\""));
        let role = format!("create role {name} superuser login");
        let database = format!("create database {name} owner {name}");
        cluster.sql("template1", &[&role, &database])?;
    }
    Ok(())
}

struct Builtin {
    child: Child,
    address: String,
}

impl Builtin {
    /// Starts it and reads the address it chose from its first line.
    fn start() -> Result<Self> {
        let mut command = Command::new(built_program("debug", "builtin-backend")?);
        let mut child = sys::own_group_and_die_with_parent(&mut command, sys::KILL)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the built-in server")?;
        let stdout = child.stdout.take().context("its output is not piped")?;
        let mut address = String::new();
        BufReader::new(stdout).read_line(&mut address)?;
        let builtin = Self {
            child,
            address: address.trim().to_owned(),
        };
        anyhow::ensure!(
            !builtin.address.is_empty(),
            "the built-in server did not start"
        );
        Ok(builtin)
    }
}

impl Drop for Builtin {
    fn drop(&mut self) {
        child::end(&mut self.child, &[sys::TERMINATE, sys::KILL]);
    }
}
