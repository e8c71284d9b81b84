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
use crate::state::State;

/// Checks under way at the same time, over all backends: each holds a
/// descriptor of the control plane's reserve.
const AT_ONCE: usize = 8;
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
        let patience = period.min(state.config().timeouts.connect);
        let result = check(&address, patience).await;
        let reason = result.as_ref().map_err(|error| reason(error));
        let result = reason.as_ref().map(|&()| ()).map_err(String::as_str);
        let now = Instant::now().into_std();
        state.backends.checked(backend, place, result, now);
    }
}

/// This machine's want of descriptors says nothing about the other: no reason
/// is `Host` here, since a check that cannot be made is none.
fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::TimedOut => "no answer in time".to_owned(),
        _ => error.to_string(),
    }
}

/// Whether a PostgreSQL server answers within `patience`.
async fn check(address: &Address, patience: Duration) -> io::Result<()> {
    let answer = async {
        match address {
            Address::Tcp(address) => ask(TcpStream::connect(address).await?).await,
            Address::Unix(path) => ask(UnixStream::connect(path as &Path).await?).await,
        }
    };
    match tokio::time::timeout(patience, answer).await {
        Ok(result) => result,
        Err(_) => Err(io::ErrorKind::TimedOut.into()),
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
