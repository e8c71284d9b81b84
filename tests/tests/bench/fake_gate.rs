//! Proxies that do not work: a load must notice, and say what was wrong.
//!
//! The test program plays them itself: a link to it whose name begins with
//! [`PREFIX`] is a gate of the kind that the rest of the name says.

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail, ensure};
use gate_tests::suite::{Stage, Suite};

use crate::harness::{Bench, QUICK, items, points};

pub const PREFIX: &str = "fake-gate-";

pub fn register(suite: &mut Suite) {
    suite.local("a proxy that closes every connection is a failure", closes);
    suite.local("a proxy that answers nonsense is a failure", garbage);
    suite.local("a proxy that never answers is a failure", silent);
    suite.local("a proxy that does not start is a failure", ends);
}

fn closes(_: &Stage) -> Result<()> {
    expect_noticed("closes", "connect", "the end, after 0 bytes")?;
    expect_noticed("closes", "relay", "login: the end, after 0 bytes")
}

fn garbage(_: &Stage) -> Result<()> {
    expect_noticed("garbage", "connect", "the end, after 28 bytes")?;
    expect_noticed("garbage", "relay", "login: the end, after 28 bytes")
}

fn silent(_: &Stage) -> Result<()> {
    expect_noticed("silent", "connect", "login: no answer within")
}

fn ends(_: &Stage) -> Result<()> {
    expect_noticed("ends", "connect", "no such luck")
}

fn expect_noticed(kind: &str, scenario: &str, cause: &str) -> Result<()> {
    let bench = Bench::new()?;
    let program = bench.path(&format!("{PREFIX}{kind}"));
    symlink(std::env::current_exe()?, &program)?;
    let program = program.display().to_string();
    let own = [
        scenario,
        "--pace",
        "closed",
        "--peers",
        "gate",
        "--gate-bin",
        &program,
    ];
    let ended = bench.run(&bench.words_without_gate(&[&own[..], &QUICK].concat()))?;
    ended.expect_complaint(1, "ways failed under a load")?;
    let report = bench.report()?;
    ensure!(points(&report).count() > 0, "no points");
    for path in points(&report).flat_map(|point| items(&point["paths"])) {
        let why = path["left_out"].as_str().context("it was not left out")?;
        ensure!(why.starts_with("failed"), "{why}");
        ensure!(why.contains(cause), "{kind}, {scenario}: {why}");
        ensure!(items(&path["runs"]).count() == 0, "it has runs");
    }
    ensure!(
        bench.text()?.contains(cause),
        "the text does not say {cause:?}"
    );
    bench.expect_nothing_left(&[ended.pid])
}

/// The life of a gate that does not work.
pub fn play(kind: &str, arguments: &[String]) -> ExitCode {
    match pretend(kind, arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn pretend(kind: &str, arguments: &[String]) -> Result<()> {
    if arguments.iter().any(|word| word == "--version") {
        println!("gate 0.0.0");
        return Ok(());
    }
    let word_after = |flag: &str| {
        let at = arguments.iter().position(|word| word == flag);
        let word = at.and_then(|at| arguments.get(at + 1));
        word.with_context(|| format!("no {flag}"))
    };
    ensure!(kind != "ends", "no such luck");
    let listener = TcpListener::bind(word_after("--listen")?)?;
    // A gate is ready when somebody listens there.
    let _control = UnixListener::bind(word_after("--control")?)?;
    let mut held: Vec<TcpStream> = Vec::new();
    loop {
        let (mut client, _) = listener.accept()?;
        match kind {
            "closes" => drain_and_close(client),
            "garbage" => {
                // It may be gone already.
                let _ = client.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
                drain_and_close(client);
            }
            "silent" => held.push(client),
            other => bail!("no fake gate does this: {other}"),
        }
    }
}

/// Reads what is there first: a reset in place of the end would hide the answer.
fn drain_and_close(mut client: TcpStream) {
    let _ = client.set_read_timeout(Some(std::time::Duration::from_millis(50)));
    let _ = std::io::Read::read(&mut client, &mut [0; 1024]);
}
