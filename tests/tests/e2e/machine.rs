//! The machine under gate: descriptors that run out, rights that are missing.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gate_tests::crowd;
use gate_tests::gate::{self, Gate, Plan};
use gate_tests::host;
use gate_tests::session::OpenError;
use gate_tests::suite::{Plane, Stage, Suite};
use gate_tests::wire::Wire;
use serde_json::Value;

const SOON: Duration = Duration::from_secs(3);
/// `nobody` on Debian: a user with no rights at all.
const NOBODY: u32 = 65_534;

pub fn register(suite: &mut Suite) {
    suite.both(
        "h1_out_of_descriptors_neither_spins_nor_stops",
        out_of_descriptors,
    );
    suite.both(
        "h1_more_sessions_than_descriptors_are_refused_politely",
        too_few_descriptors,
    );
    suite.both(
        "h1_a_limit_over_the_descriptors_is_refused_with_the_numbers",
        limits_over_descriptors,
    );
    suite.both(
        "h1_the_default_limit_is_lowered_on_a_small_host",
        default_is_lowered,
    );
    suite.local(
        "l8_without_io_uring_gate_ends_3_and_names_cause_and_cure",
        without_io_uring,
    );
    suite.kernel(
        "l8_gate_finds_its_cgroup_and_counts_from_the_first_socket",
        counts_at_start,
    );
    suite.kernel(
        "l8_without_rights_required_ends_3_and_auto_says_why",
        without_rights,
    );
    suite.kernel("l3_own_backend_sockets_never_touch_the_count", own_sockets);
    suite.kernel(
        "l11_pins_and_programs_survive_restarts_and_count_once",
        restarts,
    );
}

fn out_of_descriptors(stage: &Stage) -> Result<()> {
    let settings = "[limits]\nmax_connections = 20\nmax_pending = 0\nceiling = 2000\n\
                    [timeouts]\nstartup = \"60s\"";
    let mut plan = Plan::new(stage.plane, stage.postgres.address(), settings);
    plan.nofile = Some(256);
    let mut gate = Gate::start_plan(plan)?;
    let mut session = gate.open("app", "prod")?;
    // More sockets than gate has descriptors; it may close some of them.
    let silent: Vec<_> = (0..400)
        .filter_map(|_| Wire::connect(gate.address()).ok())
        .collect();
    thread::sleep(Duration::from_millis(500));
    let before = gate.usage()?.cpu;
    thread::sleep(Duration::from_secs(1));
    let spent = gate.usage()?.cpu - before;
    assert!(
        spent < Duration::from_millis(400),
        "{spent:?} of CPU in a second"
    );
    assert!(gate.is_running());
    assert_eq!(session.value("select 'served'")?, "served");
    // Operators still see and steer it.
    gate.metrics()?;
    assert_eq!(gate.connections()?.active(), 1);
    gate.reload(&format!("{settings}\n[limits.user]\napp = 7"))?;
    gate.wait_connections(SOON, "the reload works", |now| {
        now.user("app").limit == Some(7)
    })?;
    assert!(gate.log().len() < 200, "{} log lines", gate.log().len());
    drop(silent);
    let start = Instant::now();
    let recovered = host::eventually(SOON, "new clients get in again", || {
        Ok(gate.open("guest", "prod").ok())
    })?;
    assert!(start.elapsed() < SOON);
    drop((session, recovered));
    gate.wait_empty(SOON)
}

fn too_few_descriptors(stage: &Stage) -> Result<()> {
    // With a bound on those that are pending some of the storm would be evicted.
    let settings = "[limits]\nmax_connections = 0\nmax_pending = 0";
    let mut plan = Plan::new(stage.plane, stage.postgres.address(), settings);
    plan.nofile = Some(256);
    let mut gate = Gate::start_plan(plan)?;
    let storm = crowd::storm(gate.address(), 200, "app", "prod");
    // Nobody is told to wait for a shutdown or a start: a limit is a limit. A
    // reset is right where not one descriptor is left to answer with.
    for failure in &storm.failures {
        let reset = matches!(failure, OpenError::Io(_));
        ensure!(reset || failure.code() == "53300", "a client saw {failure}");
    }
    let admitted = storm.sessions.len();
    assert!(
        (30..128).contains(&admitted),
        "{admitted} sessions of two descriptors in 256"
    );
    assert!(gate.is_running());
    assert_eq!(gate.connections()?.active(), admitted as i64);
    if stage.plane == Plane::Kernel {
        let ceiling = gate.connections()?.listeners("ceiling");
        assert!(ceiling < 256, "an automatic ceiling of {ceiling}");
    }
    drop(storm);
    gate.wait_empty(SOON)?;
    gate.open("app", "prod")?.close()?;
    gate.wait_empty(SOON)
}

fn limits_over_descriptors(stage: &Stage) -> Result<()> {
    let most = ["5000 sessions need 10000"];
    // Each of them alone would fit.
    let crowd = "[limits]\nmax_connections = 40\nmax_pending = 30\n\
                 default_user = { max = 20, wait = \"1s\", max_waiting = 30 }";
    let beside = [
        "40 sessions need 80",
        "30 pending clients (max_pending) 60",
        "30 waiting clients (max_waiting) 60",
    ];
    let table: [(&str, &str, &[&str]); 4] = [
        (
            "limits.max_connections",
            "[limits]\nmax_connections = 5000",
            &most,
        ),
        ("limits.user.app", "[limits.user]\napp = 5000", &most),
        (
            "limits.max_pending",
            "[limits]\nmax_pending = 5000",
            &["5000 pending clients (max_pending) 10000"],
        ),
        ("limits.max_connections", crowd, &beside),
    ];
    for (path, settings, numbers) in table {
        let mut plan = Plan::new(stage.plane, stage.postgres.address(), settings);
        plan.nofile = Some(256);
        let mut gate = Gate::prepare(plan)?;
        let status = gate.launch_expecting_exit(&[])?;
        let said = gate.log().join("\n");
        assert_eq!(status.code(), Some(2), "{said}");
        let common = [path, "(hard) is 256", "LimitNOFILE="];
        for part in common.iter().chain(numbers) {
            ensure!(said.contains(part), "{part}: {said}");
        }
        // Another host may have enough.
        let status = gate.launch_expecting_exit(&["--check"])?;
        assert_eq!(status.code(), Some(0));
    }
    let mut plan = Plan::new(stage.plane, stage.postgres.address(), "");
    plan.nofile = Some(256);
    let mut gate = Gate::start_plan(plan)?;
    for key in [&["max-connections"][..], &["user", "app"], &["max-pending"]] {
        let set = [&["limits", "set"][..], key, &["5000"]].concat();
        let refused = gate.gatectl_output(&set)?;
        let said = gate_tests::clients::both_streams(&refused);
        assert_eq!(refused.status.code(), Some(1), "{said}");
        ensure!(said.contains("need 10000 of them"), "{said}");
    }
    excess_is_logged(&mut gate)?;
    gate.gatectl(&["limits", "set", "max-connections", "0"])?;
    gate.open("app", "prod")?.close()?;
    Ok(())
}

/// Each limit fits when it is set; then another comes back that was lower.
fn excess_is_logged(gate: &mut Gate) -> Result<()> {
    const EXCESS: &str = "the limits in force are more than the file descriptors";
    let status: Value = serde_json::from_str(&gate.gatectl(&["status", "--json"])?)?;
    let number = |key: &str| status["process"][key].as_u64().context(key.to_owned());
    let most = number("lowered_to")? + number("pending_lowered_to")? - 1;
    gate.gatectl(&["limits", "set", "max-pending", "1"])?;
    gate.gatectl(&["limits", "set", "max-connections", &most.to_string()])?;
    assert_eq!(gate.logged(EXCESS), 0, "{:?}", gate.log());
    // By gatectl, which writes the pinned maps itself where there are some.
    let unset = gate.gatectl_output(&["limits", "unset", "max-pending"])?;
    assert_eq!(unset.status.code(), Some(0), "{unset:?}");
    let told = String::from_utf8_lossy(&unset.stderr).contains(EXCESS);
    let logged = usize::from(!told);
    host::eventually_true(SOON, "the unset is told", || {
        Ok(gate.logged(EXCESS) == logged)
    })?;
    gate.reload("[limits.user]\napp = 7")?;
    host::eventually_true(SOON, "the reload is told", || {
        Ok(gate.logged(EXCESS) == logged + 1)
    })
}

fn default_is_lowered(stage: &Stage) -> Result<()> {
    let mut plan = Plan::new(stage.plane, stage.postgres.address(), "");
    plan.nofile = Some(256);
    let mut gate = Gate::start_plan(plan)?;
    assert_eq!(
        gate.logged("max_connections is lowered from its default"),
        1
    );
    let status = gate.gatectl(&["status"])?;
    ensure!(
        status.contains("lowered         max_connections to "),
        "{status}"
    );
    let limit = gate.metrics()?.sum("gate_connection_limit", &[]);
    assert!(
        (10.0..128.0).contains(&limit),
        "{limit} sessions in 256 descriptors"
    );
    // A limit that can be reached.
    let sessions = gate.open_all(limit as usize, "app", "prod")?;
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    drop(sessions);
    gate.wait_empty(SOON)?;
    let over = "[limits]\nmax_connections = 5000";
    assert!(gate.reload(over).is_ok());
    host::eventually_true(SOON, "the reload is refused", || {
        Ok(gate.logged("not reloaded") == 1)
    })?;
    assert!(gate.is_running());
    Ok(())
}

fn without_io_uring(stage: &Stage) -> Result<()> {
    let table = [
        (
            libc::EPERM,
            ["io_uring is forbidden here", "seccomp profile"],
        ),
        (libc::ENOSYS, ["has no io_uring", "Linux 6.1"]),
        (libc::ENOMEM, ["lock enough memory", "RLIMIT_MEMLOCK"]),
        (libc::EINVAL, ["too old", "Linux 6.1"]),
    ];
    for (errno, parts) in table {
        let mut plan = Plan::new(stage.plane, stage.postgres.address(), "");
        plan.io_uring = Some(errno);
        let mut gate = Gate::prepare(plan)?;
        let status = gate.launch_expecting_exit(&[])?;
        let said = gate.log().join("\n");
        assert_eq!(status.code(), Some(3), "{said}");
        for part in parts {
            ensure!(said.contains(part), "errno {errno}, {part}: {said}");
        }
    }
    Ok(())
}

fn counts_at_start(stage: &Stage) -> Result<()> {
    let gate = Gate::start(stage.plane, stage.postgres.address(), "")?;
    let now = gate.connections()?;
    assert_eq!(now.0["kernel"]["state"], "active");
    assert_eq!(now.listeners("sockets"), 0, "the probe left nothing");
    assert_eq!(gate.metrics()?.sum("gate_kernel_active", &[]), 1.0);
    let _session = gate.open("app", "prod")?;
    assert_eq!(gate.connections()?.listeners("sockets"), 1);
    Ok(())
}

fn without_rights(stage: &Stage) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let program = gate::copy_for_everybody(directory.path())?;
    let port = host::free_port();
    let unprivileged = |kernel: &str| -> Result<Command> {
        let mut command = Command::new(&program);
        command
            .args([
                "--instance",
                &host::unique_name("plain"),
                "--kernel",
                kernel,
            ])
            .args(["--listen", &format!("127.0.0.1:{port}")])
            .args(["--backend", &stage.postgres.address().to_string()])
            .args(["--admin", &format!("127.0.0.1:{}", host::free_port())])
            .arg("--control")
            .arg(directory.path().join(kernel).join("control.sock"))
            .uid(NOBODY)
            .gid(NOBODY);
        Ok(command)
    };
    let required = host::run(&mut unprivileged("required")?, SOON)?;
    let said = gate_tests::clients::both_streams(&required);
    assert_eq!(required.status.code(), Some(3), "{said}");
    assert!(said.contains("CAP_BPF"), "the cure is named: {said}");

    let mut auto = unprivileged("auto")?;
    let log = directory.path().join("log");
    auto.stdout(std::fs::File::create(&log)?)
        .stderr(std::fs::File::options().append(true).open(&log)?);
    let mut child = auto.spawn()?;
    let served = host::eventually(SOON, "gate serves without a kernel plane", || {
        let address = (std::net::Ipv4Addr::LOCALHOST, port).into();
        Ok(Some(gate_tests::session::Session::open(
            address, "app", "prod",
        )?))
    });
    child.kill()?;
    child.wait()?;
    let said = std::fs::read_to_string(&log)?;
    ensure!(served.is_ok(), "{:?}: {said}", served.err());
    ensure!(
        said.contains("kernel plane inactive"),
        "never silently: {said}"
    );
    Ok(())
}

fn own_sockets(stage: &Stage) -> Result<()> {
    // A gate whose backend is another gate: its outgoing sockets go to a port
    // that is itself counted, in a cgroup of the other's.
    let inner = Gate::start(stage.plane, stage.postgres.address(), "")?;
    let outer = Gate::start(stage.plane, inner.address(), "")?;
    let sessions = outer.open_all(5, "app", "prod")?;
    for gate in [&inner, &outer] {
        let now = gate.connections()?;
        assert_eq!(
            (now.active(), now.listeners("sockets")),
            (5, 5),
            "{}",
            gate.instance()
        );
    }
    drop(sessions);
    outer.wait_empty(SOON)?;
    inner.wait_empty(SOON)
}

fn restarts(stage: &Stage) -> Result<()> {
    assert_eq!(stage.plane, Plane::Kernel);
    let mut gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits.user]\napp = 3",
    )?;
    let pins = host::bpffs_mount()
        .expect("gate mounted it")
        .join("gate")
        .join(gate.instance());
    assert!(pins.is_dir());
    for round in 0..3 {
        let sessions = gate.open_all(3, "app", "prod")?;
        let now = gate.connections()?;
        assert_eq!(
            (now.active(), now.listeners("sockets")),
            (3, 3),
            "round {round}"
        );
        assert_eq!(gate.refused("app", "prod")?.code(), "53300");
        gate.kill()?;
        assert!(pins.is_dir(), "enforcement outlives the process");
        drop(sessions);
        gate.launch()?;
    }
    gate.wait_empty(SOON)
}
