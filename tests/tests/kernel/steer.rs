//! Which worker's socket a connection goes to.

use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;

use anyhow::{Result, ensure};
use gate::host::{accept_queue, prefer_incoming_cpu};
use gate::kernel::{Choice, Group, Plane, WorkerLoads};
use gate_tests::kernel::counted::{Counted, start};
use gate_tests::kernel::net::pin_to_cpu;

use crate::Test;

pub const TESTS: &[Test] = &[
    ("connections_are_even_over_the_workers", even),
    ("a_burst_that_nobody_accepts_yet_is_even", burst),
    (
        "sockets_of_a_second_gate_get_its_program_and_its_loads",
        second_gate,
    ),
    (
        "a_gate_that_stays_gets_its_sockets_back_with_its_loads",
        stays,
    ),
    ("the_socket_of_the_packets_cpu_is_chosen", incoming_cpu),
];

const V4: &str = "127.0.0.1:0";
const V6: &str = "[::1]:0";
/// More than the two of which both are always looked at.
const WORKERS: usize = 4;
/// Fullest to emptiest of so many connections by hash: about 20 of 200.
const EVEN: u64 = 4;

/// The sockets of one listener, by worker.
fn listen(plane: &Plane, index: u32, address: &str, workers: usize) -> Result<Vec<Counted>> {
    let reuse = |address: &str| {
        Counted::with(plane, index, address, 512, |socket| {
            socket.set_reuse_port(true)
        })
    };
    let mut sockets = vec![reuse(address)?];
    let address = sockets[0].address.to_string();
    while sockets.len() < workers {
        sockets.push(reuse(&address)?);
    }
    Ok(sockets)
}

fn group(sockets: &[Counted]) -> Group<'_> {
    Group {
        listener: sockets[0].index,
        sockets: sockets.iter().map(|each| each.socket.as_fd()).collect(),
    }
}

fn connect(address: SocketAddr, count: usize) -> Result<Vec<TcpStream>> {
    let connect = |_| Ok(TcpStream::connect(address)?);
    (0..count).map(connect).collect()
}

/// How many connections wait at each socket.
fn waiting(sockets: &[Counted]) -> Result<Vec<u64>> {
    let length = |each: &Counted| Ok(accept_queue(each.socket.as_fd())?.length);
    sockets.iter().map(length).collect()
}

fn spread(counts: &[u64]) -> u64 {
    counts.iter().max().unwrap_or(&0) - counts.iter().min().unwrap_or(&0)
}

/// A worker's part: accepts all that wait, and says what it holds.
#[derive(Default)]
struct Held(Vec<Vec<TcpStream>>);

impl Held {
    fn accept(&mut self, sockets: &[Counted], loads: &WorkerLoads) -> Result<()> {
        self.0.resize_with(sockets.len(), Vec::new);
        for ((socket, held), load) in sockets.iter().zip(&mut self.0).zip(&**loads) {
            for _ in 0..accept_queue(socket.socket.as_fd())?.length {
                held.push(socket.accept()?);
                load.accepted();
                load.holds(held.len() as u64);
            }
        }
        Ok(())
    }

    fn counts(&self) -> Vec<u64> {
        self.0.iter().map(|held| held.len() as u64).collect()
    }
}

/// Two listeners share the loads: what the one gave a worker the other sees.
fn even() -> Result<()> {
    let plane = start("even")?;
    let (v4, v6) = (
        listen(&plane, 0, V4, WORKERS)?,
        listen(&plane, 1, V6, WORKERS)?,
    );
    let loads = plane.steer(&[group(&v4), group(&v6)], Choice::LessLoaded)?;
    let loads = loads.expect("the program chooses");
    ensure!(loads.len() == WORKERS, "{} loads", loads.len());
    // As if the first worker had these already.
    loads[0].holds(20);
    let (mut by_v4, mut by_v6) = (Held::default(), Held::default());
    let mut clients = Vec::new();
    for _ in 0..100 {
        clients.extend(connect(v4[0].address, 1)?);
        by_v4.accept(&v4, &loads)?;
        let held = by_v4.counts();
        loads[0].holds(20 + held[0]);
    }
    let mut held = by_v4.counts();
    held[0] += 20;
    ensure!(spread(&held) <= EVEN, "{held:?} after v4");
    clients.extend(connect(v6[0].address, 100)?);
    by_v6.accept(&v6, &loads)?;
    let all: Vec<u64> = held
        .iter()
        .zip(by_v6.counts())
        .map(|(a, b)| a + b)
        .collect();
    ensure!(spread(&all) <= EVEN, "{all:?} after v6");
    Ok(())
}

fn burst() -> Result<()> {
    let plane = start("burst")?;
    let sockets = listen(&plane, 0, V4, WORKERS)?;
    let loads = plane.steer(&[group(&sockets)], Choice::LessLoaded)?;
    let _clients = connect(sockets[0].address, 200)?;
    let waiting = waiting(&sockets)?;
    ensure!(waiting.iter().sum::<u64>() == 200, "{waiting:?}");
    ensure!(spread(&waiting) <= EVEN, "{waiting:?}");
    let loads = loads.expect("the program chooses");
    let on_their_way: Vec<u64> = loads.iter().map(|load| load.now()).collect();
    ensure!(on_their_way == waiting, "{on_their_way:?}, {waiting:?}");
    Ok(())
}

fn second_gate() -> Result<()> {
    let first = start("upgraded")?;
    let sockets = listen(&first, 0, V4, WORKERS)?;
    let old_loads = first.steer(&[group(&sockets)], Choice::LessLoaded)?;
    let old_loads = old_loads.expect("the program chooses");
    let _clients = connect(sockets[0].address, 40)?;
    let before = waiting(&sockets)?;
    let second = start("upgraded")?;
    let loads = second.steer(&[group(&sockets)], Choice::LessLoaded)?;
    let loads = loads.expect("the program chooses");
    drop(first);
    // Of the new process, whose first worker is full.
    loads[0].holds(1000);
    let _more = connect(sockets[0].address, 90)?;
    let after = waiting(&sockets)?;
    ensure!(after[0] == before[0], "{before:?}, then {after:?}");
    let came: Vec<u64> = after.iter().zip(&before).map(|(a, b)| a - b).collect();
    // Half of the draws are of the full one and leave no choice.
    ensure!(spread(&came[1..]) <= 3 * EVEN, "{came:?}");
    let old: u64 = old_loads.iter().map(|load| load.now()).sum();
    ensure!(old == 40, "the old program still counts: {old}");
    // And back to the kernel's choice.
    ensure!(
        second.steer(&[group(&sockets)], Choice::Kernel)?.is_none(),
        "loads that nobody reads"
    );
    let _most = connect(sockets[0].address, 90)?;
    ensure!(
        waiting(&sockets)?[0] > after[0],
        "the program still chooses"
    );
    Ok(())
}

/// A second gate with fewer workers steers, and is gone.
fn stays() -> Result<()> {
    let first = start("stays")?;
    let sockets = listen(&first, 0, V4, WORKERS)?;
    let loads = first.steer(&[group(&sockets)], Choice::LessLoaded)?;
    let loads = loads.expect("the program chooses");
    let mut held = Held::default();
    let mut clients = connect(sockets[0].address, 40)?;
    held.accept(&sockets, &loads)?;
    let second = start("stays")?;
    second.steer(&[group(&sockets[..2])], Choice::LessLoaded)?;
    drop(second);
    clients.extend(connect(sockets[0].address, 40)?);
    let meanwhile = waiting(&sockets)?;
    ensure!(meanwhile[2..] == [0, 0], "not steered by the second");
    held.accept(&sockets, &loads)?;
    let again = first.steer(&[group(&sockets)], Choice::LessLoaded)?;
    let again = again.expect("the program chooses");
    ensure!(Arc::ptr_eq(&loads, &again), "other loads than the workers'");
    // The two that got nobody meanwhile have the fewest.
    clients.extend(connect(sockets[0].address, 120)?);
    held.accept(&sockets, &loads)?;
    let counts = held.counts();
    // By loads that began anew the first two would stay 20 ahead.
    ensure!(spread(&counts) <= 3 * EVEN, "{counts:?}");
    Ok(())
}

fn incoming_cpu() -> Result<()> {
    let plane = start("cpus")?;
    for (index, address) in [(0, V4), (1, V6)] {
        let sockets = listen(&plane, index, address, 2)?;
        for (cpu, each) in sockets.iter().enumerate() {
            prefer_incoming_cpu(each.socket.as_fd(), Some(cpu))?;
        }
        plane.steer(&[group(&sockets)], Choice::Kernel)?;
        let mut expected = vec![0, 0];
        for (cpu, count) in [(0, 30), (1, 50), (0, 10)] {
            // On loopback the sender's CPU handles the packets.
            pin_to_cpu(cpu)?;
            std::mem::forget(connect(sockets[0].address, count)?);
            expected[cpu] += count as u64;
            let found = waiting(&sockets)?;
            ensure!(found == expected, "{address}: {found:?}, not {expected:?}");
        }
    }
    Ok(())
}
