//! G4: a machine that is gone, without a FIN or a RST.
//!
//! Gate is here in the jail; the machine that vanishes is a namespace of its
//! own, which loses its address: nothing answers any more, nothing is refused.

use std::io::Write as _;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gate_tests::gate::{Gate, Plan};
use gate_tests::host;
use gate_tests::kernel::jail;
use gate_tests::pair::{HeldBackend, Pair, welcome};
use gate_tests::session::Session;
use gate_tests::suite::Plane;
use gate_tests::wire::{self, Wire};

use crate::Test;

pub const TESTS: &[Test] = &[
    ("g4_a_vanished_client_gives_its_slot_back", vanished_client),
    ("g4_a_vanished_backend_ends_its_sessions", vanished_backend),
];

const SOON: Duration = Duration::from_secs(10);
const NEAR: &str = "198.18.0.1";
const FAR: &str = "198.18.0.2";
const FAR_BACKEND: &str = "198.18.0.2:25432";
/// Options, the time in which they notice, and whether bytes must be in flight.
const TABLE: [(&str, Duration, bool); 3] = [
    // A second of silence, and two questions whose answers are waited for.
    (
        "keepalive = \"1s\"\nkeepalive_interval = \"1s\"\nkeepalive_probes = 2\n\
         user_timeout = \"0s\"",
        Duration::from_secs(3),
        false,
    ),
    // The kernel then counts no questions: `tcp_keepalive_timer` in net/ipv4/tcp_timer.c.
    (
        "keepalive = \"1s\"\nkeepalive_interval = \"1s\"\nkeepalive_probes = 9\n\
         user_timeout = \"2s\"",
        Duration::from_secs(3),
        false,
    ),
    // Silence is never noticed, bytes that nobody takes are: when they are sent
    // again, which is done ever less often.
    (
        "keepalive = \"0s\"\nuser_timeout = \"2s\"",
        Duration::from_millis(4500),
        true,
    ),
];
/// As late as a busy machine may notice.
const GRACE: Duration = Duration::from_secs(2);

fn ip(arguments: &str) -> Result<()> {
    let program = host::find_program("ip").context("needs `ip` (iproute2)")?;
    let mut command = Command::new(program);
    let output = host::run(command.args(arguments.split(' ')), SOON)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {arguments}: {said}");
    Ok(())
}

/// The other machine: a thread in a namespace of its own.
struct Machine {
    jobs: Sender<Box<dyn FnOnce() + Send>>,
}

impl Machine {
    fn start() -> Result<Self> {
        let (jobs, requests) = channel::<Box<dyn FnOnce() + Send>>();
        thread::spawn(move || requests.into_iter().for_each(|job| job()));
        let machine = Self { jobs };
        let thread = machine.run(|| {
            jail::enter_new_network()?;
            // SAFETY: no arguments.
            Ok(unsafe { libc::gettid() })
        })?;
        ip(&format!(
            "link add name near0 type veth peer name far0 netns {thread}"
        ))?;
        ip(&format!("address add {NEAR}/30 dev near0"))?;
        ip("link set near0 up")?;
        machine.run(|| {
            ip("link set far0 up")?;
            appear()
        })?;
        Ok(machine)
    }

    /// Does something there. Its sockets stay there, whoever holds them.
    fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (answer, answered) = channel();
        let job = Box::new(move || drop(answer.send(job())));
        self.jobs.send(job).ok().context("it ended")?;
        answered.recv()?
    }

    /// From now on nothing answers.
    fn vanish(&self) -> Result<Instant> {
        // What is on its way is acknowledged first: a delayed acknowledgement
        // that never comes would leave bytes in flight.
        thread::sleep(Duration::from_millis(300));
        self.run(|| ip(&format!("address del {FAR}/30 dev far0")))?;
        Ok(Instant::now())
    }
}

fn appear() -> Result<()> {
    ip(&format!("address add {FAR}/30 dev far0"))
}

/// Waits until gate has no session; how long that took.
fn slot_back(gate: &Gate, since: Instant) -> Result<Duration> {
    gate.wait_connections(SOON, "the slot is back", |now| now.active() == 0)?;
    Ok(since.elapsed())
}

fn vanished_client() -> Result<()> {
    let machine = Machine::start()?;
    for (plane, table) in [(Plane::Kernel, &TABLE[..]), (Plane::Local, &TABLE[..1])] {
        for &(options, budget, writes) in table {
            let held = HeldBackend::start()?;
            let far: SocketAddr = format!("{NEAR}:{}", host::free_port()).parse()?;
            let settings =
                format!("[[listener]]\naddress = \"{far}\"\n{options}\n[limits.user]\napp = 1");
            let gate = Gate::start(plane, held.address()?, &settings)?;
            let client = open_far(&machine, &held, far)?;
            assert_eq!(gate.refused("app", "prod")?.code(), "53300");
            let since = machine.vanish()?;
            let mut backend = client.backend;
            if writes {
                backend.write_all(&[b'x'; 4000])?;
            }
            // PostgreSQL ends at the FIN; this backend does at its reader's end.
            thread::spawn(move || std::io::copy(&mut backend, &mut std::io::sink()));
            let took = slot_back(&gate, since)?;
            println!("{plane:?}, bytes in flight: {writes}: after {took:?}");
            ensure!(took > Duration::from_millis(1500), "{options}: {took:?}");
            ensure!(took < budget + GRACE, "{options}: {took:?}");
            drop(client.client);
            held.forget();
            machine.run(appear)?;
            let again = open_far(&machine, &held, far)?;
            assert_eq!(gate.connections()?.active(), 1);
            drop(again);
            held.forget();
            gate.wait_empty(SOON)?;
        }
    }
    Ok(())
}

/// A session from the other machine.
fn open_far(machine: &Machine, held: &HeldBackend, gate: SocketAddr) -> Result<Pair> {
    let client = machine.run(move || {
        let mut wire = Wire::connect(gate).context("from afar")?;
        wire.send(&wire::login("app", "prod"))?;
        Ok(wire.stream().try_clone()?)
    })?;
    let mut backend = held.accept()?;
    welcome(&mut backend, &wire::login("app", "prod"))?;
    Ok(Pair { client, backend })
}

fn vanished_backend() -> Result<()> {
    let machine = Machine::start()?;
    for (options, budget, writes) in TABLE {
        let mut plan = Plan::new(Plane::Kernel, FAR_BACKEND.parse()?, "");
        plan.settings = format!("{options}\ncheck = \"0s\"\n[limits.user]\napp = 1");
        let gate = Gate::start_plan(plan)?;
        let address = gate.address();
        let held = machine.run(|| HeldBackend::on(FAR_BACKEND.parse()?))?;
        let (opened, client) = channel();
        thread::spawn(move || opened.send(Session::open(address, "app", "prod")));
        let mut backend = held.accept()?;
        welcome(&mut backend, &wire::login("app", "prod"))?;
        let mut session = client.recv()??;
        assert_eq!(gate.connections()?.active(), 1);
        let since = machine.vanish()?;
        if writes {
            session.wire.send(&wire::query("select 'nobody answers'"))?;
        }
        let took = slot_back(&gate, since)?;
        println!("bytes in flight: {writes}: after {took:?}");
        ensure!(took > Duration::from_millis(1500), "{options}: {took:?}");
        ensure!(took < budget + GRACE, "{options}: {took:?}");
        // As a break, not as an end in order.
        ensure!(session.wire.message().is_err(), "FIN and no RST");
        drop((backend, held));
        machine.run(appear)?;
        gate.wait_empty(SOON)?;
    }
    Ok(())
}
