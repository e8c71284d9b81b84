//! A throw-away PostgreSQL cluster, with the roles and tables that the printed lines use.

use std::fs::{self, File};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::backend::free_port;
use super::leftovers::{Scratch, end_child};
use crate::{host, setup, sys};

const START_TIME_MAX: Duration = Duration::from_secs(60);

/// More than the pgbench lines use, few enough to meet the server's own limit on purpose.
const MAX_CONNECTIONS: u32 = 300;

/// A running cluster; stopped when dropped. Its files lie in the scratch folder.
pub struct Cluster {
    /// As the server names itself: `PostgreSQL 15.14`.
    pub version: String,
    server: Child,
    port: u16,
    programs: PathBuf,
    owner: Option<Owner>,
}

/// The unprivileged user who runs the server in root's place: PostgreSQL refuses root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    uid: u32,
    gid: u32,
}

impl Cluster {
    /// Makes and starts a cluster in which each of `users` is a superuser with a database of that
    /// name, so that `psql` without `-U` works.
    pub fn start(scratch: &Scratch, users: &[String]) -> Result<Self> {
        let programs = setup::postgresql_bin().context("there is no PostgreSQL on this machine")?;
        let owner = if host::is_root() {
            Some(unprivileged()?)
        } else {
            None
        };
        let folder = scratch.path.join("cluster");
        fs::create_dir(&folder)?;
        if let Some(owner) = owner {
            // The owner must reach its folder; nobody else may look into either.
            chown(&scratch.path, Some(owner.uid), Some(owner.gid))?;
            chown(&folder, Some(owner.uid), Some(owner.gid))?;
        }
        let version = host::output(Command::new(programs.join("postgres")).arg("--version"))?;
        let version = version
            .trim()
            .replace("postgres (PostgreSQL)", "PostgreSQL");
        eprintln!("run: making a throw-away cluster with {version}");
        let data = folder.join("data");
        let mut initdb = Self::command(&programs.join("initdb"), owner, &folder);
        initdb.arg("--pgdata").arg(&data).args([
            "--no-sync",
            "--auth=trust",
            "--username=postgres",
            "--encoding=UTF8",
            "--locale=C",
        ]);
        host::output(&mut initdb)?;
        let port = free_port()?;
        let log = folder.join("log");
        let server = start_server(&programs, owner, &folder, &data, port, &log)?;
        let mut cluster = Self {
            version,
            server,
            port,
            programs,
            owner,
        };
        cluster.wait_until_up(&log)?;
        cluster.fill(users, &folder)?;
        Ok(cluster)
    }

    /// `host:port`, for gate.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Whether the server runs.
    pub fn is_alive(&mut self) -> bool {
        matches!(self.server.try_wait(), Ok(None))
    }

    fn command(program: &Path, owner: Option<Owner>, folder: &Path) -> Command {
        let mut command = Command::new(program);
        command.current_dir(folder).env("LC_ALL", "C");
        if let Some(owner) = owner {
            command.uid(owner.uid).gid(owner.gid);
        }
        command
    }

    fn wait_until_up(&mut self, log: &Path) -> Result<()> {
        let deadline = Instant::now() + START_TIME_MAX;
        loop {
            if self.sql("postgres", &["select 1"]).is_ok() {
                return Ok(());
            }
            let said = || fs::read_to_string(log).unwrap_or_default();
            if let Some(status) = self.server.try_wait()? {
                bail!("PostgreSQL ended ({status}):\n{}", said());
            }
            ensure!(sys::signals().0 == 0, "interrupted");
            ensure!(
                Instant::now() < deadline,
                "PostgreSQL does not come up:\n{}",
                said()
            );
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// Roles and databases. The pgbench tables are made in template1, so that every database has
    /// them, whatever name a client connects under.
    fn fill(&self, users: &[String], folder: &Path) -> Result<()> {
        let pgbench = self.programs.join("pgbench");
        if host::is_executable(&pgbench) {
            let mut init = Self::command(&pgbench, self.owner, folder);
            init.args([
                "--initialize",
                "--scale=1",
                "--quiet",
                "--username=postgres",
            ])
            .args([
                "--host=127.0.0.1",
                &format!("--port={}", self.port),
                "template1",
            ]);
            host::output(&mut init)?;
        }
        self.sql(
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
            self.sql("template1", &[&role, &database])?;
        }
        Ok(())
    }

    /// Each statement by itself: `create database` takes part in no transaction.
    fn sql(&self, database: &str, statements: &[&str]) -> Result<()> {
        let mut psql = Command::new(self.programs.join("psql"));
        psql.args([
            "--no-psqlrc",
            "--quiet",
            "--set=ON_ERROR_STOP=1",
            "--username=postgres",
        ])
        .args([
            "--host=127.0.0.1",
            &format!("--port={}", self.port),
            database,
        ])
        .env("PGCONNECT_TIMEOUT", "5")
        .env("PGSSLMODE", "disable");
        for statement in statements {
            psql.args(["--command", statement]);
        }
        host::output(&mut psql).map(drop)
    }
}

impl Drop for Cluster {
    /// Fast shutdown, then immediate, then by force.
    fn drop(&mut self) {
        end_child(&mut self.server, &[sys::INTERRUPT, sys::QUIT, sys::KILL]);
    }
}

/// fsync is off: nothing in here is meant to last.
fn start_server(
    programs: &Path,
    owner: Option<Owner>,
    folder: &Path,
    data: &Path,
    port: u16,
    log: &Path,
) -> Result<Child> {
    let settings = [
        "listen_addresses=127.0.0.1".to_owned(),
        format!("port={port}"),
        format!("unix_socket_directories={}", folder.display()),
        format!("max_connections={MAX_CONNECTIONS}"),
        "fsync=off".to_owned(),
    ];
    let mut command = Cluster::command(&programs.join("postgres"), owner, folder);
    command.arg("-D").arg(data);
    for setting in &settings {
        command.args(["-c", setting]);
    }
    let log = File::create(log)?;
    sys::own_group_and_die_with_parent(&mut command, sys::QUIT)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .spawn()
        .context("cannot start postgres")
}

/// Who called sudo, else `postgres`, else `nobody`.
fn unprivileged() -> Result<Owner> {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u32>().ok();
    if let (Some(uid), Some(gid)) = (number("SUDO_UID"), number("SUDO_GID"))
        && uid != 0
    {
        return Ok(Owner { uid, gid });
    }
    let passwd = fs::read_to_string("/etc/passwd").context("/etc/passwd")?;
    ["postgres", "nobody"]
        .iter()
        .find_map(|name| find_user(&passwd, name))
        .context("PostgreSQL refuses to run as root, and there is neither postgres nor nobody")
}

fn find_user(passwd: &str, name: &str) -> Option<Owner> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        if fields.next() != Some(name) {
            return None;
        }
        let mut number = |skip| fields.nth(skip)?.parse().ok();
        Some(Owner {
            uid: number(1)?,
            gid: number(0)?,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_by_their_whole_name() {
        let passwd = "root:x:0:0:root:/:/bin/sh\npostgres2:x:7:7::/:/bin/sh\n\
                      postgres:x:101:103:PostgreSQL,,,:/var/lib/postgresql:/bin/bash\n";
        let found = find_user(passwd, "postgres");
        assert_eq!(found, Some(Owner { uid: 101, gid: 103 }));
        assert_eq!(find_user(passwd, "nobody"), None);
    }
}
