//! Checks whether the addresses of backends answer.
#![forbid(unsafe_code)]

use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, MissedTickBehavior};

use crate::config::Address;
use crate::host::connect_failure;
use crate::session::outcome::ConnectFailure;
use crate::state::State;

/// Checks under way at the same time, over all backends: each holds a
/// descriptor of the control plane's reserve.
const AT_ONCE: usize = 8;
/// An answer may take as long, however short the period: a busy server is not
/// down.
const PATIENCE_MIN: Duration = Duration::from_secs(1);
/// How long a unix socket with a full backlog is left alone.
const BACKLOG_RETRY: Duration = Duration::from_millis(50);
/// GSSENCRequest: length and NEGOTIATE_GSS_CODE (`libpq/pqcomm.h`). The server
/// answers one byte and, unlike after an SSLRequest that it accepts, does not
/// log that nothing follows (`secure_open_gssapi` in `be-secure-gssapi.c`).
const GSSENC_REQUEST: [u8; 8] = [0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x30];

/// Starts a task for each address; they end with the runtime.
pub(super) fn start(state: &Arc<State>) {
    let at_once = Rc::new(Semaphore::new(AT_ONCE));
    let config = state.config();
    for (backend, settings) in config.backends.iter().enumerate() {
        if settings.check.is_zero() {
            continue;
        }
        for place in 0..settings.addresses.len() {
            let task = watch(Arc::clone(state), Rc::clone(&at_once), backend, place);
            tokio_uring::spawn(task);
        }
    }
}

async fn watch(state: Arc<State>, at_once: Rc<Semaphore>, backend: usize, place: usize) {
    let (address, period) = {
        let config = state.config();
        let settings = &config.backends[backend];
        (settings.addresses[place].clone(), settings.check)
    };
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if !state.backends.wants_check(backend, place) {
            continue;
        }
        // Never closed.
        let Ok(_turn) = at_once.acquire().await else {
            return;
        };
        let patience = period
            .max(PATIENCE_MIN)
            .min(state.config().timeouts.connect);
        let result = check(&address, patience).await;
        // Want of descriptors here says nothing about the other side.
        let unmade = |error: &io::Error| connect_failure(error) == ConnectFailure::Host;
        if result.as_ref().is_err_and(unmade) {
            continue;
        }
        let result = result.map_err(|error| error.to_string());
        let now = Instant::now().into_std();
        state.backends.checked(
            backend,
            place,
            result.as_ref().map(|&()| ()).map_err(String::as_str),
            now,
        );
    }
}

/// Whether a PostgreSQL server answers within `patience`.
async fn check(address: &Address, patience: Duration) -> io::Result<()> {
    let answer = async {
        match address {
            Address::Tcp(address) => ask(TcpStream::connect(address).await?).await,
            Address::Unix(path) => ask(connect_unix(path).await?).await,
        }
    };
    match tokio::time::timeout(patience, answer).await {
        Ok(result) => result,
        Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in time")),
    }
}

/// A server whose backlog is full is busy, not down: as with TCP, it has the
/// whole time to accept.
async fn connect_unix(path: &Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                tokio::time::sleep(BACKLOG_RETRY).await;
            }
            result => return result,
        }
    }
}

async fn ask(mut server: impl AsyncRead + AsyncWrite + Unpin) -> io::Result<()> {
    server.write_all(&GSSENC_REQUEST).await?;
    let answer = server.read_u8().await?;
    // `G` takes it, `N` does not; poolers may know `S` alone.
    if matches!(answer, b'G' | b'N' | b'S') {
        return Ok(());
    }
    let text = format!("answers `{}`", answer.escape_ascii());
    Err(io::Error::new(io::ErrorKind::InvalidData, text))
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(5);

    fn run<T>(future: impl Future<Output = T>) -> T {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().build().expect("a runtime");
        runtime.block_on(future)
    }

    /// Answers one question; the address, and how the asker leaves.
    fn server(answer: &'static [u8]) -> (Address, std::thread::JoinHandle<usize>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
        let address = Address::Tcp(listener.local_addr().expect("bound"));
        let thread = std::thread::spawn(move || {
            let (mut client, _) = listener.accept().expect("accepted");
            let mut question = [0; 8];
            client.read_exact(&mut question).expect("a question");
            assert_eq!(question, GSSENC_REQUEST);
            client.write_all(answer).expect("answered");
            drop(listener);
            client.read(&mut question).expect("no reset")
        });
        (address, thread)
    }

    #[test]
    fn a_server_that_answers_is_up_and_left_with_a_fin() {
        for answer in ["G", "N", "S"] {
            let (address, thread) = server(answer.as_bytes());
            run(check(&address, PATIENCE)).expect("up");
            assert_eq!(thread.join().expect("no panic"), 0, "{answer}");
        }
    }

    #[test]
    fn what_is_no_server_is_down() {
        let (address, thread) = server(b"H");
        let error = run(check(&address, PATIENCE)).expect_err("not PostgreSQL");
        assert_eq!(error.to_string(), "answers `H`");
        thread.join().expect("no panic");
        let (address, thread) = server(b"");
        let silent = run(check(&address, Duration::from_millis(200))).expect_err("no answer");
        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
        thread.join().expect("no panic");
        let gone = run(check(&address, PATIENCE)).expect_err("nobody listens");
        assert_eq!(gone.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn a_unix_socket_is_asked_likewise() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("s");
        let listener = UnixListener::bind(&path).expect("bound");
        let thread = std::thread::spawn(move || {
            let (mut client, _) = listener.accept().expect("accepted");
            client.read_exact(&mut [0; 8]).expect("a question");
            client.write_all(b"N").expect("answered");
        });
        run(check(&Address::Unix(path.clone()), PATIENCE)).expect("up");
        thread.join().expect("no panic");
        std::fs::remove_file(&path).expect("removed");
        let gone = run(check(&Address::Unix(path), PATIENCE)).expect_err("not there");
        assert_eq!(gone.kind(), io::ErrorKind::NotFound);
    }
}
