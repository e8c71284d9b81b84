//! Starting a proxy and waiting until it listens.

use std::fs::{self, File};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::process::{Command, Stdio};
use std::sync::Once;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::child::Child;
use super::scratch::{self, Scratch};
use super::{Job, Proxy};
use crate::host::descriptors;
use crate::host::namespace::inside;

/// A proxy listens by then, or never.
pub const READY_WITHIN: Duration = Duration::from_secs(15);
/// How often to look.
pub const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Descriptors that a proxy needs besides those of sessions; HAProxy, with its
/// pipes, needs the most.
const OWN_DESCRIPTORS: u64 = 512;
const LOG: &str = "log";

/// Starts a proxy by the command that `prepare` makes, for a listening address
/// and a folder that are its own.
///
/// # Errors
/// It does not start, with what it said.
pub fn start(
    name: &str,
    job: &Job,
    prepare: impl FnOnce(&Job, SocketAddr, &Scratch) -> Result<Command>,
) -> Result<Proxy> {
    start_held(name, job, prepare).map(|(proxy, _)| proxy)
}

/// The same; hands over the first connection that the proxy took.
///
/// # Errors
/// It does not start, with what it said.
pub fn start_held(
    name: &str,
    job: &Job,
    prepare: impl FnOnce(&Job, SocketAddr, &Scratch) -> Result<Command>,
) -> Result<(Proxy, TcpStream)> {
    static SWEPT: Once = Once::new();
    SWEPT.call_once(scratch::sweep);
    descriptors::ensure_enough(descriptors_needed(job), job.sessions, "a proxy")?;
    let namespace = job.namespace.as_ref().map(|namespace| namespace.as_fd());
    let listen = job.listen;
    let address = inside(namespace, || free_address(listen))??;
    let scratch = Scratch::new(name)?;
    let mut command = prepare(job, address, &scratch)?;
    let shown = shown(&command, job, address, &scratch);
    let log = File::create(scratch.path(LOG))?;
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let child = Child::spawn(command, &job.cpus, namespace)
        .with_context(|| format!("cannot start {shown}"))?;
    let mut proxy = Proxy {
        address,
        pid: Some(child.id()),
        command: Some(shown),
        control: None,
        child: Some(child),
        scratch: Some(scratch),
        held: Vec::new(),
    };
    let first = proxy.wait("does not listen", || Ok(TcpStream::connect(address).ok()))?;
    Ok((proxy, first))
}

impl Proxy {
    /// What it said so far.
    pub(super) fn log(&self) -> String {
        let log = self.scratch.as_ref().map(|scratch| scratch.path(LOG));
        let log = log.and_then(|log| fs::read_to_string(log).ok());
        log.unwrap_or_default()
    }

    /// Looks until there is something.
    ///
    /// # Errors
    /// There never is, because of `complaint`; the proxy has ended; or `look` fails.
    pub(super) fn wait<T>(
        &mut self,
        complaint: &str,
        mut look: impl FnMut() -> Result<Option<T>>,
    ) -> Result<T> {
        let begin = Instant::now();
        loop {
            if let Some(found) = look()? {
                return Ok(found);
            }
            let ended = match &mut self.child {
                Some(child) => child.has_ended()?,
                None => false,
            };
            if ended || begin.elapsed() > READY_WITHIN {
                bail!(
                    "{} {}:\n{}",
                    self.command.as_deref().unwrap_or_default(),
                    if ended { "ended" } else { complaint },
                    self.log()
                );
            }
            thread::sleep(LOOK_EVERY);
        }
    }
}

/// How many descriptors a proxy needs: two sockets for each session.
pub fn descriptors_needed(job: &Job) -> u64 {
    2 * job.sessions_max() as u64 + OWN_DESCRIPTORS
}

/// An address that was free a moment ago.
fn free_address(ip: IpAddr) -> Result<SocketAddr> {
    let free = || -> io::Result<_> { TcpListener::bind((ip, 0))?.local_addr() };
    free().with_context(|| format!("cannot listen on {ip}"))
}

/// A command as one would type it, with a variable for each word that is another
/// one at the next start.
fn shown(command: &Command, job: &Job, address: SocketAddr, scratch: &Scratch) -> String {
    let replaced = [
        (scratch.folder().display().to_string(), "$DIR"),
        (scratch.name().to_owned(), "$INSTANCE"),
        (address.to_string(), "$LISTEN"),
        (job.backend_word(), "$BACKEND"),
    ];
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    let mut line = words.join(" ");
    for (value, variable) in &replaced {
        line = line.replace(value, variable);
    }
    line
}

#[cfg(test)]
mod tests {
    use rustix::process::{Resource, getrlimit};

    use super::*;
    use crate::peer::tests::job;

    #[test]
    fn commands_are_shown_alike_at_each_start() {
        let scratch = Scratch::new("shown").unwrap();
        let mut command = Command::new("proxy");
        command.arg(scratch.path("proxy.cfg"));
        command.args(["127.0.0.1:7777", "127.0.0.1:5432", scratch.name()]);
        let line = shown(
            &command,
            &job(),
            "127.0.0.1:7777".parse().unwrap(),
            &scratch,
        );
        assert_eq!(line, "proxy $DIR/proxy.cfg $LISTEN $BACKEND $INSTANCE");
    }

    #[test]
    fn a_proxy_that_ends_says_what_it_said() {
        let error = start("sh", &job(), |_, _, _| {
            let mut command = Command::new("sh");
            command.args(["-c", "echo no such luck >&2; exit 1"]);
            Ok(command)
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("ended:\nno such luck"), "{error}");
    }

    #[test]
    fn descriptors_that_cannot_be_had_are_a_clear_error() {
        let sessions = 1 << 40;
        let error = start("sh", &Job { sessions, ..job() }, |_, _, _| {
            Ok(Command::new("true"))
        });
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("RLIMIT_NOFILE") || getrlimit(Resource::Nofile).maximum.is_none(),
            "{error}"
        );
    }
}
