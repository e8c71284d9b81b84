//! Two relays as one would first write them on a runtime, so that the choice of
//! gate's own engine stays checked.
//!
//! Both have one runtime on each thread, with a listening socket of its own, and a
//! buffer of 16 KiB for each direction, as most other peers.

mod startup;
mod tokio;
mod uring;

use std::net::{SocketAddr, TcpListener};
use std::process;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use rustix::thread::{CpuSet, sched_setaffinity};
use socket2::{Domain, Socket, Type};

use crate::host::{cpus, descriptors};

/// Of each direction of a session.
const BUFFER_SIZE: usize = 16 * 1024;
/// As of every peer.
const BACKLOG: i32 = 4096;
/// Before the next accept when one failed, as for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// The command line of `gate-bench baseline`.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// What it runs on
    #[arg(value_enum)]
    pub runtime: Runtime,
    /// Where clients connect
    #[arg(long, value_name = "ADDR")]
    pub listen: SocketAddr,
    /// Where sessions go
    #[arg(long, value_name = "ADDR")]
    pub backend: SocketAddr,
    /// Refuse every client instead
    #[arg(long, value_enum, value_name = "HOW")]
    pub refuse: Option<Refuse>,
    /// How many threads, each with a runtime and a listening socket
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub threads: usize,
    /// Give each thread one of the CPUs that this process may use
    #[arg(long)]
    pub pin: bool,
}

/// What a relay runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Runtime {
    /// tokio, one current-thread runtime per thread
    Tokio,
    /// tokio-uring, with a ring per thread
    TokioUring,
}

/// How clients are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Refuse {
    /// By an ErrorResponse after the startup packet
    Politely,
    /// Closed as soon as they are accepted
    Hard,
}

impl Runtime {
    /// As peers and command lines name it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tokio => "tokio",
            Self::TokioUring => "tokio-uring",
        }
    }
}

/// What each thread does with the clients of its listening socket.
#[derive(Clone, Copy, Debug)]
struct Task {
    backend: SocketAddr,
    refuse: Option<Refuse>,
}

/// Relays until it is ended from outside.
///
/// # Errors
/// It cannot listen, or a thread's runtime cannot be had.
pub fn run(options: &Options) -> Result<()> {
    ensure!(
        options.threads > 0,
        "--threads 0: there must be at least one"
    );
    descriptors::raise()?;
    let cpus = if options.pin {
        cpus::allowed()?
    } else {
        Vec::new()
    };
    // All of them before the first thread: who can connect finds every thread.
    let listeners = (0..options.threads)
        .map(|_| listen(options.listen))
        .collect::<Result<Vec<_>>>()?;
    let task = Task {
        backend: options.backend,
        refuse: options.refuse,
    };
    let runtime = options.runtime;
    let threads: Vec<_> = listeners
        .into_iter()
        .enumerate()
        .map(|(number, listener)| {
            let cpu = (!cpus.is_empty()).then(|| cpus[number % cpus.len()]);
            thread::spawn(move || {
                let error = match run_thread(runtime, listener, cpu, task) {
                    Ok(()) => return,
                    Err(error) => error,
                };
                // A relay with a thread less would be measured as if it were whole.
                eprintln!("gate-bench: baseline {}: {error:#}", runtime.name());
                process::exit(1);
            })
        })
        .collect();
    for thread in threads {
        ensure!(thread.join().is_ok(), "a thread panicked");
    }
    Ok(())
}

fn run_thread(
    runtime: Runtime,
    listener: TcpListener,
    cpu: Option<usize>,
    task: Task,
) -> Result<()> {
    if let Some(cpu) = cpu {
        let mut set = CpuSet::new();
        set.set(cpu);
        sched_setaffinity(None, &set).with_context(|| format!("cannot run on CPU {cpu}"))?;
    }
    match runtime {
        Runtime::Tokio => tokio::run(listener, task),
        Runtime::TokioUring => uring::run(listener, task),
    }
}

fn listen(address: SocketAddr) -> Result<TcpListener> {
    let listen = || {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
        socket.set_reuse_address(true)?;
        socket.set_reuse_port(true)?;
        // Accepted sockets inherit it.
        socket.set_tcp_nodelay(true)?;
        socket.bind(&address.into())?;
        socket.listen(BACKLOG)?;
        Ok::<_, std::io::Error>(socket)
    };
    let socket = listen().with_context(|| format!("cannot listen on {address}"))?;
    Ok(socket.into())
}
