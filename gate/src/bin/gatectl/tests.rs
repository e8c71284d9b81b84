//! The command line, and commands against a gate in this process.

use super::*;

use std::sync::Arc;

use clap::CommandFactory;
use gate::config::{Config, ConfigSource};
use gate::control::api::{AcceptQueue, Draining, LimitChange, LimitEntry, Reloaded, Status};
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
    let accepted: [&[&str]; 10] = [
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
    ];
    for line in accepted {
        assert!(parse(line).is_ok(), "{line:?}");
    }
    let refused: [&[&str]; 9] = [
        &[],
        &["limits", "set", "user", "app"],
        &["limits", "set", "user", "app", "4294967296"],
        &["limits", "set", "user", "app", "-1"],
        &["limits", "set", "user", "app", "many"],
        &["limits", "set", "user", "a\\y", "1"],
        &["limits", "set", "user", "", "1"],
        &["limits", "set", "surprise", "1"],
        &["--instance", "A.b", "status"],
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
        let stats = vec![Arc::new(Stats::new(0, 1))];
        let kernel = KernelState::Inactive("no bpffs; mount it".to_owned());
        let state = State::new(
            Arc::new(config),
            Arc::new(ledger),
            Vec::new(),
            stats,
            kernel,
            Vec::new(),
        );
        let control = control::start(Arc::new(state), ConfigSource::default(), None);
        Self {
            control: Some(control.expect("started")),
            directory,
        }
    }

    fn target(&self) -> Target {
        let socket = self.directory.path().join("control.sock");
        Target::new("in-test-without-maps".to_owned(), Some(socket))
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
fn an_instance_that_is_not_there_is_exit_code_4() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("nobody.sock");
    let target = Target::new("in-test-nobody".to_owned(), Some(socket.clone()));
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
