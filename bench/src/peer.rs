//! The proxies that a comparison starts and ends.

mod child;

use std::fs;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use child::Child;

/// What HAProxy runs with; the fairest that we know.
const HAPROXY_CONFIG: &str = include_str!("../peers/haproxy.cfg");
/// A proxy listens by then, or never.
const READY_WITHIN: Duration = Duration::from_secs(15);

/// A proxy that accepts connections; ends when dropped if it was started here.
pub struct Proxy {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its process.
    pub pid: u32,
    /// How it was started; `None` if it ran already.
    pub command: Option<String>,
    child: Option<Child>,
    scratch: Option<Scratch>,
}

impl Proxy {
    /// One that runs already.
    #[must_use]
    pub fn running(address: SocketAddr, pid: u32) -> Self {
        Self {
            address,
            pid,
            command: None,
            child: None,
            scratch: None,
        }
    }

    /// HAProxy in front of a server.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn haproxy(program: &str, backend: SocketAddr) -> Result<Self> {
        let address = free_address()?;
        let scratch = Scratch::new("haproxy", None)?;
        let config = scratch.folder.join("haproxy.cfg");
        fs::write(&config, HAPROXY_CONFIG)?;
        let mut command = Command::new(program);
        command
            .args(["-db", "-f"])
            .arg(&config)
            .env("BENCH_LISTEN", address.to_string())
            .env("BENCH_BACKEND", backend.to_string());
        Self::start(address, command, scratch)
    }

    /// gate in front of a server, as an instance of its own.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn gate(program: &Path, backend: SocketAddr, kernel: &str) -> Result<Self> {
        let address = free_address()?;
        let instance = format!("bench-{}", std::process::id());
        let scratch = Scratch::new("gate", Some(&instance))?;
        let mut command = Command::new(program);
        command
            .args(["--listen", &address.to_string()])
            .args(["--backend", &backend.to_string()])
            .args([
                "--instance",
                &instance,
                "--admin",
                "off",
                "--kernel",
                kernel,
            ])
            .arg("--control")
            .arg(scratch.folder.join("control.sock"));
        Self::start(address, command, scratch)
    }

    fn start(address: SocketAddr, mut command: Command, scratch: Scratch) -> Result<Self> {
        let shown = shown(&command);
        let log = fs::File::create(scratch.folder.join("log"))?;
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let mut child = Child::spawn(command).with_context(|| format!("cannot start {shown}"))?;
        let begin = Instant::now();
        while TcpStream::connect(address).is_err() {
            let ended = child.has_ended()?;
            if ended || begin.elapsed() > READY_WITHIN {
                let log = fs::read_to_string(scratch.folder.join("log")).unwrap_or_default();
                let what = if ended { "ended" } else { "does not listen" };
                bail!("{shown} {what}:\n{log}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(Self {
            address,
            pid: child.id(),
            command: Some(shown),
            child: Some(child),
            scratch: Some(scratch),
        })
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // In this order: gate's pins are removed after gate has ended.
        drop(self.child.take());
        drop(self.scratch.take());
    }
}

/// A folder of a proxy's own, and what else it leaves behind.
struct Scratch {
    folder: std::path::PathBuf,
    /// gate's instance, whose pinned maps outlive it on purpose.
    instance: Option<String>,
}

impl Scratch {
    fn new(name: &str, instance: Option<&str>) -> Result<Self> {
        let folder = format!("gate-bench-{}-{name}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        // Made, not reused: another user's folder of this name is an error.
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Self {
            folder,
            instance: instance.map(str::to_owned),
        })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let pins = self.instance.take().map(pins_of);
        for folder in [Some(self.folder.clone()), pins].into_iter().flatten() {
            if folder.exists()
                && let Err(error) = fs::remove_dir_all(&folder)
            {
                eprintln!("gate-bench: {} is left behind: {error}", folder.display());
            }
        }
    }
}

fn pins_of(instance: String) -> std::path::PathBuf {
    Path::new("/sys/fs/bpf/gate").join(instance)
}

/// An address that was free a moment ago.
fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?)
}

/// A command as one would type it.
#[must_use]
pub fn shown(command: &Command) -> String {
    let variables = command.get_envs().filter_map(|(name, value)| {
        let (name, value) = (name.to_string_lossy(), value?.to_string_lossy());
        Some(format!("{name}={value}"))
    });
    let program = std::iter::once(command.get_program()).chain(command.get_args());
    let program = program.map(|word| word.to_string_lossy().into_owned());
    variables.chain(program).collect::<Vec<_>>().join(" ")
}
