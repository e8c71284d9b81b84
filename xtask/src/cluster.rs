//! A throw-away PostgreSQL cluster on 127.0.0.1, with trust authentication.

use std::fs::{self, File};
use std::net::TcpListener;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::scratch::Scratch;
use crate::{child, host, setup, sys};

const START_TIME_MAX: Duration = Duration::from_secs(60);

/// A running cluster; stopped when dropped. Its files lie in the scratch folder.
pub struct Cluster {
    /// As the server names itself: `PostgreSQL 15.14`.
    pub version: String,
    server: Child,
    port: u16,
    programs: PathBuf,
    owner: Option<Owner>,
    folder: PathBuf,
}

/// The unprivileged user who runs the server in root's place: PostgreSQL refuses root.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    uid: u32,
    gid: u32,
}

impl Cluster {
    /// Makes and starts a cluster with these settings. It has the superuser `postgres` alone.
    pub fn start(scratch: &Scratch, settings: &[&str]) -> Result<Self> {
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
        eprintln!("xtask: making a throw-away cluster with {version}");
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
        let server = start_server(&programs, owner, &folder, port, settings, &log)?;
        let mut cluster = Self {
            version,
            server,
            port,
            programs,
            owner,
            folder,
        };
        cluster.wait_until_up(&log)?;
        Ok(cluster)
    }

    /// `host:port`, for gate.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Its unix socket, if that is in this folder.
    pub fn socket(&self, folder: &Path) -> PathBuf {
        folder.join(format!(".s.PGSQL.{}", self.port))
    }

    /// The server's own process, the parent of all of its others.
    pub fn pid(&self) -> u32 {
        self.server.id()
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

    /// The tables of pgbench, if that is installed.
    pub fn make_pgbench_tables(&self, database: &str, scale: u32) -> Result<()> {
        let pgbench = self.programs.join("pgbench");
        if !host::is_executable(&pgbench) {
            return Ok(());
        }
        let mut init = Self::command(&pgbench, self.owner, &self.folder);
        init.args(["--initialize", "--quiet", "--username=postgres"])
            .arg(format!("--scale={scale}"))
            .args(["--host=127.0.0.1", &format!("--port={}", self.port)])
            .arg(database);
        host::output(&mut init).map(drop)
    }

    /// Each statement by itself: `create database` takes part in no transaction.
    pub fn sql(&self, database: &str, statements: &[&str]) -> Result<()> {
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
        child::end(&mut self.server, &[sys::INTERRUPT, sys::QUIT, sys::KILL]);
    }
}

/// A port of 127.0.0.1 that is free now.
fn free_port() -> Result<u16> {
    let probe = TcpListener::bind(("127.0.0.1", 0)).context("cannot bind on 127.0.0.1")?;
    Ok(probe.local_addr()?.port())
}

fn start_server(
    programs: &Path,
    owner: Option<Owner>,
    folder: &Path,
    port: u16,
    settings: &[&str],
    log: &Path,
) -> Result<Child> {
    let place = [
        "listen_addresses=127.0.0.1".to_owned(),
        format!("port={port}"),
        format!("unix_socket_directories={}", folder.display()),
    ];
    let mut command = Cluster::command(&programs.join("postgres"), owner, folder);
    command.arg("-D").arg(folder.join("data"));
    for setting in place
        .iter()
        .map(String::as_str)
        .chain(settings.iter().copied())
    {
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
