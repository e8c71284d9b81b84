//! A process that accepts and admits on an inherited listener until it is
//! killed.

use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::os::fd::{AsFd as _, FromRawFd as _, RawFd};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use std::{io, thread};

use anyhow::{Context as _, Result, ensure};
use gate::kernel::Maps;
use gate_common::abi::SlotRef;
use gate_tests::kernel::counted::{Counted, TOTAL, admit};
use gate_tests::kernel::net;

pub const FLAG: &str = "--victim";

/// The other process.
pub struct Victim {
    child: Child,
}

impl Victim {
    /// Starts a process that has the listener's socket and accepts `count`
    /// connections from it, each admitted in the instance. Close the own
    /// listener to leave the victim alone with it.
    pub fn start(instance: &str, listener: &Counted, count: usize) -> Result<Self> {
        let fd = net::inherit(&listener.socket)?;
        let child = Command::new(std::env::current_exe()?)
            .args([FLAG, instance, &fd.to_string(), &count.to_string()])
            .stdout(Stdio::piped())
            .spawn()?;
        Ok(Self { child })
    }

    /// Waits until it has accepted and admitted all.
    pub fn wait_ready(&mut self) -> Result<()> {
        let output = self.child.stdout.take().context("waited before")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        ensure!(line == "ready\n", "the victim said {line:?}");
        Ok(())
    }

    /// Kills it with SIGKILL.
    pub fn kill(mut self) -> io::Result<()> {
        self.child.kill()?;
        self.child.wait().map(drop)
    }
}

/// The victim's own life.
pub fn play(instance: &str, fd: &str, count: &str) -> Result<()> {
    let maps = Maps::open(instance)?;
    let fd: RawFd = fd.parse()?;
    // SAFETY: the parent left this descriptor open for us alone.
    let listener = unsafe { TcpListener::from_raw_fd(fd) };
    let absent = SlotRef::ABSENT;
    let mut held = Vec::new();
    for _ in 0..count.parse()? {
        let (socket, _) = listener.accept()?;
        admit(&maps, socket.as_fd(), [TOTAL, absent, absent, absent])
            .map_err(|refusal| anyhow::anyhow!("refused: {refusal:?}"))?;
        held.push(socket);
    }
    println!("ready");
    loop {
        thread::sleep(Duration::from_secs(60));
    }
}
