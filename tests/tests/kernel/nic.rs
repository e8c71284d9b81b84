//! `pin = "nic:DEVICE"` on a virtual device of two queues.
//!
//! Gate's end is here in the jail, the clients' in a namespace of its own. A
//! client on CPU k sends by a queue that gate's end steers to the other CPU, so
//! that a worker on the client's CPU is not right by chance.

use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use gate_tests::kernel::jail;
use gate_tests::kernel::net::pin_to_cpu;
use gate_tests::{binaries, host};
use serde_json::{Value, json};

use crate::Test;

pub const TESTS: &[Test] = &[(
    "nic_each_worker_gets_the_connections_of_its_queue",
    queues_and_workers,
)];

const DEVICE: &str = "gate0";
const CLIENTS_DEVICE: &str = "load0";
const ADDRESS: &str = "198.18.0.1:26432";
const SOON: Duration = Duration::from_secs(10);

fn queues_and_workers() -> Result<()> {
    ensure!(
        thread::available_parallelism()?.get() >= 2,
        "needs two CPUs"
    );
    jail::show_devices()?;
    let clients = Clients::start()?;
    let folder = tempfile::tempdir()?;
    // Queue N goes to the CPU that no client of queue N runs on.
    set("gate0/queues/rx-0/rps_cpus", "2")?;
    unsteered_is_refused(folder.path())?;
    set("gate0/queues/rx-1/rps_cpus", "1")?;
    let gate = Gate::start(folder.path())?;
    let workers = gate.workers()?;
    let map = |key: &str| -> Vec<Value> { workers.iter().map(|each| each[key].clone()).collect() };
    ensure!(map("cpu") == [1, 0], "{workers:?}");
    ensure!(map("queue") == [json!([0]), json!([1])], "{workers:?}");
    let mut expected = [0, 0];
    for (cpu, count) in [(0, 20), (1, 35), (0, 5), (1, 1)] {
        clients.connect(cpu, count)?;
        expected[cpu] += count as u64;
        host::eventually_true(SOON, &format!("{expected:?} are accepted"), || {
            let workers = gate.workers()?;
            let accepted: Vec<_> = workers.iter().map(|w| w["accepted"].as_u64()).collect();
            if accepted != expected.map(Some) {
                bail!("{workers:?}");
            }
            Ok(true)
        })?;
    }
    Ok(())
}

/// A queue without a CPU ends gate with exit code 3, its name and the cure.
fn unsteered_is_refused(folder: &Path) -> Result<()> {
    let mut command = Gate::command(folder)?;
    let output = host::run(command.stdout(Stdio::null()), SOON)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(3), "{}: {said}", output.status);
    let cure = "/sys/class/net/gate0/queues/rx-1/rps_cpus";
    ensure!(
        said.contains("queue 1 of gate0") && said.contains(cure),
        "{said}"
    );
    Ok(())
}

/// Writes a file of a device.
fn set(file: &str, value: &str) -> Result<()> {
    let path = Path::new("/sys/class/net").join(file);
    fs::write(&path, value).with_context(|| path.display().to_string())
}

fn ip(arguments: &str) -> Result<()> {
    let program = host::find_program("ip").context("needs `ip` (iproute2)")?;
    let mut command = Command::new(program);
    let output = host::run(command.args(arguments.split(' ')), SOON)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {arguments}: {said}");
    Ok(())
}

/// The thread of the clients, in their namespace.
struct Clients {
    wanted: Sender<(usize, usize)>,
    done: Receiver<Result<()>>,
}

impl Clients {
    /// Makes both ends of the device.
    fn start() -> Result<Self> {
        let (wanted, requests) = channel();
        let (answers, done) = channel();
        let (name, named) = channel();
        thread::spawn(move || {
            let ready = jail::enter_new_network().and_then(|()| jail::show_devices());
            // SAFETY: no arguments.
            let thread = unsafe { libc::gettid() };
            if answers.send(ready).is_ok() && name.send(thread).is_ok() {
                Self::serve(&requests, &answers);
            }
        });
        done.recv()??;
        let thread: i32 = named.recv()?;
        // The first sending queue is not used: its number is not recorded.
        let queues = "numrxqueues 2 numtxqueues 3";
        ip(&format!(
            "link add name {DEVICE} {queues} type veth peer name {CLIENTS_DEVICE} {queues} netns {thread}"
        ))?;
        ip(&format!("address add 198.18.0.1/30 dev {DEVICE}"))?;
        ip(&format!("link set {DEVICE} up"))?;
        let clients = Self { wanted, done };
        clients.connect(0, 0)?;
        Ok(clients)
    }

    /// Connects so many clients from a CPU; they stay. The first call sets up
    /// their end.
    fn connect(&self, cpu: usize, count: usize) -> Result<()> {
        self.wanted.send((cpu, count))?;
        self.done.recv()?
    }

    fn serve(requests: &Receiver<(usize, usize)>, answers: &Sender<Result<()>>) {
        let mut open = Vec::new();
        for (cpu, count) in requests {
            let done = if count == 0 {
                Self::set_up()
            } else {
                Self::open(cpu, count).map(|clients| open.push(clients))
            };
            if answers.send(done).is_err() {
                return;
            }
        }
    }

    /// CPU k sends by queue k + 1, which comes in at queue k.
    fn set_up() -> Result<()> {
        ip(&format!("address add 198.18.0.2/30 dev {CLIENTS_DEVICE}"))?;
        ip(&format!("link set {CLIENTS_DEVICE} up"))?;
        for (queue, mask) in [(0, "0"), (1, "1"), (2, "2")] {
            set(
                &format!("{CLIENTS_DEVICE}/queues/tx-{queue}/xps_cpus"),
                mask,
            )?;
        }
        // The neighbour must be known: a SYN that waits for its address is sent by
        // whatever CPU learns it. Nobody listens at that port.
        let refused = TcpStream::connect_timeout(&"198.18.0.1:9".parse()?, SOON);
        ensure!(refused.is_err(), "somebody listens");
        Ok(())
    }

    fn open(cpu: usize, count: usize) -> Result<Vec<TcpStream>> {
        pin_to_cpu(cpu)?;
        let connect = |_| TcpStream::connect_timeout(&ADDRESS.parse()?, SOON).context("connect");
        (0..count).map(connect).collect()
    }
}

/// The program, pinned to the queues of the device.
struct Gate {
    child: Child,
    control: String,
}

impl Gate {
    fn start(folder: &Path) -> Result<Self> {
        let log = fs::File::create(folder.join("log"))?;
        let mut command = Self::command(folder)?;
        command.stdout(log.try_clone()?).stderr(log);
        let gate = Self {
            child: command.spawn().context("start gate")?,
            control: Self::control(folder),
        };
        let ready = host::eventually_true(SOON, "gate is ready", || {
            Ok(gate.status()?["state"] == "serving")
        });
        ready.with_context(|| fs::read_to_string(folder.join("log")).unwrap_or_default())?;
        Ok(gate)
    }

    fn command(folder: &Path) -> Result<Command> {
        let file = folder.join("gate.toml");
        let text = format!(
            "instance = \"nic\"\nkernel = \"required\"\nadmin = \"off\"\ncontrol = \"{}\"\n\
             [[listener]]\naddress = \"{ADDRESS}\"\n[workers]\npin = \"nic:{DEVICE}\"\n\
             [timeouts]\nstartup = \"60s\"\n",
            Self::control(folder)
        );
        fs::write(&file, text)?;
        let mut command = Command::new(binaries::gate()?);
        command.arg("--config").arg(file).stdin(Stdio::null());
        Ok(command)
    }

    fn control(folder: &Path) -> String {
        folder.join("control.sock").to_string_lossy().into_owned()
    }

    fn status(&self) -> Result<Value> {
        let mut command = Command::new(binaries::gatectl()?);
        command.args(["--control", &self.control, "--instance", "nic"]);
        let output = host::run(command.args(["status", "--json"]), SOON)?;
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    fn workers(&self) -> Result<Vec<Value>> {
        let status = self.status()?;
        let loads = status["process"]["worker_loads"].as_array();
        Ok(loads.cloned().unwrap_or_default())
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
