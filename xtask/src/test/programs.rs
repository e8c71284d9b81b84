//! Test programs: built by cargo in one go, then run one after the other.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::PACKAGES;
use super::report::{Parser, Report};
use crate::host;

/// One executable made by `cargo test --no-run`.
#[derive(Debug, PartialEq, Eq)]
pub struct TestProgram {
    package: String,
    package_dir: PathBuf,
    target: String,
    is_integration: bool,
    executable: PathBuf,
}

/// Builds gate, gatectl and every test program.
pub fn build(root: &Path) -> Result<Vec<TestProgram>> {
    host::run(
        host::cargo()
            .current_dir(root)
            .args(["build", "--bins"])
            .args(PACKAGES),
    )?;
    let mut command = host::cargo();
    command
        .current_dir(root)
        .args([
            "test",
            "--no-run",
            "--message-format",
            "json-render-diagnostics",
        ])
        .args(PACKAGES);
    eprintln!("+ {}", host::command_line(&command));
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    ensure!(output.status.success(), "cargo: {}", output.status);
    let messages = String::from_utf8_lossy(&output.stdout);
    Ok(messages.lines().filter_map(test_program).collect())
}

impl TestProgram {
    /// Whether this is the integration test of that name in `tests/tests`.
    pub fn is_tier(&self, name: &str) -> bool {
        self.is_integration && self.package == "gate-tests" && self.target == name
    }

    /// Whether this is the model check of the token arithmetic.
    pub fn is_model(&self) -> bool {
        self.is_integration && self.package == "gate-common" && self.target == "model"
    }

    /// Runs it in its package's folder, as cargo does, for `time_max` at most.
    pub fn run(&self, filter: Option<&str>, time_max: Duration) -> Report {
        let mut command = Command::new(&self.executable);
        command
            .current_dir(&self.package_dir)
            .env("CARGO_MANIFEST_DIR", &self.package_dir)
            .args(filter);
        if let Ok(target) = host::target_dir() {
            command.env("GATE_BIN_DIR", target.join("debug"));
        }
        let name = format!("{} {}", self.package, self.target);
        Watched::new(&name, time_max).run(&mut command)
    }
}

/// A test program that is watched: its output is passed on and read, its time is bounded.
pub struct Watched<'a> {
    name: &'a str,
    time_max: Duration,
}

impl<'a> Watched<'a> {
    /// A program of that name.
    pub fn new(name: &'a str, time_max: Duration) -> Self {
        Self { name, time_max }
    }

    /// Runs it to its end, or kills it when its time is over.
    pub fn run(&self, command: &mut Command) -> Report {
        println!("\n-- {}: {}", self.name, host::command_line(command));
        let mut parser = Parser::new(self.name);
        let status = self.watch(command, &mut parser);
        let ended_well = match &status {
            Ok(status) => status.success(),
            Err(error) => {
                println!("{}: {error:#}", self.name);
                false
            }
        };
        parser.finish(ended_well)
    }

    fn watch(&self, command: &mut Command, parser: &mut Parser) -> Result<ExitStatus> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start it")?;
        let stdout = child.stdout.take().context("its output is not piped")?;
        let (send, lines) = mpsc::channel();
        // Not joined: a process that the test left behind may keep the pipe open for ever.
        thread::spawn(move || read_lines(stdout, |line| send.send(line).is_ok()));
        self.follow(&mut child, &lines, parser)
    }

    /// Passes lines on until the program has ended and said everything.
    fn follow(
        &self,
        child: &mut Child,
        lines: &mpsc::Receiver<String>,
        parser: &mut Parser,
    ) -> Result<ExitStatus> {
        let deadline = Instant::now() + self.time_max;
        let mut ended = None;
        loop {
            match lines.recv_timeout(Duration::from_millis(200)) {
                Ok(line) => {
                    parser.line(&line);
                    println!("{line}");
                }
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) if ended.is_some() => break,
                Err(RecvTimeoutError::Timeout) => ended = child.try_wait()?,
            }
            if Instant::now() > deadline {
                child.kill()?;
                child.wait()?;
                bail!("killed: it ran for more than {} s", self.time_max.as_secs());
            }
        }
        match ended {
            Some(status) => Ok(status),
            None => Ok(child.wait()?),
        }
    }
}

/// Test output may hold bytes that are not UTF-8; they must not end the reading.
fn read_lines(stream: impl Read, mut take: impl FnMut(String) -> bool) {
    let mut reader = BufReader::new(stream);
    let mut bytes = Vec::new();
    while reader.read_until(b'\n', &mut bytes).is_ok_and(|n| n > 0) {
        let line = String::from_utf8_lossy(&bytes);
        if !take(line.trim_end_matches(['\n', '\r']).to_owned()) {
            return;
        }
        bytes.clear();
    }
}

/// The test program that one line of cargo's JSON messages announces, if it does.
fn test_program(line: &str) -> Option<TestProgram> {
    let message: Value = serde_json::from_str(line).ok()?;
    if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
        return None;
    }
    let target = &message["target"];
    let manifest = Path::new(message["manifest_path"].as_str()?);
    let package_dir = manifest.parent()?;
    Some(TestProgram {
        package: package_name(message["package_id"].as_str()?, package_dir),
        package_dir: package_dir.to_owned(),
        target: target["name"].as_str()?.to_owned(),
        is_integration: target["kind"][0] == "test",
        executable: message["executable"].as_str()?.into(),
    })
}

/// `path+file:///src/tests#gate-tests@0.1.0` and `path+file:///src/gate#0.1.0` are both usual.
fn package_name(id: &str, package_dir: &Path) -> String {
    let fragment = id.rsplit_once('#').map_or("", |(_, fragment)| fragment);
    match fragment.split_once('@') {
        Some((name, _)) => name.to_owned(),
        None => package_dir
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_messages_name_the_programs() {
        let line = r#"{"reason":"compiler-artifact","package_id":"path+file:///src/tests#gate-tests@0.1.0",
            "manifest_path":"/src/tests/Cargo.toml","target":{"kind":["test"],"name":"e2e"},
            "profile":{"test":true},"executable":"/t/debug/deps/e2e-1"}"#;
        let program = test_program(line).unwrap();
        assert!(program.is_tier("e2e") && !program.is_tier("kernel"));
        assert_eq!(program.package_dir, Path::new("/src/tests"));
        assert!(!program.is_model());
        let model = line
            .replace("gate-tests", "gate-common")
            .replace("e2e\"", "model\"");
        assert!(test_program(&model).unwrap().is_model());
        let library = line.replace(r#""test":true"#, r#""test":false"#);
        assert_eq!(test_program(&library), None);
        assert_eq!(test_program("not json"), None);
        assert_eq!(
            package_name("path+file:///src/gate#0.1.0", Path::new("/src/gate")),
            "gate"
        );
    }

    #[test]
    fn output_is_read_and_a_hang_is_ended() {
        let said = "printf 'test a ... ok\\ntest result: ok. 1 passed; 0 failed; 0 ignored;\\n'";
        let mut command = Command::new("sh");
        let report = Watched::new("sh", Duration::from_secs(10)).run(command.args(["-c", said]));
        assert_eq!((report.passed, report.failed.len()), (1, 0));

        let mut command = Command::new("sleep");
        let started = Instant::now();
        let report = Watched::new("sleep", Duration::from_millis(300)).run(command.arg("30"));
        assert_eq!(report.failed, ["sleep: the program died"]);
        assert!(started.elapsed() < Duration::from_secs(10));
    }
}
