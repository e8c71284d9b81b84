//! A throw-away PostgreSQL cluster: one per test binary, removed at its end.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::host;
use crate::session::Session;

/// The superuser of the cluster.
pub const SUPERUSER: &str = "postgres";
/// A role that must give a password (SCRAM); the others are trusted.
pub const LOCKED_USER: &str = "locked";
/// The password of [`LOCKED_USER`].
pub const LOCKED_PASSWORD: &str = "open sesame";
/// A role name of 63 bytes, the longest PostgreSQL has.
pub const LONG_USER: &str = "u23456789_123456789_123456789_123456789_123456789_123456789_123";
/// Roles that log in without a password.
pub const USERS: [&str; 7] = [
    "app", "admin", "report", "guest", "walker", "solo", LONG_USER,
];
/// Databases; `app` and `solo` are also users.
pub const DATABASES: [&str; 5] = ["prod", "stage", "app", "solo", LONG_USER];

/// A running cluster.
#[derive(Debug)]
pub struct Postgres {
    directory: TempDir,
    child: Mutex<Option<Child>>,
    port: u16,
}

impl Postgres {
    /// The cluster of this process. The thread that calls first must live as
    /// long as the cluster is used.
    ///
    /// # Errors
    /// When there are no binaries or the server does not start.
    pub fn shared() -> Result<&'static Self> {
        static SHARED: OnceLock<Result<Postgres, String>> = OnceLock::new();
        SHARED
            .get_or_init(|| Self::start().map_err(|error| format!("{error:#}")))
            .as_ref()
            .map_err(|error| anyhow::anyhow!("{error}"))
    }

    /// Makes and starts a cluster with the roles and databases of this module.
    ///
    /// # Errors
    /// When there are no binaries or the server does not start.
    pub fn start() -> Result<Self> {
        let binaries = binaries()?;
        let directory = tempfile::Builder::new().prefix("gate-pg-").tempdir()?;
        let owner = Owner::of_cluster()?;
        owner.give(directory.path())?;
        let data = directory.path().join("data");
        initdb(&binaries, &data, owner)?;
        let port = host::free_port();
        configure(&data, directory.path(), port)?;
        let child = owner
            .command(&binaries.join("postgres"))
            .arg("-D")
            .arg(&data)
            .stderr(File::create(directory.path().join("log"))?)
            .spawn()
            .context("start postgres")?;
        let postgres = Self {
            directory,
            child: Mutex::new(Some(child)),
            port,
        };
        postgres.wait_until_ready()?;
        postgres.fill()?;
        Ok(postgres)
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Its first process; `None` once it is stopped.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        let child = self.child.lock().ok()?;
        child.as_ref().map(Child::id)
    }

    /// The directory of its unix socket.
    #[must_use]
    pub fn socket_directory(&self) -> &Path {
        self.directory.path()
    }

    /// A superuser session of its own.
    ///
    /// # Errors
    /// When the server does not let it in.
    pub fn admin(&self) -> Result<Session> {
        Ok(Session::open(self.address(), SUPERUSER, SUPERUSER)?)
    }

    /// How many backends work for sessions with this `application_name`.
    ///
    /// # Errors
    /// When the server cannot be asked.
    pub fn backends_named(&self, application: &str) -> Result<usize> {
        let count = self.admin()?.value(&format!(
            "select count(*) from pg_stat_activity where application_name = '{application}'"
        ))?;
        Ok(count.parse()?)
    }

    /// Stops the server and removes its files.
    pub fn stop(&self) {
        let Some(mut child) = self.child.lock().ok().and_then(|mut child| child.take()) else {
            return;
        };
        // SIGINT is PostgreSQL's fast shutdown, SIGQUIT its immediate one.
        for number in [libc::SIGINT, libc::SIGQUIT, libc::SIGKILL] {
            let _ = host::signal(child.id(), number);
            if let Ok(Some(_)) = host::wait_for_exit(&mut child, Duration::from_secs(5)) {
                break;
            }
        }
        let _ = fs::remove_dir_all(self.directory.path());
    }

    fn wait_until_ready(&self) -> Result<()> {
        let ready = host::eventually(Duration::from_secs(20), "PostgreSQL is up", || {
            Ok(Some(self.admin()?))
        });
        ready.map(drop).map_err(|error| {
            let log = fs::read_to_string(self.directory.path().join("log")).unwrap_or_default();
            error.context(log)
        })
    }

    fn fill(&self) -> Result<()> {
        let mut admin = self.admin()?;
        for user in USERS {
            admin.query(&format!("create role {user} login"))?;
        }
        admin.query("alter role walker replication")?;
        admin.query(&format!(
            "create role {LOCKED_USER} login password '{LOCKED_PASSWORD}'"
        ))?;
        for database in DATABASES {
            admin.query(&format!("create database {database}"))?;
        }
        admin.close()?;
        Ok(())
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Where the server's programs lie: Debian's place for the newest version,
/// else `PATH`.
///
/// # Errors
/// When there is no `initdb`.
pub fn binaries() -> Result<PathBuf> {
    let debian = fs::read_dir("/usr/lib/postgresql").into_iter().flatten();
    let mut versions: Vec<PathBuf> = debian
        .flatten()
        .map(|entry| entry.path().join("bin"))
        .collect();
    versions.sort();
    let path = std::env::var_os("PATH").unwrap_or_default();
    versions
        .into_iter()
        .rev()
        .chain(std::env::split_paths(&path))
        .find(|directory| directory.join("initdb").is_file())
        .context("no initdb in /usr/lib/postgresql/*/bin or PATH")
}

/// PostgreSQL does not run as root: who runs it.
#[derive(Clone, Copy)]
struct Owner(Option<(u32, u32)>);

impl Owner {
    fn of_cluster() -> Result<Self> {
        if !host::is_root() {
            return Ok(Self(None));
        }
        let users = fs::read_to_string("/etc/passwd")?;
        let find = |name: &str| {
            users.lines().find_map(|line| {
                let mut fields = line.split(':');
                let found = fields.next()? == name;
                let ids = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
                found.then_some(ids)
            })
        };
        match find("postgres").or_else(|| find("nobody")) {
            Some(ids) => Ok(Self(Some(ids))),
            None => bail!("root needs a user `postgres` or `nobody` to run PostgreSQL"),
        }
    }

    fn give(self, path: &Path) -> Result<()> {
        if let Some((user, group)) = self.0 {
            std::os::unix::fs::chown(path, Some(user), Some(group))?;
        }
        Ok(())
    }

    fn command(self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command.env_clear().env("LC_ALL", "C").current_dir("/");
        if let Some((user, group)) = self.0 {
            command.uid(user).gid(group);
        }
        // SAFETY: runs between fork and exec, after the setuid above, and
        // makes one system call without touching memory of the parent.
        unsafe { command.pre_exec(|| host::die_with_parent(libc::SIGINT)) };
        command
    }
}

fn initdb(binaries: &Path, data: &Path, owner: Owner) -> Result<()> {
    let mut command = owner.command(&binaries.join("initdb"));
    command.arg("-D").arg(data).args([
        "--no-sync",
        "--auth=trust",
        "--username",
        SUPERUSER,
        // Names are bytes: no encoding may forbid any.
        "--encoding=SQL_ASCII",
        "--locale=C",
    ]);
    let output = host::run(&mut command, Duration::from_secs(60))?;
    if !output.status.success() {
        bail!("initdb: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

fn configure(data: &Path, sockets: &Path, port: u16) -> Result<()> {
    let settings = format!(
        "listen_addresses = '127.0.0.1'\n\
         port = {port}\n\
         unix_socket_directories = '{}'\n\
         max_connections = 800\n\
         max_wal_senders = 10\n\
         shared_buffers = '64MB'\n\
         max_wal_size = '512MB'\n\
         fsync = off\n\
         synchronous_commit = off\n\
         full_page_writes = off\n\
         autovacuum = off\n\
         password_encryption = 'scram-sha-256'\n",
        sockets.display()
    );
    fs::write(data.join("postgresql.auto.conf"), settings)?;
    let access = format!(
        "local all all trust\n\
         host all {LOCKED_USER} 127.0.0.1/32 scram-sha-256\n\
         host all all 127.0.0.1/32 trust\n\
         host replication all 127.0.0.1/32 trust\n"
    );
    fs::write(data.join("pg_hba.conf"), access)?;
    Ok(())
}
