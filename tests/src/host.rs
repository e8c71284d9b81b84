//! The machine the tests run on: rights, ports, processes, mounts, waiting.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

pub use crate::ports::free_port;

/// Whether this is a CI run, where nothing may be skipped.
#[must_use]
pub fn in_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| value == "true" || value == "1")
}

/// Whether the tests run as root.
#[must_use]
pub fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// Why the kernel plane cannot be tested here, or `None` if it can.
#[must_use]
pub fn no_kernel_plane() -> Option<String> {
    if !is_root() {
        return Some("needs root".into());
    }
    if cgroup2_mount().is_none() {
        return Some("needs cgroup2".into());
    }
    bpf_map_is_refused().map(|error| format!("needs BPF: {error}"))
}

/// A program on `PATH`, or where Debian puts servers.
#[must_use]
pub fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|folder| folder.join(name))
        .find(|file| file.is_file())
}

/// Waits until `probe` gives a value, at most `limit`. The error carries what
/// was waited for and the last thing the probe said.
///
/// # Errors
/// When the time is over.
pub fn eventually<T>(
    limit: Duration,
    what: &str,
    mut probe: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let deadline = Instant::now() + limit;
    // A machine that stalls for seconds must not turn one look into a verdict.
    for probes in 1.. {
        let said = probe();
        if let Ok(Some(value)) = said {
            return Ok(value);
        }
        if Instant::now() >= deadline && probes >= 20 {
            let last = match said {
                Err(error) => format!(": {error:#}"),
                Ok(_) => String::new(),
            };
            bail!("not within {limit:?}: {what}{last}");
        }
        thread::sleep(Duration::from_millis(10));
    }
    unreachable!("the loop has no end of its own");
}

/// As [`eventually`], for a condition.
///
/// # Errors
/// When the time is over.
pub fn eventually_true(
    limit: Duration,
    what: &str,
    mut probe: impl FnMut() -> Result<bool>,
) -> Result<()> {
    eventually(limit, what, || Ok(probe()?.then_some(())))
}

/// What every instance of these tests is called first.
pub const INSTANCE_PREFIX: &str = "e2e";

/// A name that no other test of this run or of a run beside it has.
#[must_use]
pub fn unique_name(prefix: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{prefix}-{}-{number}", std::process::id())
}

/// Runs a command, its output captured, and kills it when `limit` is over.
///
/// # Errors
/// When it cannot be started or does not end in time.
pub fn run(command: &mut Command, limit: Duration) -> Result<Output> {
    let shown = format!("{command:?}");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {shown}"))?;
    let stdout = read_in_background(child.stdout.take());
    let stderr = read_in_background(child.stderr.take());
    let status = wait_for_exit(&mut child, limit)?;
    if status.is_none() {
        child.kill()?;
        child.wait()?;
    }
    let output = Output {
        status: status.unwrap_or_default(),
        stdout: stdout.join().unwrap_or_default(),
        stderr: stderr.join().unwrap_or_default(),
    };
    if status.is_none() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        bail!("{shown} did not end within {limit:?}; it said: {said}");
    }
    Ok(output)
}

/// Waits for a child at most `limit`; `None` if it still runs.
///
/// # Errors
/// When the child cannot be waited for.
pub fn wait_for_exit(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Sends a signal to a process that this test started.
///
/// # Errors
/// What `kill(2)` says.
pub fn signal(pid: u32, number: i32) -> io::Result<()> {
    // SAFETY: kill takes no pointers; the pid is a child that was not waited for.
    let answer = unsafe { libc::kill(pid.cast_signed(), number) };
    if answer == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Makes the child die with the thread that starts it, so that a killed test
/// run leaves no server behind. Call inside `pre_exec`, after any setuid.
///
/// # Errors
/// What `prctl(2)` says.
pub fn die_with_parent(number: i32) -> io::Result<()> {
    // SAFETY: PR_SET_PDEATHSIG takes one integer and changes only this process.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, number) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Where cgroup2 is mounted, on unified and hybrid hosts.
#[must_use]
pub fn cgroup2_mount() -> Option<PathBuf> {
    mount_of("cgroup2")
}

/// Where bpffs is mounted, if it is.
#[must_use]
pub fn bpffs_mount() -> Option<PathBuf> {
    mount_of("bpf")
}

/// Removes the pins of an instance: the files first, then the directories.
pub fn remove_pins(instance: &str) {
    if let Some(mount) = bpffs_mount() {
        // A directory of bpffs is removed like any other, pins are files.
        let _ = fs::remove_dir_all(mount.join("gate").join(instance));
    }
}

/// Removes pins and cgroups of runs that were killed before they could.
pub fn remove_leftovers() {
    let places = [
        bpffs_mount().map(|mount| mount.join("gate")),
        cgroup2_mount(),
    ];
    for place in places.into_iter().flatten() {
        for entry in fs::read_dir(&place).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let mut parts = name.split('-');
            let owner = (parts.next() == Some(INSTANCE_PREFIX))
                .then(|| parts.next())
                .flatten();
            let Some(owner) = owner.and_then(|pid| pid.parse::<u32>().ok()) else {
                continue;
            };
            if Path::new("/proc").join(owner.to_string()).exists() {
                continue;
            }
            remove_pins(&name);
            // Not empty if a process of that run still lives: then it stays.
            let _ = fs::remove_dir(place.join(&name));
        }
    }
}

/// A cgroup of a test's own, removed when dropped.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    /// Makes a cgroup under the cgroup2 mount.
    ///
    /// # Errors
    /// When there is no cgroup2 or the directory cannot be made.
    pub fn make(name: &str) -> Result<Self> {
        let path = cgroup2_mount().context("no cgroup2 mount")?.join(name);
        fs::create_dir(&path).with_context(|| format!("make {}", path.display()))?;
        Ok(Self { path })
    }

    /// The file that a process writes "0" to, to move itself in.
    #[must_use]
    pub fn processes(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that was just waited for may linger in the cgroup.
        for _ in 0..100 {
            if fs::remove_dir(&self.path).is_ok() || !self.path.exists() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// What `/proc` says of a process.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// User and system time so far.
    pub cpu: Duration,
    /// Resident memory in bytes.
    pub resident_bytes: u64,
    /// Open file descriptors.
    pub fds: usize,
    /// Threads.
    pub threads: usize,
}

impl Usage {
    /// Reads the figures of a live process.
    ///
    /// # Errors
    /// When the process is gone or `/proc` cannot be read.
    pub fn of(pid: u32) -> Result<Self> {
        let proc = Path::new("/proc").join(pid.to_string());
        let stat = fs::read_to_string(proc.join("stat"))?;
        // The second field is the name in brackets and may hold spaces.
        let after_name = stat.rsplit(") ").next().context("stat")?;
        let fields: Vec<&str> = after_name.split(' ').collect();
        let number = |index: usize| -> Result<u64> {
            Ok(fields.get(index).context("short stat")?.trim().parse()?)
        };
        let ticks = number(11)? + number(12)?;
        Ok(Self {
            // USER_HZ is 100 on every Linux that gate runs on.
            cpu: Duration::from_millis(ticks * 10),
            resident_bytes: number(21)? * 4096,
            fds: fs::read_dir(proc.join("fd"))?.count(),
            threads: fs::read_dir(proc.join("task"))?.count(),
        })
    }
}

/// How many ends of pipes a process has open.
///
/// # Errors
/// When the process is gone or `/proc` cannot be read.
pub fn open_pipes(pid: u32) -> Result<usize> {
    let files = fs::read_dir(format!("/proc/{pid}/fd"))?;
    let links = files.flatten().map(|file| fs::read_link(file.path()));
    // One that was closed meanwhile is no pipe.
    let is_pipe = |link: &PathBuf| link.to_string_lossy().starts_with("pipe:");
    Ok(links.flatten().filter(is_pipe).count())
}

fn mount_of(kind: &str) -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    mounts.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let found = after.split(' ').next()? == kind;
        found.then(|| PathBuf::from(before.split(' ').nth(4).unwrap_or_default()))
    })
}

/// Tries the smallest map there is: BPF may be off, or forbidden even to root.
fn bpf_map_is_refused() -> Option<io::Error> {
    // struct bpf_attr of BPF_MAP_CREATE: type, key size, value size, entries.
    const BPF_MAP_CREATE: libc::c_long = 0;
    const BPF_MAP_TYPE_ARRAY: u32 = 2;
    let attributes: [u32; 4] = [BPF_MAP_TYPE_ARRAY, 4, 8, 1];
    // SAFETY: the kernel reads size_of_val bytes from a live array.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_MAP_CREATE,
            attributes.as_ptr(),
            size_of_val(&attributes),
        )
    };
    if fd < 0 {
        return Some(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and belongs to nobody else.
    unsafe { libc::close(fd as i32) };
    None
}

fn read_in_background<R: Read + Send + 'static>(source: Option<R>) -> thread::JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut source) = source {
            let _ = source.read_to_end(&mut bytes);
        }
        bytes
    })
}
