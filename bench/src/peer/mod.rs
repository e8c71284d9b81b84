//! The ways from client to server that a comparison measures.
//!
//! Every proxy is started for one measurement, in the foreground, with one
//! worker for each CPU, and is ended when its [`Proxy`] is dropped.

mod baseline;
mod child;
mod direct;
mod gate;
mod haproxy;
mod launch;
mod nginx;
mod pgbouncer;
mod program;
pub mod scratch;
mod template;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Result, bail};

use crate::baseline::Runtime;
use child::Child;
use scratch::Scratch;

/// A way to the server that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// As reports name it.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Whether it reaches the server by its unix socket.
    pub by_unix: bool,
}

/// What a peer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// No proxy at all.
    Direct,
    /// gate, as a program of some build.
    Gate {
        /// The program `gate`.
        program: PathBuf,
        /// Its kernel plane: `auto`, `required` or `off`.
        kernel: String,
    },
    /// HAProxy in TCP mode.
    Haproxy,
    /// PgBouncer with session pooling.
    Pgbouncer,
    /// nginx's stream proxy.
    Nginx,
    /// A small relay on tokio, part of the bench.
    Tokio,
    /// A small relay on tokio-uring, part of the bench.
    TokioUring,
}

/// What a proxy is started for.
#[derive(Clone, Debug)]
pub struct Job {
    /// Where it finds the server.
    pub backend: SocketAddr,
    /// The server's unix socket, if it is to be reached by that: `.s.PGSQL.` with
    /// the port of `backend`.
    pub backend_socket: Option<PathBuf>,
    /// Which address it listens on; the port is free to choose.
    pub listen: IpAddr,
    /// The network namespace that it runs in; `None`: this one.
    pub namespace: Option<Arc<OwnedFd>>,
    /// What it does with clients.
    pub role: Role,
    /// The CPUs that it is bound to, with one worker pinned to each; empty: not
    /// bound.
    pub cpus: Vec<usize>,
    /// Its workers where it is not bound.
    pub unbound_workers: usize,
    /// As many sessions at once must be possible.
    pub sessions: usize,
}

/// What a proxy does with clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Every client is relayed.
    Relay,
    /// Every client of the user [`REFUSED_USER`] is refused by an ErrorResponse
    /// after its startup packet.
    RefusePolitely,
    /// Every socket is refused as early as the proxy can: none of them may reach
    /// the server, nor wait for it.
    RefuseHard,
}

/// How names of configuration files end.
const CONFIGS: &[&str] = &["toml", "cfg", "ini", "conf"];

/// Who is refused under [`Role::RefusePolitely`].
pub const REFUSED_USER: &str = "refused";

/// A proxy that accepts connections; ends when dropped.
#[derive(Debug)]
pub struct Proxy {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its first process; others are its descendants. `None`: there is no proxy.
    pub pid: Option<u32>,
    /// How it was started, as one would type it, with `$LISTEN`, `$BACKEND` and
    /// `$DIR` in place of what is another one at each start.
    pub command: Option<String>,
    /// gate's control socket.
    pub control: Option<PathBuf>,
    // Dropped in this order: what gate leaves behind on purpose is removed after
    // it has ended.
    child: Option<Child>,
    scratch: Option<Scratch>,
    /// Sockets that keep the proxy in the state that its role needs.
    held: Vec<OwnedFd>,
}

impl Peer {
    /// Every way to the server, gate first.
    #[must_use]
    pub fn all(gate: &Path, kernel: &str) -> Vec<Self> {
        let peer = |(name, kind): (&str, Kind)| Self {
            name: name.to_owned(),
            kind,
            by_unix: false,
        };
        let gate = Self::gate("gate", gate, kernel);
        let others = [
            ("haproxy", Kind::Haproxy),
            ("pgbouncer", Kind::Pgbouncer),
            ("nginx", Kind::Nginx),
            ("tokio", Kind::Tokio),
            ("tokio-uring", Kind::TokioUring),
            ("direct", Kind::Direct),
        ];
        std::iter::once(gate)
            .chain(others.into_iter().map(peer))
            .collect()
    }

    /// gate as a program of some build, under a name of its own.
    #[must_use]
    pub fn gate(name: &str, program: &Path, kernel: &str) -> Self {
        Self {
            name: name.to_owned(),
            kind: Kind::Gate {
                program: program.to_owned(),
                kernel: kernel.to_owned(),
            },
            by_unix: false,
        }
    }

    /// The same, with the server on a unix socket; `None` of those that are not
    /// measured so.
    #[must_use]
    pub fn by_unix(&self) -> Option<Self> {
        let able = matches!(
            self.kind,
            Kind::Gate { .. } | Kind::Haproxy | Kind::Pgbouncer
        );
        able.then(|| Self {
            name: format!("{}-unix", self.name),
            kind: self.kind.clone(),
            by_unix: true,
        })
    }

    /// What the installed program says of its version.
    ///
    /// # Errors
    /// Why it cannot be measured on this machine.
    pub fn version(&self) -> Result<String> {
        match &self.kind {
            Kind::Direct => Ok(direct::VERSION.to_owned()),
            Kind::Gate { program, .. } => gate::version(program),
            Kind::Haproxy => haproxy::version(),
            Kind::Pgbouncer => pgbouncer::version(),
            Kind::Nginx => nginx::version(),
            Kind::Tokio => baseline::version(Runtime::Tokio),
            Kind::TokioUring => baseline::version(Runtime::TokioUring),
        }
    }

    /// Why it cannot play a role, such as a proxy that knows no users; `None` if
    /// it can.
    #[must_use]
    pub fn cannot(&self, role: Role) -> Option<&'static str> {
        match &self.kind {
            Kind::Direct => direct::cannot(role),
            Kind::Gate { kernel, .. } => gate::cannot(role, kernel),
            Kind::Haproxy => haproxy::cannot(role),
            Kind::Pgbouncer => pgbouncer::cannot(role),
            Kind::Nginx => nginx::cannot(role),
            Kind::Tokio | Kind::TokioUring => None,
        }
    }

    /// What it does otherwise than the others, where making sessions is measured.
    #[must_use]
    pub fn note(&self) -> Option<&'static str> {
        (self.kind == Kind::Pgbouncer).then_some(pgbouncer::NOTE)
    }

    /// How many of so many CPUs it can use.
    #[must_use]
    pub fn cpus_usable(&self, cpus: usize) -> usize {
        match self.kind {
            Kind::Pgbouncer => cpus.min(1),
            _ => cpus,
        }
    }

    /// Starts it; it accepts connections when this returns.
    ///
    /// # Errors
    /// It does not start, with what it said.
    pub fn start(&self, job: &Job) -> Result<Proxy> {
        if let Some(reason) = self.cannot(job.role) {
            bail!("{}: {reason}", self.name);
        }
        match &self.kind {
            Kind::Direct => Ok(direct::start(job)),
            Kind::Gate { program, kernel } => gate::start(program, kernel, job),
            Kind::Haproxy => launch::start("haproxy", job, haproxy::command),
            Kind::Pgbouncer => launch::start("pgbouncer", job, pgbouncer::command),
            Kind::Nginx => launch::start("nginx", job, nginx::command),
            Kind::Tokio => baseline::start(Runtime::Tokio, job),
            Kind::TokioUring => baseline::start(Runtime::TokioUring, job),
        }
    }
}

impl Proxy {
    /// Whether it still runs; no proxy always does.
    ///
    /// # Errors
    /// It has ended, with what it said.
    pub fn ensure_runs(&mut self) -> Result<()> {
        if let Some(child) = &mut self.child
            && child.has_ended()?
        {
            bail!("it ended under the load:\n{}", self.log());
        }
        Ok(())
    }

    /// Copies its configuration into a folder.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn keep_config(&self, folder: &Path) -> Result<()> {
        match &self.scratch {
            Some(scratch) => scratch.copy_files(CONFIGS, folder),
            None => Ok(()),
        }
    }
}

impl Job {
    /// How many workers, threads or processes a proxy has.
    fn workers(&self) -> usize {
        match self.cpus.len() {
            0 => self.unbound_workers,
            bound => bound,
        }
    }

    /// Where the server is, as gate's command line has it.
    fn backend_word(&self) -> String {
        match &self.backend_socket {
            Some(socket) => socket.display().to_string(),
            None => self.backend.to_string(),
        }
    }

    /// Sessions, with some to spare for those that are ending.
    fn sessions_max(&self) -> usize {
        self.sessions + 64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub fn job() -> Job {
        Job {
            backend: "127.0.0.1:5432".parse().unwrap(),
            backend_socket: None,
            listen: [127, 0, 0, 1].into(),
            namespace: None,
            role: Role::Relay,
            cpus: Vec::new(),
            unbound_workers: 1,
            sessions: 10,
        }
    }

    /// The configurations of one role, by peer, without comments.
    fn configs(role: Role, cpus: &[usize]) -> [String; 4] {
        let cpus = cpus.to_vec();
        let job = Job {
            role,
            cpus,
            ..job()
        };
        let (address, file) = ("[::1]:7777".parse().unwrap(), Path::new("/a/file"));
        let configs = [
            gate::config(&job),
            haproxy::config(&job, address),
            pgbouncer::config(&job, address, file),
            nginx::config(&job, address, file),
        ];
        configs.map(|text| {
            let text = text.unwrap();
            let lines = text.lines().map(str::trim);
            let lines = lines.filter(|line| !line.starts_with(['#', ';']) && !line.is_empty());
            lines.collect::<Vec<_>>().join("\n")
        })
    }

    #[test]
    fn templates_fit_and_differ_by_role_and_cpus() {
        let relay = configs(Role::Relay, &[]);
        let bound = configs(Role::Relay, &[1, 3]);
        let polite = configs(Role::RefusePolitely, &[]);
        let hard = configs(Role::RefuseHard, &[]);
        let [gate, haproxy, pgbouncer, nginx] = &relay;
        for (config, setting) in [
            (gate, "max_connections = 74"),
            (gate, "pin = \"none\""),
            (haproxy, "bind [::1]:7777 backlog 4096"),
            (haproxy, "maxconn 74"),
            (pgbouncer, "listen_addr = ::1\nlisten_port = 7777"),
            (pgbouncer, "max_client_conn = 74\ndefault_pool_size = 74"),
            (nginx, "listen [::1]:7777 reuseport"),
            (nginx, "load_module /a/file;"),
            (&bound[0], "pin = \"cpus\""),
            (&bound[1], "nbthread 2\ncpu-map auto:1/1-2 1 3"),
            (
                &bound[3],
                "worker_processes 2;\nworker_cpu_affinity 10 1000;",
            ),
            (&polite[0], "[limits.user]\nrefused = \"none\""),
            (&polite[2], "max_client_conn = 0"),
            (&hard[0], "ceiling = \"none\"\nover_headroom = 1"),
            (&hard[1], "tcp-request connection reject"),
            (&hard[3], "deny all;"),
        ] {
            assert!(config.contains(setting), "no {setting:?} in:\n{config}");
        }
        let all = relay.concat();
        for setting in ["reject", "deny", "refused", "cpu-map", "affinity"] {
            assert!(!all.contains(setting), "{setting:?} in:\n{all}");
        }
    }

    #[test]
    fn a_unix_socket_is_named_as_each_of_them_names_it() {
        let job = Job {
            backend_socket: Some("/run/x/.s.PGSQL.5432".into()),
            unbound_workers: 3,
            ..job()
        };
        let address = "[::1]:7777".parse().unwrap();
        let haproxy = haproxy::config(&job, address).unwrap();
        assert!(haproxy.contains("server backend unix@/run/x/.s.PGSQL.5432"));
        assert!(haproxy.contains("nbthread 3"));
        let pgbouncer = pgbouncer::config(&job, address, Path::new("/a")).unwrap();
        assert!(pgbouncer.contains("* = host=/run/x port=5432"));
        assert_eq!(job.backend_word(), "/run/x/.s.PGSQL.5432");
        let unix = Peer::all(Path::new("gate"), "off");
        let unix: Vec<_> = unix.iter().filter_map(Peer::by_unix).collect();
        let names: Vec<_> = unix.iter().map(|peer| peer.name.as_str()).collect();
        assert_eq!(names, ["gate-unix", "haproxy-unix", "pgbouncer-unix"]);
    }

    #[test]
    fn only_who_can_refuse_hard_is_asked_to() {
        let able = |kernel: &str| -> Vec<String> {
            Peer::all(Path::new("gate"), kernel)
                .into_iter()
                .filter(|peer| peer.cannot(Role::RefuseHard).is_none())
                .map(|peer| peer.name)
                .collect()
        };
        let always = ["haproxy", "nginx", "tokio", "tokio-uring"];
        assert_eq!(able("off"), always);
        assert_eq!(able("auto")[0], "gate");
        assert_eq!(able("auto")[1..], always);
    }
}
