//! Child processes: followed to their end, told of signals, ended when they are no longer wanted.

use std::io::Read;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::{host, sys};

/// How long a child may take to follow one signal before the next, harder one.
const PATIENCE: Duration = Duration::from_secs(5);

const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Whoever asks three times has waited enough.
const SIGNALS_BEFORE_KILL: u32 = 3;

/// Whom a signal to this program is passed on to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// The child, which ends its own children in order.
    Child,
    /// The child and all of its group: a compiler behind cargo would go on otherwise.
    Group,
}

/// Announces a build, runs it, and fails if it fails or if a signal came. A program that notes
/// signals ([`sys::note_signals`]) uses this in place of [`host::run`].
pub fn build(command: &mut Command) -> Result<()> {
    announced(command, |command| {
        follow(command, Reach::Group, sys::KILL).map(|status| (status, ()))
    })
}

/// [`build`], and returns what the command wrote to standard output.
pub fn build_output(command: &mut Command) -> Result<String> {
    announced(command, captured)
}

/// [`build_output`] without the announcement.
pub fn output(command: &mut Command) -> Result<String> {
    checked(command, captured)
}

fn captured(command: &mut Command) -> Result<(ExitStatus, String)> {
    let mut child = spawn(command.stdout(Stdio::piped()), sys::KILL)?;
    let mut stdout = child.stdout.take().context("its output is not piped")?;
    let reader = thread::spawn(move || {
        let mut bytes = Vec::new();
        stdout.read_to_end(&mut bytes).map(|_| bytes)
    });
    let status = wait(&mut child, Reach::Group)?;
    let bytes = reader.join().ok().context("its reader panicked")??;
    Ok((status, String::from_utf8_lossy(&bytes).into_owned()))
}

fn announced<T>(
    command: &mut Command,
    run: impl FnOnce(&mut Command) -> Result<(ExitStatus, T)>,
) -> Result<T> {
    eprintln!("+ {}", host::command_line(command));
    checked(command, run)
}

fn checked<T>(
    command: &mut Command,
    run: impl FnOnce(&mut Command) -> Result<(ExitStatus, T)>,
) -> Result<T> {
    ensure!(sys::signals().0 == 0, "interrupted");
    let line = host::command_line(command);
    let (status, said) = run(command).with_context(|| format!("`{line}`"))?;
    ensure!(sys::signals().0 == 0, "interrupted");
    ensure!(status.success(), "`{line}` failed: {status}");
    Ok(said)
}

/// Starts a command in a group of its own and waits for its end; signals that come meanwhile are
/// passed on. Should this program be killed, the child is sent `orphaned`.
pub fn follow(command: &mut Command, reach: Reach, orphaned: i32) -> Result<ExitStatus> {
    wait(&mut spawn(command, orphaned)?, reach)
}

fn spawn(command: &mut Command, orphaned: i32) -> Result<Child> {
    let line = host::command_line(command);
    sys::own_group_and_die_with_parent(command, orphaned)
        .stdin(Stdio::null())
        .spawn()
        .with_context(|| format!("cannot start `{line}`"))
}

fn wait(child: &mut Child, reach: Reach) -> Result<ExitStatus> {
    let mut passed_on = 0;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        let (seen, signal) = sys::signals();
        if seen > passed_on {
            passed_on = seen;
            let signal = match (seen, signal) {
                (SIGNALS_BEFORE_KILL.., _) => sys::KILL,
                (_, sys::TERMINATE) => sys::TERMINATE,
                _ => sys::INTERRUPT,
            };
            match reach {
                Reach::Child => sys::send(child, signal)?,
                Reach::Group => sys::send_group(child, signal)?,
            }
        }
        thread::sleep(LOOK_EVERY);
    }
}

/// A child's exit code as this program's own; 128 and its number for a signal, as shells have it.
pub fn exit_code(status: ExitStatus) -> ExitCode {
    use std::os::unix::process::ExitStatusExt;

    let by_signal = || status.signal().map(|signal| 128 + signal);
    let code = status.code().or_else(by_signal);
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Sends one signal after the other until the child has ended.
pub fn end(child: &mut Child, signals: &[i32]) {
    for signal in signals {
        if matches!(child.try_wait(), Ok(Some(_))) {
            return;
        }
        let _ = sys::send(child, *signal);
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if matches!(child.try_wait(), Ok(Some(_))) {
                return;
            }
            thread::sleep(LOOK_EVERY);
        }
    }
    eprintln!("xtask: process {} does not end", child.id());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_that_ignores_the_first_signal_ends_by_the_next() {
        let mut child = Command::new("sleep").arg("30").spawn().unwrap();
        end(&mut child, &[sys::KILL]);
        assert!(matches!(child.try_wait(), Ok(Some(_))));
    }

    #[test]
    fn exit_codes_are_passed_on_and_signals_are_told_as_shells_do() {
        let run = |script: &str| {
            let mut command = Command::new("sh");
            follow(command.args(["-c", script]), Reach::Child, sys::KILL).unwrap()
        };
        let same = |status, code: u8| {
            assert_eq!(
                format!("{:?}", exit_code(status)),
                format!("{:?}", ExitCode::from(code))
            );
        };
        same(run("exit 0"), 0);
        same(run("exit 7"), 7);
        same(run("kill -TERM $$"), 143);
    }

    #[test]
    fn what_a_build_says_is_returned_and_its_failure_is_an_error() {
        let mut good = Command::new("sh");
        assert_eq!(
            build_output(good.args(["-c", "echo said"])).unwrap(),
            "said\n"
        );
        let mut bad = Command::new("sh");
        let error = build(bad.args(["-c", "exit 3"])).unwrap_err();
        assert!(format!("{error:#}").contains("exit 3"), "{error:#}");
    }
}
