//! Each kernel test runs in a process of its own, inside a jail: a cgroup, a
//! network namespace and a bpf file system that nobody else sees. Everything
//! it makes is gone when the process is, however it ended.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

/// Environment: the cgroup that the jailed process joins.
const CGROUP: &str = "GATE_TEST_CGROUP";
/// Longer than any test takes; a hung test must not hang the run.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Why privileged tests cannot run here, if they cannot.
#[must_use]
pub fn missing_rights() -> Option<String> {
    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return Some("needs root".into());
    }
    let parent = own_cgroup().err().map(|error| error.to_string());
    parent.or_else(|| {
        let cgroup = TestCgroup::create().err()?;
        Some(format!("needs a writable cgroup2: {cgroup:#}"))
    })
}

/// Runs `arguments` of this very program inside a jail. An error carries what
/// it printed.
///
/// # Errors
/// It failed, or took longer than two minutes.
pub fn run(arguments: &[&str]) -> Result<()> {
    let cgroup = TestCgroup::create()?;
    let output = tempfile::tempfile()?;
    let mut child = Command::new(std::env::current_exe()?)
        .args(arguments)
        .env(CGROUP, &cgroup.path)
        .stdin(Stdio::null())
        .stdout(output.try_clone()?)
        .stderr(output.try_clone()?)
        // Its own group, so that its helpers can be ended with it.
        .process_group(0)
        .spawn()?;
    let end = Instant::now() + TIMEOUT;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break Some(status),
            None if Instant::now() > end => break None,
            None => thread::sleep(Duration::from_millis(5)),
        }
    };
    // SAFETY: a group that this process made; it may be empty by now.
    unsafe { libc::killpg(child.id().cast_signed(), libc::SIGKILL) };
    if status.is_none() {
        child.wait()?;
    }
    match status {
        Some(status) if status.success() => Ok(()),
        Some(status) => bail!("{status}\n{}", text(output)?),
        None => bail!("no end within {TIMEOUT:?}\n{}", text(output)?),
    }
}

/// Enters the jail. Call it first, while the process has one thread.
///
/// # Errors
/// A right is missing.
pub fn enter() -> Result<PathBuf> {
    let cgroup = PathBuf::from(std::env::var_os(CGROUP).context("not started by `run`")?);
    join(&cgroup)?;
    // SAFETY: flags only.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) }).context("unshare")?;
    mount(None, Path::new("/"), None, libc::MS_REC | libc::MS_PRIVATE)?;
    mount(Some("bpf"), Path::new("/sys/fs/bpf"), Some("bpf"), 0)?;
    loopback_up()?;
    Ok(cgroup)
}

/// Has /sys show the network devices of the calling thread's namespace, which
/// must have a mount namespace of its own: sysfs shows those of the namespace
/// that it was mounted in. All else of /sys stays, bpffs and the cgroups above all.
///
/// # Errors
/// A right is missing.
pub fn show_devices() -> Result<()> {
    let own = tempfile::tempdir()?;
    mount(Some("sysfs"), own.path(), Some("sysfs"), 0)?;
    // The second is where the links of the first lead.
    for shown in ["class/net", "devices/virtual/net"] {
        let source = own.path().join(shown);
        let target = Path::new("/sys").join(shown);
        mount(source.to_str(), &target, None, libc::MS_BIND)?;
    }
    let place = std::ffi::CString::new(own.path().to_string_lossy().into_owned())?;
    // SAFETY: a C string that outlives the call.
    check(unsafe { libc::umount2(place.as_ptr(), libc::MNT_DETACH) }).context("umount")
}

/// Moves the calling thread into new network and mount namespaces.
///
/// # Errors
/// A right is missing.
pub fn enter_new_network() -> Result<()> {
    // SAFETY: flags only.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET | libc::CLONE_NEWNS) }).context("unshare")
}

/// Moves this process into a cgroup.
///
/// # Errors
/// The kernel's refusal.
pub fn join(cgroup: &Path) -> Result<()> {
    let file = cgroup.join("cgroup.procs");
    fs::write(&file, "0").with_context(|| format!("write {}", file.display()))
}

/// A cgroup that is removed when dropped, with those below it.
#[derive(Debug)]
struct TestCgroup {
    path: PathBuf,
}

impl TestCgroup {
    fn create() -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = own_cgroup()?.join(format!("gate-test-{}-{number}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("create {}", path.display()))?;
        Ok(Self { path })
    }
}

impl Drop for TestCgroup {
    fn drop(&mut self) {
        // A killed process leaves its cgroup a moment after its end was seen.
        for _ in 0..200 {
            if remove_tree(&self.path).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        eprintln!("cannot remove cgroup {}", self.path.display());
    }
}

/// The control files cannot be unlinked, so `remove_dir_all` does not work.
fn remove_tree(cgroup: &Path) -> io::Result<()> {
    for entry in fs::read_dir(cgroup)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(cgroup)
}

/// The cgroup2 directory of this process.
///
/// # Errors
/// There is none.
pub fn own_cgroup() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let point = mounts
        .lines()
        .find(|line| line.contains(" - cgroup2 "))
        .and_then(|line| line.split(' ').nth(4))
        .context("needs a cgroup2 mount")?;
    let membership = fs::read_to_string("/proc/self/cgroup")?;
    let path = membership
        .lines()
        .find_map(|line| line.strip_prefix("0::/"))
        .context("needs a cgroup2 membership")?;
    Ok(Path::new(point).join(path))
}

fn loopback_up() -> Result<()> {
    #[repr(C)]
    struct Request {
        name: [u8; 16],
        flags: libc::c_short,
        padding: [u8; 22],
    }
    let mut request = Request {
        name: [0; 16],
        flags: (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short,
        padding: [0; 22],
    };
    request.name[..2].copy_from_slice(b"lo");
    let socket = std::net::UdpSocket::bind("0.0.0.0:0")?;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
    // SAFETY: the request is as large as `struct ifreq` (netdevice(7)).
    check(unsafe { libc::ioctl(fd, libc::SIOCSIFFLAGS as _, &raw const request) })
        .context("set lo up")
}

fn mount(
    source: Option<&str>,
    target: &Path,
    kind: Option<&str>,
    flags: libc::c_ulong,
) -> Result<()> {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt as _;
    let source = source.map(CString::new).transpose()?;
    let kind = kind.map(CString::new).transpose()?;
    let place = CString::new(target.as_os_str().as_bytes())?;
    let pointer = |text: &Option<CString>| text.as_ref().map_or(std::ptr::null(), |t| t.as_ptr());
    // SAFETY: C strings that outlive the call, or null where mount(2) allows it.
    check(unsafe {
        libc::mount(
            pointer(&source),
            place.as_ptr(),
            pointer(&kind),
            flags,
            std::ptr::null(),
        )
    })
    .with_context(|| format!("mount on {}", target.display()))
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn text(mut file: fs::File) -> Result<String> {
    use std::io::{Read as _, Seek as _};
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
