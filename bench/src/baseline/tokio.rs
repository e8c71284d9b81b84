//! The relay on tokio.

use std::io;
use std::net::{SocketAddr, TcpListener};

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional_with_sizes};
use tokio::net::TcpStream;

use super::startup::{self, First};
use super::{ACCEPT_PAUSE, BUFFER_SIZE, Refuse, Task};

/// Serves a listening socket on this thread.
///
/// # Errors
/// The runtime cannot be had.
pub fn run(listener: TcpListener, task: Task) -> Result<()> {
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
        .context("no tokio runtime")?;
    runtime.block_on(accept(listener, task))
}

async fn accept(listener: TcpListener, task: Task) -> Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    loop {
        let Ok((client, _)) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        match task.refuse {
            None => drop(tokio::spawn(relay(client, task.backend))),
            Some(Refuse::Politely) => drop(tokio::spawn(refuse(client))),
            Some(Refuse::Hard) => drop(client),
        }
    }
}

/// A half-close is passed on; an error ends both sides.
async fn relay(mut client: TcpStream, backend: SocketAddr) -> io::Result<()> {
    let mut backend = TcpStream::connect(backend).await?;
    backend.set_nodelay(true)?;
    copy_bidirectional_with_sizes(&mut client, &mut backend, BUFFER_SIZE, BUFFER_SIZE).await?;
    Ok(())
}

async fn refuse(mut client: TcpStream) -> io::Result<()> {
    let mut first = Vec::with_capacity(512);
    loop {
        match startup::parse(&first) {
            First::Incomplete => {
                if client.read_buf(&mut first).await? == 0 {
                    return Ok(());
                }
            }
            First::Encryption(length) => {
                first.drain(..length);
                client.write_all(startup::NOT_SUPPORTED).await?;
            }
            First::Startup => return client.write_all(startup::REFUSAL).await,
            First::Silent => return Ok(()),
        }
    }
}
