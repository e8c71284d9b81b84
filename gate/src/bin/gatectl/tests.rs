//! The command line, and commands against a gate in this process.

use super::*;

use std::sync::Arc;

use clap::CommandFactory;
use gate::config::{Config, ConfigSource};
use gate::control::api::{
    AcceptQueue, AddressHealth, Draining, Latencies, LimitChange, LimitEntry, Reloaded, Session,
    Sessions, Status,
};
use gate::control::{self, Control};
use gate::ledger::Ledger;
use gate::state::{KernelState, State};
use gate::stats::Stats;

#[test]
fn the_command_line_is_sound() {
    Line::command().debug_assert();
}

#[test]
fn usage_errors_are_found_before_anything_is_asked() {
    let accepted: [&[&str]; 14] = [
        &["status", "--json"],
        &["--instance", "pg-main", "connections"],
        &["limits", "list"],
        &["limits", "set", "user", "app", "2"],
        &["limits", "set", "user", "caf\\xe9", "none"],
        &["limits", "set", "default-user", "unlimited"],
        &["limits", "set", "ceiling", "127.0.0.1:6432", "500"],
        &["limits", "set", "ceiling", "auto"],
        &["limits", "unset", "user", "app"],
        &["limits", "unset", "ceiling"],
        &["sessions"],
        &["sessions", "--user", "caf\\xe9", "--state", "half_closed"],
        &["sessions", "--source", "::1", "--limit", "5", "--json"],
        &["latency", "--worker", "1", "--hgrm", "loop"],
    ];
    for line in accepted {
        assert!(parse(line).is_ok(), "{line:?}");
    }
    let refused: [&[&str]; 14] = [
        &[],
        &["limits", "set", "user", "app"],
        &["limits", "set", "user", "app", "4294967296"],
        &["limits", "set", "user", "app", "-1"],
        &["limits", "set", "user", "app", "many"],
        &["limits", "set", "user", "a\\y", "1"],
        &["limits", "set", "user", "", "1"],
        &["limits", "set", "surprise", "1"],
        &["--instance", "A.b", "status"],
        &["sessions", "--user", ""],
        &["sessions", "--state", "surprised"],
        &["sessions", "--source", "10.0.0.1:5"],
        &["sessions", "--limit", "-1"],
        &["latency", "--hgrm", "surprise"],
    ];
    for line in refused {
        let error = parse(line).err().unwrap_or_else(|| panic!("{line:?}"));
        assert_eq!(error.exit_code(), 2, "{line:?}");
    }
}

fn parse(line: &[&str]) -> Result<Line, clap::Error> {
    Line::try_parse_from([&["gatectl"], line].concat())
}

/// A gate without workers and without a kernel plane.
struct Gate {
    control: Option<Control>,
    stats: Arc<Stats>,
    directory: tempfile::TempDir,
}

impl Gate {
    fn start() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let socket = directory.path().join("control.sock");
        let text = format!("instance = \"in-test\"\nadmin = \"off\"\ncontrol = {socket:?}");
        let config = Config::from_toml(&text).expect("valid");
        let ledger = Ledger::local();
        ledger.apply_config(&config).expect("limits");
        let stats = Arc::new(Stats::new(0, 1));
        let kernel = KernelState::Inactive("no bpffs; mount it".to_owned());
        let state = State::new(
            Arc::new(config),
            Arc::new(ledger),
            Vec::new(),
            vec![Arc::clone(&stats)],
            kernel,
            Vec::new(),
        );
        let control = control::start(Arc::new(state), ConfigSource::default(), None);
        Self {
            control: Some(control.expect("started")),
            stats,
            directory,
        }
    }

    fn target(&self) -> Target {
        let socket = self.directory.path().join("control.sock");
        Target::new(Some("in-test".to_owned()), Some(socket))
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        if let Some(control) = self.control.take() {
            control.handle().stop();
            let _ = control.wait();
        }
    }
}

fn change(key: &str, name: Option<&str>, value: Option<&str>) -> LimitChange {
    LimitChange {
        key: key.to_owned(),
        name: name.map(str::to_owned),
        value: value.map(str::to_owned),
    }
}

#[test]
fn without_a_kernel_plane_limits_go_through_the_control_socket() {
    let gate = Gate::start();
    let target = gate.target();
    let reached = target.for_limits().expect("reached");
    assert!(matches!(reached, target::Reached::Gate(())));
    let set = change("user", Some("caf\\xe9"), Some("none"));
    let entry: LimitEntry = target.post("/limits/set", Some(&set)).expect("set");
    assert_eq!(
        (entry.source.as_str(), entry.limit.get()),
        ("runtime", gate_common::limit::Limit::None)
    );
    let listed: Vec<LimitEntry> = target
        .read("/limits", |_| unreachable!("gate answers"))
        .expect("listed");
    assert!(listed.contains(&entry));
    let refused = target.post::<LimitEntry>("/limits/set", Some(&change("user", None, Some("1"))));
    let failure = refused.expect_err("no name");
    assert_eq!(failure.exit, target::EXIT_FAILED);
    assert!(
        failure.message.contains("needs a name"),
        "{}",
        failure.message
    );
    // No file: the configuration is the built-in one, which waits for a start.
    let reloaded: Reloaded = target.post("/reload", None::<&()>).expect("reloaded");
    assert_eq!(reloaded.waiting, ["instance", "control", "admin"]);
}

#[test]
fn the_status_is_one_screen() {
    let gate = Gate::start();
    let status: Status = gate.target().status().expect("read");
    assert_eq!(
        (status.instance.as_str(), status.state.as_str()),
        ("in-test", "starting")
    );
    let text = status::text(&status);
    assert!(
        text.contains("inactive: no bpffs; mount it; ceilings are not enforced"),
        "{text}"
    );
    assert!(text.contains("sessions        0 of 5000\n"), "{text}");
    assert!(
        text.contains("WORKER  CPU  QUEUE  IRQ  ACCEPTED  CONNECTIONS\n     0    -      -    -         0            0\n"),
        "{text}"
    );
    assert!(text.lines().count() < 24, "{text}");
}

#[test]
fn a_status_without_an_answer_says_what_the_lock_and_the_maps_say() {
    let gate = Gate::start();
    let mut status: Status = gate.target().status().expect("read");
    status.process = None;
    let mut line = |state: &str| {
        state.clone_into(&mut status.state);
        let text = status::text(&status);
        let line = text.lines().find(|line| line.starts_with("state"));
        line.expect("a line").to_owned()
    };
    assert!(line("down").ends_with("down; the kernel's counts and limits stand"));
    assert!(line(target::UNREACHABLE).ends_with("name its own with --control"));
}

#[test]
fn percentiles_as_text_are_no_json() {
    let gate = Gate::start();
    let options = latency::Options {
        worker: None,
        hgrm: Some("loop".to_owned()),
    };
    let output = Output { json: true };
    let failure = latency::run(&options, &gate.target(), output).expect_err("both");
    assert_eq!(failure.exit, 2);
}

#[test]
fn waiters_are_shown_once_there_were_some() {
    let gate = Gate::start();
    let mut status: Status = gate.target().status().expect("read");
    assert!(!status::text(&status).contains("waiting"));
    let process = status.process.as_mut().expect("it runs");
    process.waiting = 3;
    process.waited = [("admitted".to_owned(), 7), ("left".to_owned(), 1)].into();
    let text = status::text(&status);
    let line = "waiting         3 now; before: admitted 7, left 1\n";
    assert!(text.contains(line), "{text}");
}

#[test]
fn latencies_are_a_table_and_percentiles() {
    let gate = Gate::start();
    for millis in 1..=100 {
        let took = std::time::Duration::from_millis(millis);
        gate.stats.admission_took(took);
    }
    let target = gate.target();
    let read: Latencies = target.ask_gate("/latency?cells=true").expect("read");
    let text = latency::text(&read);
    let line = text.lines().find(|line| line.starts_with("admission"));
    let words: Vec<&str> = line.expect("a line").split_whitespace().collect();
    assert_eq!(words[..2], ["admission", "100"]);
    assert!(
        words[2].starts_with("50") && words[2].ends_with("ms"),
        "{text}"
    );
    assert!(
        words[6].starts_with("100") && words[6].ends_with("ms"),
        "{text}"
    );
    let line = text.lines().find(|line| line.starts_with("ready"));
    assert_eq!(
        line.map(|line| line.split_whitespace().nth(2)),
        Some(Some("-"))
    );
    let text = latency::percentiles(&read.latencies[0]).expect("sound");
    assert!(text.contains("Total count    =          100]"), "{text}");
    let last = text.lines().rfind(|line| !line.starts_with('#'));
    assert!(
        last.expect("lines").contains(" 1.000000000000        100"),
        "{text}"
    );
    let failure = target
        .ask_gate::<Latencies>("/latency?worker=1")
        .expect_err("one worker");
    assert!(
        failure.message.contains("there is no worker 1"),
        "{}",
        failure.message
    );
}

#[test]
fn sessions_are_a_table_that_says_what_it_lacks() {
    let session = Session {
        id: 14,
        user: Some("caf\\xe9".to_owned()),
        database: None,
        source: Some("10.0.0.1:5000".to_owned()),
        backend: Some("default".to_owned()),
        backend_address: Some("127.0.0.1:5432".to_owned()),
        state: "active".to_owned(),
        age_seconds: 3723.5,
        idle_seconds: 1.25,
        bytes_to_backend: 7,
        bytes_to_client: 800,
        worker: 0,
    };
    let mut sessions = Sessions {
        sessions: vec![session],
        found: 1,
        unanswered: Vec::new(),
    };
    let text = sessions::text(&sessions);
    let line = text.lines().nth(1).expect("a row");
    let expected =
        "14  caf\\xe9  -  10.0.0.1:5000  default 127.0.0.1:5432  active  1h 2m 3s  1.2s  7  800";
    let words = |text: &str| {
        text.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(words(line), words(expected));
    assert!(!text.contains("answer") && !text.contains(" of "), "{text}");
    (sessions.found, sessions.unanswered) = (9, vec![3]);
    let text = sessions::text(&sessions);
    assert!(text.contains("the oldest 1 of 9\n"), "{text}");
    assert!(text.contains("worker 3 did not answer"), "{text}");
}

#[test]
fn the_map_of_queues_is_shown_however_many_workers_there_are() {
    let gate = Gate::start();
    let mut status: Status = gate.target().status().expect("read");
    let process = status.process.as_mut().expect("it runs");
    let mut load = process.worker_loads[0].clone();
    process.worker_loads = (0..16)
        .map(|worker| {
            (load.worker, load.cpu) = (worker, Some(worker));
            load.queue = vec![worker as u32, worker as u32 + 16];
            load.irq = vec![24 + worker as u32, 40 + worker as u32];
            load.clone()
        })
        .collect();
    process.accept_queues = vec![AcceptQueue {
        listener: "[::1]:6432".to_owned(),
        length: 3,
        limit: 65_536,
    }];
    let text = status::text(&status);
    assert!(
        text.contains("    15   15  15,31  39,55         0            0\n"),
        "{text}"
    );
    assert!(text.contains("accept queue    3 of 65536 at [::1]:6432\n"));
}

#[test]
fn many_workers_are_one_line_of_the_status() {
    let gate = Gate::start();
    let mut status: Status = gate.target().status().expect("read");
    let process = status.process.as_mut().expect("it runs");
    let mut load = process.worker_loads[0].clone();
    process.worker_loads = (0..64)
        .map(|worker| {
            (load.worker, load.connections) = (worker, 3 + worker as u64);
            load.clone()
        })
        .collect();
    let text = status::text(&status);
    assert!(
        text.contains("\na worker has 3 to 66 connections; "),
        "{text}"
    );
    assert!(text.lines().count() < 24, "{text}");
}

#[test]
fn the_status_shows_each_backend_or_of_many_those_that_are_down() {
    let gate = Gate::start();
    let mut status: Status = gate.target().status().expect("read");
    let text = status::text(&status);
    let row = "default  127.0.0.1:5432  up ";
    assert!(text.contains(row), "{text}");
    let process = status.process.as_mut().expect("it runs");
    let address = process.backends[0].addresses[0].clone();
    process.backends[0].addresses = (0..12)
        .map(|number| AddressHealth {
            address: format!("/run/{number}"),
            up: number != 7,
            ..address.clone()
        })
        .collect();
    let text = status::text(&status);
    assert!(
        text.contains("\n11 of 12 backend addresses are up\n"),
        "{text}"
    );
    let shown = text.lines().filter(|line| line.contains("/run/"));
    assert_eq!(shown.count(), 1, "{text}");
    assert!(text.contains("/run/7   down"), "{text}");
    assert!(text.lines().count() < 24, "{text}");
}

#[test]
fn a_control_socket_of_another_instance_is_refused() {
    let gate = Gate::start();
    let socket = || Some(gate.directory.path().join("control.sock"));
    let its_own = Target::new(None, socket()).status().expect("a status");
    for (instance, is_right) in [
        (None, true),
        (Some(its_own.instance), true),
        (Some("another".to_owned()), false),
    ] {
        let failure = Target::new(instance, socket()).check().err();
        assert_eq!(failure.is_none(), is_right);
        if let Some(failure) = failure {
            assert_eq!(failure.exit, target::EXIT_USAGE);
            assert!(failure.message.contains("`another`"), "{}", failure.message);
        }
    }
}

#[test]
fn the_maps_of_an_instance_that_was_not_named_are_not_read() {
    let directory = tempfile::tempdir().expect("a directory");
    let target = Target::new(None, Some(directory.path().join("nobody.sock")));
    let Err(failure) = target.status() else {
        panic!("somebody is there");
    };
    assert_eq!(failure.exit, target::EXIT_NO_INSTANCE);
    assert!(
        failure.message.contains("--instance"),
        "{}",
        failure.message
    );
}

#[test]
fn an_instance_that_is_not_there_is_exit_code_4() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("nobody.sock");
    let target = Target::new(Some("in-test-nobody".to_owned()), Some(socket.clone()));
    let failures = [
        target.status().err(),
        target.for_limits().err(),
        target.post::<Draining>("/drain", None::<&()>).err(),
    ];
    for failure in failures {
        let failure = failure.expect("nobody is there");
        assert_eq!(
            failure.exit,
            target::EXIT_NO_INSTANCE,
            "{}",
            failure.message
        );
        assert!(
            failure.message.contains("in-test-nobody"),
            "{}",
            failure.message
        );
        assert!(
            failure.message.contains(&socket.display().to_string()),
            "{}",
            failure.message
        );
    }
}
