//! Ends of a session: FIN and RST from either side, after all that came before.

use std::io::{ErrorKind, Read};
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gate_tests::gate::Gate;
use gate_tests::host;
use gate_tests::pair::{HeldBackend, Pair, Pattern};
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire;
use socket2::SockRef;

const SOON: Duration = Duration::from_secs(3);
const MIB: usize = 1 << 20;

pub fn register(suite: &mut Suite) {
    suite.both(
        "g1_a_client_may_end_first_and_get_every_byte_of_the_answer",
        client_first,
    );
    suite.both("g1_a_backend_may_end_first", backend_first);
    suite.both("g1_both_sides_may_end_at_once", both_at_once);
    suite.both(
        "g3_fin_comes_only_after_tens_of_megabytes_of_bulk",
        fin_after_bulk,
    );
    suite.both("g3_a_backends_reset_reaches_the_client_as_one", reset_down);
    suite.both("g3_a_clients_reset_ends_the_backend_and_cancels", reset_up);
}

fn start(stage: &Stage) -> Result<(Gate, HeldBackend)> {
    let backend = HeldBackend::start()?;
    let gate = Gate::start(stage.plane, backend.address()?, "[limits.user]\napp = 1")?;
    Ok((gate, backend))
}

/// Has a thread send so many bytes, then FIN.
fn send_and_end(
    stream: &TcpStream,
    seed: u64,
    count: usize,
) -> Result<thread::JoinHandle<Result<()>>> {
    let stream = stream.try_clone()?;
    Ok(thread::spawn(move || {
        Pattern::new(seed).send(&stream, count)?;
        Ok(stream.shutdown(Shutdown::Write)?)
    }))
}

fn done(sender: thread::JoinHandle<Result<()>>) -> Result<()> {
    sender.join().ok().context("a sender panicked")?
}

fn client_first(stage: &Stage) -> Result<()> {
    let (gate, held) = start(stage)?;
    for round in 0..3 {
        let Pair { client, backend } = held.open(gate.address(), "app", "prod")?;
        let sender = send_and_end(&client, round, 8 * MIB)?;
        // Nobody reads: the FIN is behind bytes that are held back everywhere.
        thread::sleep(Duration::from_millis(100));
        assert_eq!(gate.refused("app", "prod")?.code(), "53300");
        assert_eq!(Pattern::new(round).receive_all(&backend)?, 8 * MIB);
        done(sender)?;
        // The slot is held while the other direction is open.
        thread::sleep(Duration::from_millis(100));
        assert_eq!(gate.connections()?.user("app").active, 1);
        assert_eq!(gate.refused("app", "prod")?.code(), "53300");
        let sender = send_and_end(&backend, 7, 8 * MIB)?;
        assert_eq!(Pattern::new(7).receive_all(&client)?, 8 * MIB);
        done(sender)?;
        drop(backend);
        gate.wait_empty(SOON)?;
    }
    Ok(())
}

/// PostgreSQL never ends one direction only: its FIN ends the session, and what
/// the client still sends goes nowhere.
fn backend_first(stage: &Stage) -> Result<()> {
    let (gate, held) = start(stage)?;
    for round in 0..3 {
        let Pair { client, backend } = held.open(gate.address(), "app", "prod")?;
        Pattern::new(1).send(&client, 1000)?;
        Pattern::new(1).receive(&backend, 1000)?;
        let sender = send_and_end(&backend, round, 8 * MIB)?;
        thread::sleep(Duration::from_millis(50));
        assert_eq!(Pattern::new(round).receive_all(&client)?, 8 * MIB);
        done(sender)?;
        drop(backend);
        let _ = client.shutdown(Shutdown::Write);
        gate.wait_empty(SOON)?;
    }
    Ok(())
}

fn both_at_once(stage: &Stage) -> Result<()> {
    let (gate, held) = start(stage)?;
    for round in 0..5 {
        let Pair { client, backend } = held.open(gate.address(), "app", "prod")?;
        let down = send_and_end(&backend, round, 4 * MIB)?;
        let up = send_and_end(&client, round + 100, MIB)?;
        let reader = {
            let backend = backend.try_clone()?;
            thread::spawn(move || Pattern::new(round + 100).receive_all(&backend))
        };
        assert_eq!(Pattern::new(round).receive_all(&client)?, 4 * MIB);
        done(down)?;
        // The client's bytes race the backend's FIN: any of them, in order.
        let _ = done(up);
        match reader.join().ok().context("a reader panicked")? {
            Ok(count) => assert!(count <= MIB, "{count}"),
            Err(error) => {
                let kind = error
                    .downcast_ref::<std::io::Error>()
                    .map(|error| error.kind());
                ensure!(kind == Some(ErrorKind::ConnectionReset), "{error:#}");
            }
        }
        drop((client, backend));
        gate.wait_empty(SOON)?;
    }
    Ok(())
}

fn fin_after_bulk(stage: &Stage) -> Result<()> {
    const BULK: usize = 48 * MIB;
    let (gate, held) = start(stage)?;
    let Pair { client, backend } = held.open(gate.address(), "app", "prod")?;
    let up = send_and_end(&client, 1, BULK)?;
    assert_eq!(Pattern::new(1).receive_all(&backend)?, BULK);
    done(up)?;
    let down = send_and_end(&backend, 2, BULK)?;
    assert_eq!(Pattern::new(2).receive_all(&client)?, BULK);
    done(down)?;
    drop((client, backend));
    gate.wait_empty(SOON)?;
    let relayed = gate.metrics()?.sum("gate_relayed_bytes_total", &[]);
    assert!(relayed >= 2.0 * BULK as f64, "{relayed}");
    Ok(())
}

fn reset(stream: TcpStream) -> Result<()> {
    SockRef::from(&stream).set_linger(Some(Duration::ZERO))?;
    Ok(())
}

fn reset_down(stage: &Stage) -> Result<()> {
    let (gate, held) = start(stage)?;
    // Bytes that were taken before the reset are not lost by it.
    let Pair { client, backend } = held.open(gate.address(), "app", "prod")?;
    Pattern::new(1).send(&backend, 200_000)?;
    let mut seen = Pattern::new(1);
    seen.receive(&client, 200_000)?;
    reset(backend)?;
    assert_eq!(seen.receive_to_reset(&client)?, 200_000);
    drop(client);
    gate.wait_empty(SOON)?;
    // In the middle of bulk: a part of it in order, then RST and no FIN, which
    // would say that this was all.
    for round in 0..3 {
        let Pair { client, backend } = held.open(gate.address(), "app", "prod")?;
        let sender = thread::spawn(move || -> Result<()> {
            Pattern::new(round).send(&backend, 6 * MIB)?;
            reset(backend)
        });
        let mut seen = Pattern::new(round);
        seen.receive(&client, MIB)?;
        assert!(seen.receive_to_reset(&client)? <= 6 * MIB);
        done(sender)?;
        drop(client);
        gate.wait_empty(SOON)?;
    }
    let resets = [("reason", "backend_reset")];
    assert_eq!(
        gate.metrics()?.sum("gate_sessions_closed_total", &resets),
        4.0
    );
    Ok(())
}

/// Not as a reset: the backend would not notice one at work, and its slot would
/// be free before it is.
fn reset_up(stage: &Stage) -> Result<()> {
    let (gate, held) = start(stage)?;
    let Pair {
        client,
        mut backend,
    } = held.open(gate.address(), "app", "prod")?;
    Pattern::new(1).send(&client, 200_000)?;
    Pattern::new(1).receive(&backend, 200_000)?;
    let start = Instant::now();
    reset(client)?;
    let mut cancel = held.accept()?;
    let mut packet = [0; 16];
    cancel.read_exact(&mut packet)?;
    assert_eq!(packet[..], wire::cancel(7, &[1, 2, 3, 4]));
    drop(cancel);
    assert_eq!(backend.read(&mut [0; 1])?, 0);
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    assert_eq!(gate.connections()?.user("app").active, 1);
    drop(backend);
    gate.wait_empty(SOON)?;
    host::eventually_true(SOON, "it is counted", || {
        let resets = [("reason", "client_reset")];
        Ok(gate.metrics()?.sum("gate_sessions_closed_total", &resets) == 1.0)
    })
}
