//! The relay on tokio-uring.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::rc::Rc;

use anyhow::Result;
use tokio_uring::buf::BoundedBuf as _;
use tokio_uring::net::TcpStream;

use super::startup::{self, First};
use super::{ACCEPT_PAUSE, BUFFER_SIZE, Refuse, Task};

/// Of the submission queue; the completion queue has twice as many.
const RING_ENTRIES: u32 = 4096;

/// Serves a listening socket on this thread.
///
/// # Errors
/// Accepting fails for good.
///
/// # Panics
/// The runtime cannot be had: tokio-uring itself panics then.
pub fn run(listener: TcpListener, task: Task) -> Result<()> {
    let mut ring = tokio_uring::uring_builder();
    // Without them the kernel interrupts the thread for each completion, at about
    // twice the cost of a short session. DEFER_TASKRUN would be better still, but
    // tokio-uring waits on the ring by epoll, which does not run deferred work.
    ring.setup_coop_taskrun()
        .setup_taskrun_flag()
        .setup_single_issuer();
    tokio_uring::builder()
        .entries(RING_ENTRIES)
        .uring_builder(&ring)
        .start(accept(listener, task))
}

async fn accept(listener: TcpListener, task: Task) -> Result<()> {
    // Blocking, as it came: the ring waits, and would pass EAGAIN on.
    let listener = tokio_uring::net::TcpListener::from_std(listener);
    loop {
        let Ok((client, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        match task.refuse {
            None => drop(tokio_uring::spawn(relay(client, task.backend))),
            Some(Refuse::Politely) => drop(tokio_uring::spawn(refuse(client))),
            Some(Refuse::Hard) => drop(client),
        }
    }
}

/// A half-close is passed on; an error ends both sides.
async fn relay(client: TcpStream, backend: SocketAddr) -> io::Result<()> {
    let backend = TcpStream::connect(backend).await?;
    backend.set_nodelay(true)?;
    let (client, backend) = (Rc::new(client), Rc::new(backend));
    tokio_uring::spawn(copy(Rc::clone(&client), Rc::clone(&backend)));
    copy(backend, client).await;
    Ok(())
}

/// Moves bytes one way until their end.
async fn copy(from: Rc<TcpStream>, to: Rc<TcpStream>) {
    let mut buffer = vec![0; BUFFER_SIZE];
    loop {
        let (read, full) = from.read(buffer).await;
        let length = match read {
            Ok(0) => break drop(to.shutdown(Shutdown::Write)),
            Ok(length) => length,
            Err(_) => break end(&from, &to),
        };
        let (written, slice) = to.write_all(full.slice(..length)).await;
        if written.is_err() {
            break end(&from, &to);
        }
        buffer = slice.into_inner();
    }
}

/// The other direction's task ends by it, too.
fn end(one: &TcpStream, other: &TcpStream) {
    // A socket that is not connected any more is as good as shut down.
    let _ = one.shutdown(Shutdown::Both);
    let _ = other.shutdown(Shutdown::Both);
}

async fn refuse(client: TcpStream) -> io::Result<()> {
    let mut first = Vec::new();
    let mut buffer = Vec::with_capacity(512);
    loop {
        match startup::parse(&first) {
            First::Incomplete => {
                let (read, filled) = client.read(buffer).await;
                let length = read?;
                if length == 0 {
                    return Ok(());
                }
                first.extend_from_slice(&filled[..length]);
                buffer = filled;
            }
            First::Encryption(length) => {
                first.drain(..length);
                client.write_all(startup::NOT_SUPPORTED).await.0?;
            }
            First::Startup => return client.write_all(startup::REFUSAL).await.0,
            First::Silent => return Ok(()),
        }
    }
}
