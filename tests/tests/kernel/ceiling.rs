//! The ceiling: exact under any race, and what is over it.

use std::io::ErrorKind;
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use gate::kernel::{Choice, Group, Maps};
use gate_common::abi::{SlotRef, slot};
use gate_common::cells::tokens;
use gate_common::errno::AdmitErrno;
use gate_common::limit::Setting;
use gate_common::record::{COUNTED, OVER};
use gate_tests::kernel::counted::{Counted, Counts, TOTAL, admit, set, start, used};
use gate_tests::kernel::net::{pin_to_cpu, raise_file_limit, reset, sysctl};
use socket2::SockRef;

use crate::Test;

pub const TESTS: &[Test] = &[
    (
        "racing_connects_2000_against_a_ceiling_of_100_are_never_101_counted",
        racing,
    ),
    ("ceiling_holds_while_connections_come_and_go", churning),
    (
        "lowering_finds_free_tokens_in_another_cpus_cell",
        lowering_with_full_cell,
    ),
    (
        "lowering_below_use_cuts_nobody_and_admits_nobody",
        lowering_below_use,
    ),
    ("ceiling_is_automatic_none_or_unlimited", settings),
    ("far_over_the_ceiling_a_syn_is_reset", steered),
];

const ANY: &str = "127.0.0.1:0";

/// How many of these sockets hold a token, and how many are over.
fn by_record(maps: &Maps, sockets: &[TcpStream]) -> Result<(u64, u64)> {
    let (mut counted, mut over) = (0, 0);
    for socket in sockets {
        let record = maps
            .record(socket.as_fd())
            .context("a socket has no record")?;
        counted += u64::from(record.state & COUNTED != 0);
        over += u64::from(record.state & OVER != 0);
    }
    Ok((counted, over))
}

/// Connects from several threads at once and accepts them all.
fn storm(
    listener: &Counted,
    threads: usize,
    each: usize,
) -> Result<(Vec<TcpStream>, Vec<TcpStream>)> {
    thread::scope(|scope| {
        let clients: Vec<_> = (0..threads)
            .map(|n| {
                scope.spawn(move || {
                    pin_to_cpu(n % 2)?;
                    (0..each)
                        .map(|_| listener.connect())
                        .collect::<std::io::Result<Vec<_>>>()
                })
            })
            .collect();
        let accepted = (0..threads * each)
            .map(|_| listener.accept())
            .collect::<std::io::Result<Vec<_>>>()?;
        let mut connected = Vec::new();
        for client in clients {
            connected.extend(client.join().expect("no panic")?);
        }
        Ok((connected, accepted))
    })
}

fn racing() -> Result<()> {
    raise_file_limit(10_000)?;
    let plane = start("racing")?;
    let maps = plane.maps();
    for round in 0..4_u32 {
        let listener = Counted::new(&plane, round, ANY)?;
        listener.ceiling(Setting::AtMost(100));
        let (clients, accepted) = storm(&listener, 4, 500)?;
        let (counted, over) = by_record(&maps, &accepted)?;
        ensure!(
            (counted, over) == (100, 1900),
            "{counted} counted, {over} over"
        );
        listener.settles(Counts {
            sockets: 100,
            pending: 100,
            over: 1900,
            admitted: 0,
        })?;
        ensure!(
            listener.state().over_total.load(SeqCst) == 1900,
            "over_total"
        );
        ensure_over_is_refused(&maps, &accepted)?;
        drop(clients);
        drop(accepted);
        listener.settles(Counts::NONE)?;
    }
    Ok(())
}

fn ensure_over_is_refused(maps: &Maps, accepted: &[TcpStream]) -> Result<()> {
    let absent = SlotRef::ABSENT;
    let mut admitted = 0;
    for socket in accepted {
        match admit(maps, socket.as_fd(), [TOTAL, absent, absent, absent]) {
            Ok(()) => admitted += 1,
            Err(AdmitErrno::Over) => {}
            Err(other) => anyhow::bail!("refused with {other:?}"),
        }
    }
    ensure!(admitted == 100, "{admitted} admitted");
    ensure!(
        used(maps, slot::TOTAL) == 100,
        "{} slots",
        used(maps, slot::TOTAL)
    );
    Ok(())
}

/// Never more tokens than the ceiling: each counted socket is seen by the
/// program that made it, so the acceptor's own tally cannot be too high.
fn churning() -> Result<()> {
    sysctl("net/ipv4/ip_local_port_range", "1024 65535")?;
    let plane = start("churning")?;
    let maps = plane.maps();
    let listener = Counted::new(&plane, 0, ANY)?;
    listener.ceiling(Setting::AtMost(10));
    let end = Instant::now() + Duration::from_secs(3);
    thread::scope(|scope| -> Result<()> {
        let clients: Vec<_> = (0..4)
            .map(|n| {
                let listener = &listener;
                scope.spawn(move || -> std::io::Result<u64> {
                    pin_to_cpu(n % 2)?;
                    let mut held = Vec::new();
                    let mut made = 0;
                    while Instant::now() < end {
                        held.push(listener.connect()?);
                        made += 1;
                        if held.len() > 8 {
                            reset(held.remove(0))?;
                        }
                    }
                    Ok(made)
                })
            })
            .collect();
        let mut held: Vec<TcpStream> = Vec::new();
        while let Ok(socket) = listener.accept() {
            held.push(socket);
            // Those that the client reset hold no token any more.
            let (counted, _) = by_record(&maps, &held)?;
            ensure!(counted <= 10, "{counted} sockets hold a token");
            if held.len() > 24 {
                held.remove(0);
            }
            if Instant::now() > end {
                break;
            }
        }
        for client in clients {
            ensure!(client.join().expect("no panic")? > 100, "hardly a race");
        }
        Ok(())
    })?;
    drop(listener);
    gate_tests::kernel::counted::settles(&maps, 0, Counts::NONE)
}

fn lowering_with_full_cell() -> Result<()> {
    ensure!(
        thread::available_parallelism()?.get() >= 2,
        "needs two CPUs"
    );
    let plane = start("cells")?;
    let maps = plane.maps();
    let listener = Counted::new(&plane, 0, ANY)?;
    listener.ceiling(Setting::AtMost(10_000));
    pin_to_cpu(0)?;
    drop(listener.pair()?);
    listener.settles(Counts::NONE)?;
    let free = tokens(maps.cells_sum(0)?);
    ensure!(free > 4, "only {free} tokens lie in the cell of CPU 0");
    listener.ceiling(Setting::AtMost(4));
    pin_to_cpu(1)?;
    let mut pairs = Vec::new();
    for _ in 0..4 {
        pairs.push(listener.pair()?);
    }
    listener.settles(Counts::pending(4))?;
    let over = listener.pair()?;
    listener.settles(Counts {
        over: 1,
        ..Counts::pending(4)
    })?;
    drop(over);
    pairs.pop();
    listener.settles(Counts::pending(3))?;
    pairs.push(listener.pair()?);
    listener.settles(Counts::pending(4))?;
    drop(pairs);
    listener.settles(Counts::NONE)
}

fn lowering_below_use() -> Result<()> {
    let plane = start("below")?;
    let listener = Counted::new(&plane, 0, ANY)?;
    listener.ceiling(Setting::AtMost(20));
    let mut pairs: Vec<_> = (0..20)
        .map(|_| listener.pair())
        .collect::<std::io::Result<_>>()?;
    listener.ceiling(Setting::AtMost(5));
    while pairs.len() > 4 {
        // 20 to 6 in use: still too many for one more.
        let over = listener.pair()?;
        let expected = if pairs.len() >= 5 {
            Counts {
                over: 1,
                ..Counts::pending(pairs.len() as u32)
            }
        } else {
            Counts::pending(pairs.len() as u32 + 1)
        };
        listener.settles(expected)?;
        drop(over);
        pairs.pop();
        listener.settles(Counts::pending(pairs.len() as u32))?;
    }
    pairs.push(listener.pair()?);
    listener.settles(Counts::pending(5))?;
    // Raised while one is over: that one stays over, the next is counted.
    let over = listener.pair()?;
    listener.ceiling(Setting::AtMost(7));
    pairs.push(listener.pair()?);
    listener.settles(Counts {
        over: 1,
        ..Counts::pending(6)
    })?;
    drop(over);
    listener.settles(Counts::pending(6))?;
    drop(pairs);
    listener.settles(Counts::NONE)
}

fn settings() -> Result<()> {
    let plane = start("settings")?;
    let maps = plane.maps();
    let listener = Counted::new(&plane, 0, ANY)?;
    let pair = listener.pair()?;
    listener.settles(Counts::pending(1))?;
    drop(pair);
    listener.ceiling(Setting::None);
    let pair = listener.pair()?;
    listener.settles(Counts {
        over: 1,
        ..Counts::NONE
    })?;
    drop(pair);
    listener.ceiling(Setting::Inherit);
    // auto: 10 + 10 + 64, capped by the descriptors.
    set(&maps.limits[slot::TOTAL as usize], Setting::AtMost(10));
    set(
        &maps.limits[slot::MAX_PENDING as usize],
        Setting::AtMost(10),
    );
    for cap in [84, 3] {
        if cap < 84 {
            set(&maps.limits[slot::FD_CAP as usize], Setting::AtMost(cap));
        }
        let pairs: Vec<_> = (0..=cap)
            .map(|_| listener.pair())
            .collect::<std::io::Result<_>>()?;
        listener.settles(Counts {
            over: 1,
            ..Counts::pending(cap as u32)
        })?;
        drop(pairs);
        listener.settles(Counts::NONE)?;
    }
    set(&maps.limits[slot::CEILING as usize], Setting::AtMost(1));
    let pairs: Vec<_> = (0..2)
        .map(|_| listener.pair())
        .collect::<std::io::Result<_>>()?;
    listener.settles(Counts {
        over: 1,
        ..Counts::pending(1)
    })?;
    drop(pairs);
    listener.settles(Counts::NONE)
}

fn steered() -> Result<()> {
    let plane = start("steered")?;
    let maps = plane.maps();
    set(
        &maps.limits[slot::OVER_HEADROOM as usize],
        Setting::AtMost(3),
    );
    let listener = Counted::with(&plane, 7, ANY, 64, |socket| socket.set_reuse_port(true))?;
    listener.ceiling(Setting::AtMost(2));
    let group = Group {
        listener: listener.index,
        sockets: vec![listener.socket.as_fd()],
    };
    plane.steer(&[group], Choice::LessLoaded)?;
    let mut pairs: Vec<_> = (0..5)
        .map(|_| listener.pair())
        .collect::<std::io::Result<_>>()?;
    let full = Counts {
        over: 3,
        ..Counts::pending(2)
    };
    listener.settles(full)?;
    let before = Instant::now();
    let refused = listener.connect();
    let took = before.elapsed();
    let kind = refused.as_ref().map_err(std::io::Error::kind).map(drop);
    ensure!(kind == Err(ErrorKind::ConnectionRefused), "{refused:?}");
    ensure!(took < Duration::from_millis(50), "refused after {took:?}");
    ensure!(
        listener.state().reset_total.load(SeqCst) == 1,
        "reset_total"
    );
    for (client, server) in &pairs {
        ensure!(
            SockRef::from(client).take_error()?.is_none(),
            "an old connection failed"
        );
        ensure!(
            SockRef::from(server).take_error()?.is_none(),
            "an old connection failed"
        );
    }
    listener.settles(full)?;
    pairs.pop();
    listener.settles(Counts {
        over: 2,
        ..Counts::pending(2)
    })?;
    pairs.push(listener.pair()?);
    listener.settles(full)?;
    drop(pairs);
    listener.settles(Counts::NONE)
}
