//! The running control plane, over real sockets.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use serde_json::{Value, json};

use super::super::{Control, ControlError, End, start};
use super::Fixture;
use crate::config::{ConfigSource, Flags};
use crate::session::outcome::Reason;
use crate::state::Phase;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    flags: Flags,
}

/// A control plane in a directory of its own.
struct Server {
    gate: Fixture,
    control: Option<Control>,
    directory: tempfile::TempDir,
}

impl Server {
    fn start(limits: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let toml = Self::toml(directory.path(), limits);
        let file = directory.path().join("gate.toml");
        std::fs::write(&file, &toml).expect("written");
        let gate = Fixture::new(&toml);
        let line = ["gate".as_ref(), "--config".as_ref(), file.as_os_str()];
        let source = ConfigSource::new(Line::parse_from(line).flags);
        let control = start(Arc::clone(&gate.state), source, None).expect("started");
        Self {
            gate,
            control: Some(control),
            directory,
        }
    }

    fn toml(directory: &Path, limits: &str) -> String {
        let control = directory.join("control.sock");
        format!(
            "control = {control:?}\nadmin = \"127.0.0.1:0\"\n{limits}\n[timeouts]\ndrain = \"10s\"\n"
        )
    }

    fn rewrite(&self, limits: &str) {
        let toml = Self::toml(self.directory.path(), limits);
        std::fs::write(self.directory.path().join("gate.toml"), toml).expect("written");
    }

    fn append(&self, line: &str) {
        let path = self.directory.path().join("gate.toml");
        let text = std::fs::read_to_string(&path).expect("read");
        std::fs::write(path, text + line).expect("written");
    }

    fn socket(&self, request: &str, body: &str) -> (u16, String) {
        let stream = UnixStream::connect(self.directory.path().join("control.sock"));
        exchange(stream.expect("connected"), request, body)
    }

    fn admin(&self, request: &str) -> (u16, String) {
        let address = self
            .control
            .as_ref()
            .and_then(Control::admin)
            .expect("bound");
        exchange(
            std::net::TcpStream::connect(address).expect("connected"),
            request,
            "",
        )
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.socket(&format!("POST {path}"), &body.to_string());
        (
            status,
            serde_json::from_str(&text).unwrap_or(Value::String(text)),
        )
    }

    fn wait(&mut self) -> End {
        self.control
            .take()
            .expect("running")
            .wait()
            .expect("no panic")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(control) = self.control.take() {
            control.handle().stop();
            let _ = control.wait();
        }
    }
}

fn exchange(mut stream: impl Read + Write, request: &str, body: &str) -> (u16, String) {
    let head = format!(
        "{request} HTTP/1.1\r\nHost: gate\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    let status = answer
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok())
        .expect("a status");
    let body = answer.split_once("\r\n\r\n").expect("a head").1;
    (status, body.to_owned())
}

#[test]
fn the_admin_address_reads_and_changes_nothing() {
    let mut server = Server::start("");
    assert_eq!(server.admin("GET /healthz"), (200, "ok\n".to_owned()));
    assert_eq!(server.admin("GET /readyz"), (503, "starting\n".to_owned()));
    server.gate.state.advance(Phase::Serving);
    assert_eq!(server.admin("GET /readyz"), (200, "ready\n".to_owned()));
    let (status, text) = server.admin("GET /metrics");
    assert!(status == 200 && text.ends_with("# EOF\n"), "{text}");
    let (status, text) = server.admin("GET /connections");
    let connections: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(
        (status, &connections["total"]["limit"]),
        (200, &json!(5000))
    );
    for request in [
        "POST /drain",
        "POST /limits/set",
        "GET /status",
        "POST /healthz",
    ] {
        let (status, _) = server.admin(request);
        assert!(status == 404 || status == 405, "{request}: {status}");
    }
    server.gate.state.advance(Phase::Draining);
    assert_eq!(server.admin("GET /readyz"), (503, "draining\n".to_owned()));
    server.control.as_ref().expect("running").handle().stop();
    assert_eq!(server.wait(), End::Stopped);
}

#[test]
fn silent_connections_keep_nobody_from_the_admin_address() {
    let server = Server::start("");
    let address = server
        .control
        .as_ref()
        .and_then(Control::admin)
        .expect("bound");
    let silent: Vec<_> = (0..40)
        .map(|_| std::net::TcpStream::connect(address).expect("connected"))
        .collect();
    let begun = std::time::Instant::now();
    assert_eq!(server.admin("GET /healthz").0, 200);
    assert!(
        begun.elapsed() < Duration::from_secs(2),
        "{:?}",
        begun.elapsed()
    );
    drop(silent);
}

#[test]
fn limits_are_set_through_the_control_socket() {
    let mut server = Server::start("");
    let set = json!({"key": "user", "name": "app", "value": "1"});
    let (status, entry) = server.post("/limits/set", &set);
    assert_eq!(status, 200);
    assert_eq!(
        entry,
        json!({"key": "user", "name": "app", "limit": 1, "used": 0, "source": "runtime"})
    );
    server.gate.admit(b"app", b"d").expect("admitted");
    assert_eq!(server.gate.admit(b"app", b"d"), Err(Reason::User));
    let (_, text) = server.socket("GET /status", "");
    let status: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(
        status["limited"],
        json!([{"scope": "user", "names": ["app"]}])
    );
    assert_eq!(status["runtime_limits"], json!(1));
    assert_eq!(status["process"]["pid"], json!(std::process::id()));
    server.gate.state.stats[1].pinned(3);
    server.gate.state.stats[1].accepted();
    server.gate.state.stats[1].holds(1);
    let (_, text) = server.socket("GET /status", "");
    let status: Value = serde_json::from_str(&text).expect("JSON");
    // The count keeps its key.
    assert_eq!(status["process"]["workers"], json!(2));
    assert_eq!(
        status["process"]["worker_loads"],
        json!([
            {"worker": 0, "cpu": null, "queue": [], "irq": [], "accepted": 0, "connections": 0},
            {"worker": 1, "cpu": 3, "queue": [], "irq": [], "accepted": 1, "connections": 1},
        ])
    );
    let (status, failure) = server.post("/limits/set", &json!({"key": "user", "value": "1"}));
    assert_eq!(status, 422);
    assert!(
        failure["error"]
            .as_str()
            .is_some_and(|error| error.contains("needs a name"))
    );
    let (status, _) = server.post("/limits/unset", &json!({"key": "user", "name": "app"}));
    assert_eq!(status, 200);
    assert_eq!(server.gate.admit(b"app", b"d"), Ok(()));
}

#[test]
fn a_reload_changes_limits_and_keeps_every_count() {
    let mut server = Server::start("[limits.user]\napp = 2\nold = 1");
    for _ in 0..2 {
        server.gate.admit(b"app", b"d").expect("admitted");
    }
    server.rewrite("[limits.user]\napp = 1");
    let (status, reloaded) = server.post("/reload", &Value::Null);
    assert_eq!((status, reloaded), (200, json!({"waiting": []})));
    let connections = server.gate.connections();
    assert_eq!(connections.by_user["app"].active, 2, "nobody is cut");
    assert_eq!(server.gate.admit(b"app", b"d"), Err(Reason::User));
    assert!(
        !connections.by_user.contains_key("old"),
        "an old limit is gone"
    );

    server.rewrite("[limits.user]\napp = \"many\"");
    let (status, failure) = server.post("/reload", &Value::Null);
    assert_eq!(status, 422);
    assert!(
        failure["error"]
            .as_str()
            .is_some_and(|error| error.contains("many")),
        "{failure}"
    );
    assert_eq!(
        server.gate.admit(b"app", b"d"),
        Err(Reason::User),
        "the old limits stay"
    );

    server.rewrite("[limits.user]\napp = 3\n[[listener]]\naddress = \"127.0.0.1:7777\"");
    server.append("auth = \"7s\"");
    let (status, reloaded) = server.post("/reload", &Value::Null);
    assert_eq!((status, reloaded), (200, json!({"waiting": ["listener"]})));
    assert_eq!(server.gate.admit(b"app", b"d"), Ok(()));
    let config = server.gate.state.config();
    assert_eq!(
        config.listeners[0].address.port(),
        6432,
        "the running listener"
    );
}

#[test]
fn a_drain_ends_when_the_last_session_has_ended() {
    let mut server = Server::start("");
    server.gate.state.advance(Phase::Serving);
    server.gate.admit(b"app", b"d").expect("admitted");
    let (status, draining) = server.post("/drain", &Value::Null);
    assert_eq!(
        (status, draining),
        (200, json!({"active": 1, "deadline_seconds": 10}))
    );
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(server.gate.state.phase(), Phase::Draining);
    assert_eq!(
        server.admin("GET /readyz").0,
        503,
        "still served while a session is left"
    );
    server.gate.close_all();
    assert_eq!(server.wait(), End::Drained);
    assert!(!server.directory.path().join("control.sock").exists());
}

#[test]
fn an_address_in_use_names_the_cure() {
    let first = Server::start("");
    let address = first
        .control
        .as_ref()
        .and_then(Control::admin)
        .expect("bound");
    let directory = tempfile::tempdir().expect("a directory");
    let control = directory.path().join("control.sock");
    let gate = Fixture::new(&format!("control = {control:?}\nadmin = \"{address}\""));
    let error = start(Arc::clone(&gate.state), ConfigSource::default(), None).expect_err("in use");
    assert!(matches!(error, ControlError::Admin { .. }) && error.to_string().contains("--admin"));
    assert!(!control.exists(), "nothing is left behind");
}
