//! Bulk through pipes, and the way back to small messages.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gate_tests::gate::{self, Gate};
use gate_tests::host;
use gate_tests::pair::{HeldBackend, Pair, Pattern};
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire::Wire;
use socket2::SockRef;

const SOON: Duration = Duration::from_secs(3);
const MIB: usize = 1 << 20;
/// A user that runs nothing else, so that no pipe but those of the test counts.
const LONELY: u32 = 64_987;
/// `fs.pipe-user-pages-soft` and `fs.pipe-max-size` as the kernel sets them.
const SOFT_BYTES: usize = 16_384 * 4096;
const LARGEST_PIPE: usize = MIB;

pub fn register(suite: &mut Suite) {
    suite.both("g3_bulk_both_ways_at_once_arrives_intact", both_ways);
    suite.both("g3_bulk_that_pauses_goes_on_with_small_messages", pauses);
    suite.both(
        "g3_a_reader_that_stalls_in_a_splice_gets_every_byte",
        stalled,
    );
    suite.both(
        "k8_a_reset_in_a_splice_ends_one_session_alone",
        reset_in_splice,
    );
    let missing = without_k6();
    let plane = gate_tests::suite::Plane::Local;
    suite.needing(
        missing,
        plane,
        "k6_where_pipes_shrink_bulk_is_copied",
        small_pipes,
    );
}

fn start(stage: &Stage) -> Result<(Gate, HeldBackend)> {
    let backend = HeldBackend::start()?;
    let gate = Gate::start(stage.plane, backend.address()?, "[workers]\ncount = 2")?;
    Ok((gate, backend))
}

/// Ends of pipes that gate has open.
fn pipes(gate: &Gate) -> Result<usize> {
    host::open_pipes(gate.pid()?)
}

fn joined<T>(handle: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    handle.join().ok().context("a thread panicked")?
}

fn both_ways(stage: &Stage) -> Result<()> {
    const BULK: usize = 40 * MIB;
    let (gate, held) = start(stage)?;
    let Pair { client, backend } = held.open(gate.address(), "app", "prod")?;
    exchange(&client, &backend, BULK)?;
    drop((client, backend));
    gate.wait_empty(SOON)
}

/// Both sides send and read so much at the same time.
fn exchange(
    client: &std::net::TcpStream,
    backend: &std::net::TcpStream,
    count: usize,
) -> Result<()> {
    thread::scope(|scope| {
        let up = scope.spawn(|| Ok(Pattern::new(1).send(client, count)?));
        let down = scope.spawn(|| Ok(Pattern::new(2).send(backend, count)?));
        let at_backend = scope.spawn(|| Pattern::new(1).receive(backend, count));
        let at_client = scope.spawn(|| Pattern::new(2).receive(client, count));
        [up, down, at_backend, at_client]
            .into_iter()
            .try_for_each(joined)
    })
}

fn pauses(stage: &Stage) -> Result<()> {
    let (gate, held) = start(stage)?;
    let Pair { client, backend } = held.open(gate.address(), "app", "prod")?;
    let (mut up, mut down) = (Pattern::new(1), Pattern::new(2));
    let (mut seen_up, mut seen_down) = (Pattern::new(1), Pattern::new(2));
    let mut slowest = Duration::ZERO;
    for round in 0..6 {
        // Small ones first, each answered before the next is sent.
        for size in [1, 5, 100, 4000, 70_000] {
            let start = Instant::now();
            up.send(&client, size)?;
            seen_up.receive(&backend, size)?;
            down.send(&backend, size)?;
            seen_down.receive(&client, size)?;
            slowest = slowest.max(start.elapsed());
        }
        let (bulk_up, bulk_down) = [(0, 5 * MIB), (5 * MIB, 0), (3 * MIB, 3 * MIB)][round % 3];
        thread::scope(|scope| {
            let senders = [
                scope.spawn(|| Ok(up.send(&client, bulk_up)?)),
                scope.spawn(|| Ok(down.send(&backend, bulk_down)?)),
                scope.spawn(|| seen_up.receive(&backend, bulk_up)),
            ];
            seen_down.receive(&client, bulk_down)?;
            senders.into_iter().try_for_each(joined)
        })?;
    }
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    // A pipe is of the bulk, not of the session.
    let before = pipes(&gate)?;
    assert!(before <= 16, "{before} ends of pipes for a silent session");
    drop((client, backend));
    gate.wait_empty(SOON)
}

fn stalled(stage: &Stage) -> Result<()> {
    const BULK: usize = 24 * MIB;
    let (gate, held) = start(stage)?;
    let before = pipes(&gate)?;
    let Pair { client, backend } = held.open(gate.address(), "app", "prod")?;
    let mut seen = Pattern::new(5);
    thread::scope(|scope| {
        let sender = scope.spawn(|| Ok(Pattern::new(5).send(&backend, BULK)?));
        seen.receive(&client, 6 * MIB)?;
        host::eventually_true(SOON, "bulk goes through a pipe", || {
            Ok(pipes(&gate)? >= before + 2)
        })?;
        thread::sleep(Duration::from_millis(300));
        let spent = gate.usage()?.cpu;
        thread::sleep(Duration::from_millis(700));
        let spent = gate.usage()?.cpu - spent;
        assert!(spent <= Duration::from_millis(100), "{spent:?} for nothing");
        // Small sips, then all of it.
        for _ in 0..50 {
            seen.receive(&client, 10_000)?;
            thread::sleep(Duration::from_millis(2));
        }
        seen.receive(&client, BULK - seen.position)?;
        joined(sender)
    })?;
    // The other direction is as before.
    Pattern::new(6).send(&client, 1000)?;
    Pattern::new(6).receive(&backend, 1000)?;
    drop((client, backend));
    gate.wait_empty(SOON)
}

fn reset_in_splice(stage: &Stage) -> Result<()> {
    const BULK: usize = 6 * MIB;
    let (mut gate, held) = start(stage)?;
    // K4, as the documentation says: two workers, control, takeover, two of gate.
    let threads = 6;
    host::eventually_true(SOON, "all threads run", || {
        Ok(gate.usage()?.threads == threads)
    })?;
    let pairs: Result<Vec<_>> = (0..12)
        .map(|_| held.open(gate.address(), "app", "prod"))
        .collect();
    thread::scope(|scope| {
        let mut streams = Vec::new();
        for (number, pair) in pairs?.into_iter().enumerate() {
            let seed = number as u64;
            let Pair { client, backend } = pair;
            // Of each three: one client resets, one backend does, one goes on.
            let fate = number % 3;
            scope.spawn(move || {
                let sent = Pattern::new(seed).send(&backend, BULK);
                if fate == 1 {
                    SockRef::from(&backend).set_linger(Some(Duration::ZERO))?;
                }
                sent
            });
            streams.push(scope.spawn(move || {
                let mut seen = Pattern::new(seed);
                match fate {
                    0 => {
                        seen.receive(&client, MIB)?;
                        SockRef::from(&client).set_linger(Some(Duration::ZERO))?;
                    }
                    1 => drop(seen.receive_to_reset(&client)),
                    _ => ensure!(seen.receive_all(&client)? == BULK, "{}", seen.position),
                }
                Ok(())
            }));
        }
        streams.into_iter().try_for_each(joined)
    })?;
    assert!(gate.is_running(), "no signal ends gate");
    assert_eq!(gate.usage()?.threads, threads, "no threads appear");
    gate.wait_empty(SOON)?;
    let left = pipes(&gate)?;
    held.forget();
    assert!(left <= 64, "{left} ends of pipes are kept");
    let Pair { client, backend } = held.open(gate.address(), "app", "prod")?;
    exchange(&client, &backend, 2 * MIB)
}

/// What the machine lacks for a user whose pipes are used up.
fn without_k6() -> Option<String> {
    let is = |name: &str, expected: usize| {
        let said = fs::read_to_string(format!("/proc/sys/fs/{name}")).unwrap_or_default();
        said.trim() == expected.to_string()
    };
    let usual = is("pipe-user-pages-soft", SOFT_BYTES / 4096) && is("pipe-max-size", LARGEST_PIPE);
    let fits = host::is_root() && usual;
    (!fits).then(|| "needs root and the kernel's own settings of pipes".into())
}

/// A gate of a user who has as many pipes as he may have.
struct Poor {
    child: Child,
    address: SocketAddr,
    _directory: tempfile::TempDir,
}

impl Drop for Poor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Poor {
    fn start(backend: SocketAddr) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let program = gate::copy_for_everybody(directory.path())?;
        let address: SocketAddr = (Ipv4Addr::LOCALHOST, host::free_port()).into();
        let mut command = Command::new(program);
        command
            .args(["--instance", &host::unique_name("poor"), "--kernel", "off"])
            .args(["--listen", &address.to_string(), "--admin", "off"])
            .args(["--backend", &backend.to_string()])
            .arg("--control")
            .arg(directory.path().join("run").join("control.sock"))
            .stdin(Stdio::null())
            .stdout(fs::File::create(directory.path().join("log"))?)
            .stderr(Stdio::null())
            .uid(LONELY)
            .gid(LONELY);
        // SAFETY: runs between fork and exec, after the setuid, in a process with
        // one thread, and makes system calls only.
        unsafe {
            command.pre_exec(|| {
                use_up_pipes()?;
                host::die_with_parent(libc::SIGKILL)
            });
        }
        let poor = Self {
            child: command.spawn()?,
            address,
            _directory: directory,
        };
        host::eventually(SOON, "it listens", || Ok(Some(Wire::connect(address)?)))?;
        Ok(poor)
    }
}

/// Leaves the calling process with as many pipes as its user may have.
fn use_up_pipes() -> std::io::Result<()> {
    for _ in 0..SOFT_BYTES / LARGEST_PIPE {
        let mut ends = [0; 2];
        // SAFETY: the kernel writes two descriptors into a live array.
        let made = unsafe { libc::pipe(ends.as_mut_ptr()) };
        // SAFETY: a call on a descriptor that was just made.
        let got = unsafe { libc::fcntl(ends[1], libc::F_SETPIPE_SZ, LARGEST_PIPE as libc::c_int) };
        if made != 0 || got < 0 {
            // The last of them need not fit.
            break;
        }
    }
    Ok(())
}

fn small_pipes(_: &Stage) -> Result<()> {
    let held = HeldBackend::start()?;
    let poor = Poor::start(held.address()?)?;
    let before = host::open_pipes(poor.child.id())?;
    assert!(before >= 100, "{before} ends of pipes to begin with");
    let Pair { client, backend } = held.open(poor.address, "app", "prod")?;
    let mut seen = Pattern::new(5);
    thread::scope(|scope| {
        let sender = scope.spawn(|| Ok(Pattern::new(5).send(&backend, 20 * MIB)?));
        seen.receive(&client, 4 * MIB)?;
        thread::sleep(Duration::from_millis(200));
        let now = host::open_pipes(poor.child.id())?;
        ensure!(now == before, "a pipe is used: {now}, not {before}");
        seen.receive(&client, 16 * MIB)?;
        joined(sender)
    })?;
    exchange(&client, &backend, 10 * MIB)
}
