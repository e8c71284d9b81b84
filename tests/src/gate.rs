//! A gate under test: its configuration, process, logs and pins.

use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::host::{self, Cgroup, Usage};
use crate::suite::{self, Plane};
use crate::{binaries, seccomp, session};

/// How long a start may take; the kernel plane loads programs and probes.
const START_LIMIT: Duration = Duration::from_secs(15);

/// How to start a gate.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Value of `--kernel`.
    pub kernel: String,
    /// Where the default backend listens: an address or a directory, or several
    /// with commas between them.
    pub backend: String,
    /// More of the configuration: `[limits]`, `[timeouts]`, `[database.x]`.
    pub settings: String,
    /// RLIMIT_NOFILE, soft and hard.
    pub nofile: Option<u64>,
    /// What io_uring_setup(2) answers in place of a ring.
    pub io_uring: Option<i32>,
    /// Instance and control socket of another gate, which keeps its pins.
    pub twin_of: Option<(String, PathBuf)>,
    /// NOTIFY_SOCKET: where systemd would listen.
    pub notify: Option<PathBuf>,
    /// Whether its programs run in the cgroup of the tests, at everybody's sockets,
    /// and not in one of its own.
    pub in_our_cgroup: bool,
}

impl Plan {
    /// A gate on this plane in front of this backend, with `settings` as TOML.
    #[must_use]
    pub fn new(plane: Plane, backend: SocketAddr, settings: &str) -> Self {
        Self {
            kernel: plane.flag().into(),
            backend: backend.to_string(),
            settings: settings.into(),
            nofile: None,
            io_uring: None,
            twin_of: None,
            notify: None,
            in_our_cgroup: false,
        }
    }
}

/// A gate, running or not; dropped, it leaves no process and no pins.
#[derive(Debug)]
pub struct Gate {
    plan: Plan,
    instance: String,
    control: PathBuf,
    directory: TempDir,
    cgroup: Option<Cgroup>,
    port: u16,
    admin_port: u16,
    child: Option<Child>,
    log: Arc<Mutex<Vec<String>>>,
    readers: Vec<JoinHandle<()>>,
}

impl Gate {
    /// Starts a gate and waits until it is ready.
    ///
    /// # Errors
    /// When it ends or is not ready in time; the log is in the error.
    pub fn start(plane: Plane, backend: SocketAddr, settings: &str) -> Result<Self> {
        Self::start_plan(Plan::new(plane, backend, settings))
    }

    /// Starts a gate by plan and waits until it is ready.
    ///
    /// # Errors
    /// As [`Gate::start`].
    pub fn start_plan(plan: Plan) -> Result<Self> {
        let mut gate = Self::prepare(plan)?;
        gate.launch()?;
        Ok(gate)
    }

    /// Everything but the process: ports, instance, cgroup, configuration.
    ///
    /// # Errors
    /// When a file or the cgroup cannot be made.
    pub fn prepare(plan: Plan) -> Result<Self> {
        let own = host::unique_name(host::INSTANCE_PREFIX);
        let directory = tempfile::Builder::new().prefix("gate-e2e-").tempdir()?;
        let kernel = plan.kernel != Plane::Local.flag() && host::is_root();
        let apart = kernel && !plan.in_our_cgroup;
        let cgroup = apart.then(|| Cgroup::make(&own)).transpose()?;
        let (instance, control) = match plan.twin_of.clone() {
            Some(other) => other,
            None => (own, directory.path().join("control.sock")),
        };
        let gate = Self {
            instance,
            control,
            directory,
            cgroup,
            port: host::free_port(),
            admin_port: host::free_port(),
            child: None,
            log: Arc::default(),
            readers: Vec::new(),
            plan,
        };
        gate.write_configuration()?;
        Ok(gate)
    }

    /// Starts the process (again) and waits until it is ready.
    ///
    /// # Errors
    /// As [`Gate::start`].
    pub fn launch(&mut self) -> Result<()> {
        self.launch_with(&[])
    }

    /// Starts the process with more arguments and waits until it is ready.
    ///
    /// # Errors
    /// As [`Gate::start`].
    pub fn launch_with(&mut self, arguments: &[&str]) -> Result<()> {
        if let Err(error) = self.launch_and_wait(arguments) {
            // Not in `drop`: a prepared gate that was never ready has no report.
            bail!("{error:#}\n{}", self.report());
        }
        Ok(())
    }

    /// Starts the process with more arguments and waits for its end.
    ///
    /// # Errors
    /// When it does not end within 15 s.
    pub fn launch_expecting_exit(&mut self, arguments: &[&str]) -> Result<ExitStatus> {
        self.spawn(arguments)?;
        self.wait_exit(START_LIMIT)
    }

    /// Replaces the settings in the configuration file and sends SIGHUP.
    ///
    /// # Errors
    /// When the file cannot be written or gate does not run.
    pub fn reload(&mut self, settings: &str) -> Result<()> {
        self.plan.settings = settings.into();
        self.write_configuration()?;
        self.signal(libc::SIGHUP)
    }

    /// Where clients connect.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Where HTTP answers.
    #[must_use]
    pub fn admin_address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.admin_port).into()
    }

    /// Name of the instance.
    #[must_use]
    pub fn instance(&self) -> &str {
        &self.instance
    }

    /// Path of the control socket.
    #[must_use]
    pub fn control(&self) -> &Path {
        &self.control
    }

    /// Path of the configuration file.
    #[must_use]
    pub fn configuration(&self) -> PathBuf {
        self.directory.path().join("gate.toml")
    }

    /// Logs in through gate without a password.
    ///
    /// # Errors
    /// How the login ended instead.
    pub fn open(&self, user: &str, database: &str) -> Result<session::Session, session::OpenError> {
        session::Session::open(self.address(), user, database)
    }

    /// The process id.
    ///
    /// # Errors
    /// When gate does not run.
    pub fn pid(&self) -> Result<u32> {
        Ok(self.child.as_ref().context("gate does not run")?.id())
    }

    /// CPU time, memory, descriptors and threads.
    ///
    /// # Errors
    /// When gate does not run.
    pub fn usage(&self) -> Result<Usage> {
        Usage::of(self.pid()?)
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// When gate does not run.
    pub fn signal(&self, number: i32) -> Result<()> {
        Ok(host::signal(self.pid()?, number)?)
    }

    /// SIGKILL, and waits until the process is gone.
    ///
    /// # Errors
    /// When gate does not run.
    pub fn kill(&mut self) -> Result<()> {
        self.signal(libc::SIGKILL)?;
        self.wait_exit(Duration::from_secs(10)).map(drop)
    }

    /// Waits for the end of the process.
    ///
    /// # Errors
    /// When it does not end within `limit`.
    pub fn wait_exit(&mut self, limit: Duration) -> Result<ExitStatus> {
        let child = self.child.as_mut().context("gate does not run")?;
        let status = host::wait_for_exit(child, limit)?
            .with_context(|| format!("gate did not end within {limit:?}"))?;
        self.child = None;
        // Its last words are in the log when this returns.
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        Ok(status)
    }

    /// Whether the process lives.
    pub fn is_running(&mut self) -> bool {
        let child = self.child.as_mut();
        child.is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// All lines logged so far, over all starts.
    #[must_use]
    pub fn log(&self) -> Vec<String> {
        self.log.lock().map(|log| log.clone()).unwrap_or_default()
    }

    /// How many logged lines contain a text.
    #[must_use]
    pub fn logged(&self, text: &str) -> usize {
        self.log().iter().filter(|line| line.contains(text)).count()
    }

    /// Another process takes over from the running one, which is returned.
    ///
    /// # Errors
    /// As [`Gate::start`], and when gate does not run.
    pub fn take_over(&mut self, arguments: &[&str]) -> Result<Old> {
        let old = self.step_aside()?;
        let arguments: Vec<&str> = ["--takeover"].iter().chain(arguments).copied().collect();
        self.launch_with(&arguments)?;
        Ok(old)
    }

    /// Another process begins to take over and fails, by itself or killed after
    /// a while. Returns how it ended, and whether it had taken over: the
    /// running process is whichever is in charge.
    ///
    /// # Errors
    /// When it does not end, or gate does not run.
    pub fn take_over_and_fail(
        &mut self,
        arguments: &[&str],
        killed_after: Option<Duration>,
    ) -> Result<(ExitStatus, Option<Old>)> {
        const TAKEN: &str = "another gate has taken over";
        let before = self.logged(TAKEN);
        let mut old = self.step_aside()?;
        let arguments: Vec<&str> = ["--takeover"].iter().chain(arguments).copied().collect();
        self.spawn(&arguments)?;
        if let Some(delay) = killed_after {
            thread::sleep(delay);
            self.signal(libc::SIGKILL)?;
        }
        let status = self.wait_exit(START_LIMIT)?;
        if self.logged(TAKEN) > before {
            return Ok((status, Some(old)));
        }
        self.child = old.child.take();
        self.readers = std::mem::take(&mut old.readers);
        Ok((status, None))
    }

    fn step_aside(&mut self) -> Result<Old> {
        Ok(Old {
            child: Some(self.child.take().context("gate does not run")?),
            readers: std::mem::take(&mut self.readers),
        })
    }

    fn write_configuration(&self) -> Result<()> {
        let text = format!(
            "instance = \"{}\"\n[[listener]]\naddress = \"{}\"\n[backend.default]\naddresses = [\"{}\"]\n{}\n",
            self.instance,
            self.address(),
            self.plan.backend.replace(", ", "\", \""),
            self.plan.settings
        );
        fs::write(self.configuration(), text)?;
        Ok(())
    }

    fn launch_and_wait(&mut self, arguments: &[&str]) -> Result<()> {
        let seen = self.log().len();
        self.spawn(arguments)?;
        host::eventually(START_LIMIT, "gate is ready", || {
            if self.log().iter().skip(seen).any(|line| says_ready(line)) {
                return Ok(Some(true));
            }
            Ok((!self.is_running()).then_some(false))
        })?
        .then_some(())
        .context("gate ended before it was ready")
    }

    fn spawn(&mut self, arguments: &[&str]) -> Result<()> {
        let mut command = Command::new(binaries::gate()?);
        command
            .arg("--config")
            .arg(self.configuration())
            .args(["--instance", &self.instance])
            .args(["--kernel", &self.plan.kernel])
            .arg("--control")
            .arg(self.control())
            .args(["--admin", &self.admin_address().to_string()])
            .args(["--log-format", "json"])
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        if let Some(notify) = &self.plan.notify {
            command.env("NOTIFY_SOCKET", notify);
        }
        let processes = self.cgroup.as_ref().map(Cgroup::processes);
        let Plan {
            nofile, io_uring, ..
        } = self.plan;
        // SAFETY: runs between fork and exec in a process with one thread. It
        // makes system calls; opening the path may allocate, which is sound
        // after fork with glibc, whose allocator is fork-safe.
        unsafe {
            command.pre_exec(move || {
                if let Some(path) = &processes {
                    OpenOptions::new().write(true).open(path)?.write_all(b"0")?;
                }
                nofile.map_or(Ok(()), limit_files)?;
                io_uring.map_or(Ok(()), seccomp::refuse_io_uring)?;
                host::die_with_parent(libc::SIGKILL)
            });
        }
        let mut child = command.spawn().context("start gate")?;
        self.keep_lines(child.stdout.take());
        self.keep_lines(child.stderr.take());
        self.child = Some(child);
        Ok(())
    }

    fn keep_lines<R: Read + Send + 'static>(&mut self, source: Option<R>) {
        let Some(source) = source else { return };
        let log = Arc::clone(&self.log);
        let reader = thread::spawn(move || {
            for line in BufReader::new(source).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                if let Ok(mut log) = log.lock() {
                    log.push(line);
                }
            }
        });
        self.readers.push(reader);
    }

    fn report(&self) -> String {
        let settings = fs::read_to_string(self.configuration()).unwrap_or_default();
        let log = self.log();
        let tail = log[log.len().saturating_sub(40)..].join("\n");
        format!("--- configuration\n{settings}--- log of gate\n{tail}\n---")
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
        suite::attach(self.report());
        if self.plan.twin_of.is_none() {
            host::remove_pins(&self.instance);
        }
    }
}

/// A process from which another one has taken over; killed when dropped.
#[derive(Debug)]
pub struct Old {
    child: Option<Child>,
    readers: Vec<JoinHandle<()>>,
}

impl Old {
    /// Whether the process lives.
    pub fn is_running(&mut self) -> bool {
        let child = self.child.as_mut();
        child.is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// What `kill(2)` says.
    pub fn signal(&self, number: i32) -> Result<()> {
        let child = self.child.as_ref().context("it was given back")?;
        Ok(host::signal(child.id(), number)?)
    }

    /// Waits for the end of the process.
    ///
    /// # Errors
    /// When it does not end within `limit`.
    pub fn wait_exit(&mut self, limit: Duration) -> Result<ExitStatus> {
        let child = self.child.as_mut().context("it was given back")?;
        let status = host::wait_for_exit(child, limit)?
            .with_context(|| format!("the old gate did not end within {limit:?}"))?;
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        Ok(status)
    }
}

impl Drop for Old {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Copies the programs to a place that every user can reach.
///
/// # Errors
/// When the copy fails.
pub fn copy_for_everybody(directory: &Path) -> Result<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(directory, fs::Permissions::from_mode(0o777))?;
    let copy = directory.join("gate");
    // Not fs::copy: another test's fork would hold the copy open for writing,
    // and the kernel does not execute such a file.
    let mut cp = Command::new("cp");
    cp.arg(binaries::gate()?).arg(&copy);
    host::run(&mut cp, Duration::from_secs(10))?;
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755))?;
    Ok(copy)
}

/// The line `ready`, in JSON as tracing writes it or with a flat layout.
fn says_ready(line: &str) -> bool {
    let Ok(line) = serde_json::from_str::<serde_json::Value>(line) else {
        return false;
    };
    [&line["fields"]["message"], &line["message"]]
        .iter()
        .any(|message| message.as_str() == Some("ready"))
}

fn limit_files(count: u64) -> std::io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: count,
        rlim_max: count,
    };
    // SAFETY: setrlimit reads one live struct.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}
