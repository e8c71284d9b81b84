//! gate itself: started, waited for, watched, ended.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::backend::Backend;
use super::{Args, behind_sudo, built_program};
use crate::scratch::Scratch;
use crate::{child, host, setup, sys};

const READY_TIME_MAX: Duration = Duration::from_secs(30);

/// A running gate; ended when dropped.
pub struct Gate {
    child: Child,
    /// Where its control socket is, if not at the default place.
    control: Option<PathBuf>,
}

impl Gate {
    /// Starts gate and waits for its ready line; `None` if a signal ended the wait.
    pub fn start(args: &Args, backend: &Backend, scratch: &Scratch) -> Result<Option<Self>> {
        let mut command = Command::new(built_program("release", "gate")?);
        if let Some(address) = &backend.address {
            command.args(["--backend", address]);
        }
        let mut control = None;
        if !host::is_root() {
            if args.value_of("--kernel").is_none() {
                explain_no_root();
                command.args(["--kernel", "off"]);
            }
            if args.value_of("--control").is_none() {
                let socket = scratch.path.join("control.sock");
                command.arg("--control").arg(&socket);
                control = Some(socket);
            }
        }
        command.args(&args.gate);
        eprintln!("+ {}", host::command_line(&command));
        let mut child = sys::own_group_and_die_with_parent(&mut command, sys::KILL)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("cannot start gate")?;
        let (send, ready) = mpsc::channel();
        pass_on(child.stdout.take(), send.clone());
        pass_on(child.stderr.take(), send);
        let mut gate = Self { child, control };
        Ok(gate.wait_until_ready(&ready)?.then_some(gate))
    }

    /// Waits for gate's end and passes signals on: Ctrl-C ends it now, SIGTERM drains it.
    pub fn wait(&mut self, backend: &mut Backend) -> Result<ExitCode> {
        let mut passed_on = 0;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(exit_code(status, passed_on > 0));
            }
            let (seen, signal) = sys::signals();
            if seen > passed_on {
                passed_on = seen;
                // Whoever asks three times has waited enough.
                let signal = match (seen, signal) {
                    (3.., _) => sys::KILL,
                    (_, sys::TERMINATE) => sys::TERMINATE,
                    _ => sys::INTERRUPT,
                };
                sys::send(&self.child, signal)?;
            }
            if passed_on == 0 && !backend.is_alive() {
                bail!("the backend has ended: {}", backend.description);
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// What to type in another terminal.
    pub fn lines_to_try(&self, args: &Args, backend: &Backend) -> String {
        let listen = args
            .value_of("--listen")
            .unwrap_or_else(|| "127.0.0.1:6432".to_owned());
        let (host, port) = listen.rsplit_once(':').unwrap_or((listen.as_str(), "6432"));
        let host = match host.trim_matches(['[', ']']) {
            "0.0.0.0" => "127.0.0.1",
            "::" => "::1",
            host => host,
        };
        let place = format!("-h {host} -p {port}");
        let mut gatectl = built_program("release", "gatectl")
            .map_or_else(|_| "gatectl".to_owned(), |path| host::shown(&path));
        if behind_sudo().is_some() {
            gatectl = format!("sudo {gatectl}");
        }
        if let Some(instance) = args.value_of("--instance") {
            gatectl = format!("{gatectl} --instance {instance}");
        }
        let given = args.value_of("--control").map(PathBuf::from);
        if let Some(control) = self.control.as_ref().or(given.as_ref()) {
            gatectl = format!("{gatectl} --control {}", control.display());
        }
        let user = if backend.is_cluster { " -U app" } else { "" };
        let mut lines = vec![format!("psql {place}{user}")];
        if backend.is_cluster && setup::postgresql_bin().is_some() {
            lines.push(format!("pgbench {place} -U app -S -n -c 16 -j 4 -T 10"));
        }
        lines.push(format!("{gatectl} status"));
        lines.push(format!("{gatectl} limits set user app 2"));
        format!(
            "\ngate is ready; behind it is {}.\nIn another terminal:\n\n  {}\n\n\
             Ctrl-C ends everything and leaves nothing behind.\n\n",
            backend.description,
            lines.join("\n  ")
        )
    }

    fn wait_until_ready(&mut self, ready: &mpsc::Receiver<()>) -> Result<bool> {
        let deadline = Instant::now() + READY_TIME_MAX;
        while Instant::now() < deadline {
            match ready.recv_timeout(Duration::from_millis(50)) {
                Ok(()) => return Ok(true),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("gate ended before it was ready: {status}");
            }
            if sys::signals().0 > 0 {
                return Ok(false);
            }
        }
        bail!("gate was not ready within {} s", READY_TIME_MAX.as_secs());
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        child::end(&mut self.child, &[sys::INTERRUPT, sys::KILL]);
    }
}

fn explain_no_root() {
    eprintln!(
        "run: without root the kernel plane is off. Limits on users, databases and the total\n\
         run: hold in gate's own memory; missing are the exact ceiling per listener, and counts\n\
         run: that outlive gate and are shared with other processes. For all of it: run as root."
    );
}

/// Copies a stream of gate to standard error and reports the ready line.
fn pass_on(stream: Option<impl Read + Send + 'static>, ready: mpsc::Sender<()>) {
    let Some(stream) = stream else { return };
    thread::spawn(move || {
        let mut reader = BufReader::new(stream);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            let _ = std::io::stderr().write_all(&line);
            if is_ready_line(&String::from_utf8_lossy(&line)) {
                let _ = ready.send(());
            }
            line.clear();
        }
    });
}

/// The log line whose message is `ready`, as text (coloured or not) or JSON.
fn is_ready_line(line: &str) -> bool {
    if line.contains(r#""message":"ready""#) {
        return true;
    }
    let mut plain = String::new();
    let mut in_escape = false;
    for c in line.chars() {
        match c {
            '\u{1b}' => in_escape = true,
            'm' if in_escape => in_escape = false,
            c if !in_escape => plain.push(c),
            _ => {}
        }
    }
    let mut words = plain.split_whitespace().skip_while(|word| *word != "INFO");
    words.next().is_some() && words.find(|word| !word.ends_with(':')) == Some("ready")
}

/// gate's own code; a run that was asked to end has ended well.
fn exit_code(status: ExitStatus, asked_to_end: bool) -> ExitCode {
    if !status.success() {
        eprintln!("run: gate ended: {status}");
    }
    if asked_to_end {
        return ExitCode::SUCCESS;
    }
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    ExitCode::from(code.unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ready_line_is_known_in_every_form() {
        for line in [
            "2026-01-01T00:00:00Z  INFO gate: ready listeners=[\"127.0.0.1:6432\"] kernel=active\n",
            "2026-01-01T00:00:00Z  INFO ready kernel=active",
            "\u{1b}[2m2026-01-01\u{1b}[0m \u{1b}[32m INFO\u{1b}[0m \u{1b}[2mgate\u{1b}[0m\u{1b}[2m:\u{1b}[0m ready",
            r#"{"timestamp":"x","level":"INFO","fields":{"message":"ready","kernel":"active"}}"#,
        ] {
            assert!(is_ready_line(line), "{line}");
        }
        for line in [
            "2026-01-01T00:00:00Z  INFO gate: not ready yet",
            "2026-01-01T00:00:00Z  WARN gate: ready",
            "ready",
        ] {
            assert!(!is_ready_line(line), "{line}");
        }
    }
}
