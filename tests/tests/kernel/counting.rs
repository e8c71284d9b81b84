//! Each row of "sock_ops counting returns to zero", FACTS.md section 3.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gate_tests::kernel::counted::{Counted, Counts, start, used};
use gate_tests::kernel::net::{self, Sender, connect_nonblocking, reset, sysctl};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::Test;
use crate::victim::Victim;

pub const TESTS: &[Test] = &[
    ("count_returns_after_fin_from_either_side", fin),
    ("count_returns_after_rst_from_either_side", rst),
    ("count_holds_through_half_close", half_close),
    ("count_returns_after_sigkill_with_200_open", sigkill),
    (
        "count_returns_after_close_or_rst_before_accept",
        before_accept,
    ),
    (
        "count_returns_after_listener_closed_with_full_queue",
        full_queue,
    ),
    (
        "count_returns_after_listener_killed_with_full_queue",
        killed_with_queue,
    ),
    ("count_returns_after_backlog_overflow", overflow),
    ("count_is_true_under_syn_flood_with_syncookies", syn_flood),
    ("count_returns_after_tcp_fast_open", fast_open),
    ("count_covers_ipv6_and_v4_mapped", ipv6),
    (
        "l2_no_count_is_left_by_100000_connections_without_a_byte",
        l2_churn,
    ),
    ("l3_outgoing_connections_are_not_counted", l3_outgoing),
];

const ANY: &str = "127.0.0.1:0";

fn fin() -> Result<()> {
    let plane = start("fin")?;
    let listener = Counted::new(&plane, 0, ANY)?;
    let (client, server) = listener.pair()?;
    listener.settles(Counts::pending(1))?;
    drop(client);
    drop(server);
    listener.settles(Counts::NONE)?;
    let (client, server) = listener.pair()?;
    drop(server);
    // FIN_WAIT2 without a descriptor is no socket any more, and TIME_WAIT
    // neither.
    listener.settles(Counts::NONE)?;
    drop(client);
    listener.settles(Counts::NONE)
}

fn rst() -> Result<()> {
    let plane = start("rst")?;
    let listener = Counted::new(&plane, 0, ANY)?;
    let (client, server) = listener.pair()?;
    reset(client)?;
    listener.settles(Counts::NONE)?;
    drop(server);
    listener.settles(Counts::NONE)?;
    let (_client, server) = listener.pair()?;
    listener.settles(Counts::pending(1))?;
    reset(server)?;
    listener.settles(Counts::NONE)
}

fn half_close() -> Result<()> {
    let plane = start("half")?;
    let listener = Counted::new(&plane, 0, ANY)?;
    for client_first in [true, false] {
        let (client, server) = listener.pair()?;
        let (mut first, mut second) = if client_first {
            (client, server)
        } else {
            (server, client)
        };
        first.shutdown(Shutdown::Write)?;
        ensure!(second.read(&mut [0; 8])? == 0, "no EOF");
        second.write_all(b"late")?;
        first.read_exact(&mut [0; 4])?;
        listener.settles(Counts::pending(1))?;
        drop(second);
        drop(first);
        listener.settles(Counts::NONE)?;
    }
    Ok(())
}

fn sigkill() -> Result<()> {
    let plane = start("sigkill")?;
    let maps = plane.maps();
    let listener = Counted::new(&plane, 0, ANY)?;
    let mut victim = Victim::start("sigkill", &listener, 200)?;
    let clients: Vec<TcpStream> = (0..200)
        .map(|_| listener.connect())
        .collect::<Result<_, _>>()?;
    victim.wait_ready()?;
    let open = Counts {
        sockets: 200,
        admitted: 200,
        ..Counts::NONE
    };
    listener.settles(open)?;
    ensure!(used(&maps, 0) == 200, "{} slots", used(&maps, 0));
    victim.kill()?;
    listener.settles(Counts::NONE)?;
    ensure!(used(&maps, 0) == 0, "{} slots are left", used(&maps, 0));
    drop(clients);
    listener.settles(Counts::NONE)
}

fn before_accept() -> Result<()> {
    let plane = start("before")?;
    let listener = Counted::new(&plane, 0, ANY)?;
    reset(listener.connect()?)?;
    listener.settles(Counts::NONE)?;
    drop(listener.connect()?);
    // The queue still holds it, half-closed.
    listener.settles(Counts::pending(1))?;
    let (first, second) = (listener.accept()?, listener.accept()?);
    drop((first, second));
    listener.settles(Counts::NONE)
}

fn full_queue() -> Result<()> {
    let plane = start("queue")?;
    let maps = plane.maps();
    let listener = Counted::new(&plane, 0, ANY)?;
    let clients: Vec<TcpStream> = (0..300)
        .map(|_| listener.connect())
        .collect::<Result<_, _>>()?;
    listener.settles(Counts::pending(300))?;
    drop(listener);
    gate_tests::kernel::counted::settles(&maps, 0, Counts::NONE)?;
    drop(clients);
    Ok(())
}

fn killed_with_queue() -> Result<()> {
    let plane = start("killed")?;
    let maps = plane.maps();
    let listener = Counted::new(&plane, 0, ANY)?;
    let mut victim = Victim::start("killed", &listener, 1)?;
    let clients: Vec<TcpStream> = (0..300)
        .map(|_| listener.connect())
        .collect::<Result<_, _>>()?;
    victim.wait_ready()?;
    drop(listener);
    let open = Counts {
        sockets: 300,
        pending: 299,
        admitted: 1,
        ..Counts::NONE
    };
    gate_tests::kernel::counted::settles(&maps, 0, open)?;
    victim.kill()?;
    gate_tests::kernel::counted::settles(&maps, 0, Counts::NONE)?;
    drop(clients);
    Ok(())
}

fn overflow() -> Result<()> {
    const BACKLOG: i32 = 8;
    let plane = start("overflow")?;
    let listener = Counted::with(&plane, 0, ANY, BACKLOG, |_| Ok(()))?;
    let clients: Vec<Socket> = (0..100)
        .map(|_| connect_nonblocking(listener.address))
        .collect::<Result<_, _>>()?;
    // The queue takes one more than its backlog (sk_acceptq_is_full).
    listener.settles(Counts::pending(BACKLOG as u32 + 1))?;
    drop(clients);
    let maps = plane.maps();
    drop(listener);
    gate_tests::kernel::counted::settles(&maps, 0, Counts::NONE)
}

fn syn_flood() -> Result<()> {
    // 2: a cookie for every SYN, not only when the queue is full.
    sysctl("net/ipv4/tcp_syncookies", "2")?;
    let plane = start("cookies")?;
    let listener = Counted::new(&plane, 0, ANY)?;
    let raw = net::raw_socket()?;
    let mut pairs = Vec::new();
    for n in 0..5_000_u16 {
        let [high, low] = n.to_be_bytes();
        let from = Sender {
            address: [127, 77, high, low],
            port: 20_000 + n,
        };
        net::send_syn(&raw, from, listener.address)?;
        if n % 500 == 0 {
            pairs.push(listener.pair()?);
        }
    }
    ensure!(cookies_sent()? >= 5_000, "no SYN cookies were sent");
    listener.settles(Counts::pending(10))?;
    drop(pairs);
    listener.settles(Counts::NONE)
}

/// `SyncookiesSent` of this network namespace.
fn cookies_sent() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/net/netstat")?;
    let mut lines = text.lines().filter(|line| line.starts_with("TcpExt:"));
    let (names, values) = (
        lines.next().context("names")?,
        lines.next().context("values")?,
    );
    names
        .split(' ')
        .zip(values.split(' '))
        .find(|(name, _)| *name == "SyncookiesSent")
        .context("no SyncookiesSent")?
        .1
        .parse()
        .context("not a number")
}

fn fast_open() -> Result<()> {
    /// Client and server, neither asks for a cookie, every listener takes it
    /// (Documentation/networking/ip-sysctl.rst, tcp_fastopen).
    const BOTH_WITHOUT_COOKIES: &str = "1543";
    const TCPI_OPT_SYN_DATA: u8 = 32;
    sysctl("net/ipv4/tcp_fastopen", BOTH_WITHOUT_COOKIES)?;
    let plane = start("tfo")?;
    let listener = Counted::new(&plane, 0, ANY)?;
    for reset_it in [false, true] {
        let client = Socket::new(Domain::IPV4, Type::STREAM, Some(Protocol::TCP))?;
        let to = SockAddr::from(listener.address);
        client.send_to_with_flags(b"hello", &to, libc::MSG_FASTOPEN)?;
        let mut server = listener.accept()?;
        server.read_exact(&mut [0; 5])?;
        ensure!(
            tcp_options(&server)? & TCPI_OPT_SYN_DATA != 0,
            "no data came with the SYN"
        );
        listener.settles(Counts::pending(1))?;
        if reset_it {
            reset(client.into())?;
        } else {
            drop(client);
        }
        drop(server);
        listener.settles(Counts::NONE)?;
    }
    Ok(())
}

/// `tcpi_options`.
fn tcp_options(socket: &TcpStream) -> Result<u8> {
    // SAFETY: plain numbers.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: room for the answer, and its size.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    ensure!(result == 0, "TCP_INFO: {}", std::io::Error::last_os_error());
    Ok(info.tcpi_options)
}

fn ipv6() -> Result<()> {
    let plane = start("ipv6")?;
    let listener = Counted::with(&plane, 0, "[::]:0", 16, |socket| socket.set_only_v6(false))?;
    let port = listener.address.port();
    let to: [SocketAddr; 2] = [
        ([0, 0, 0, 0, 0, 0, 0, 1], port).into(),
        ([127, 0, 0, 1], port).into(),
    ];
    let mut pairs = Vec::new();
    for (done, address) in (1..).zip(to) {
        let client = TcpStream::connect(address)?;
        pairs.push((client, listener.accept()?));
        listener.settles(Counts::pending(done))?;
    }
    let record = plane.maps().record(pairs[1].1.as_fd());
    ensure!(record.is_some(), "the v4-mapped socket has no record");
    drop(pairs);
    listener.settles(Counts::NONE)
}

fn l2_churn() -> Result<()> {
    const CLIENTS: u32 = 4;
    const ROUNDS: u32 = 25_000;
    sysctl("net/ipv4/ip_local_port_range", "1024 65535")?;
    sysctl("net/ipv4/tcp_tw_reuse", "1")?;
    let plane = start("churn")?;
    let listener = Counted::new(&plane, 0, "0.0.0.0:0")?;
    let port = listener.address.port();
    let over = &AtomicBool::new(false);
    thread::scope(|scope| -> Result<()> {
        // A client that resets while the queue is full is never accepted: the
        // server ends when there is nothing left, not after so many.
        let server = scope.spawn(|| while listener.accept().is_ok() || !over.load(SeqCst) {});
        let clients: Vec<_> = (1..=CLIENTS as u8)
            .map(|client| scope.spawn(move || churn(([127, 0, 0, client], port).into(), ROUNDS)))
            .collect();
        for client in clients {
            client.join().expect("no panic")?;
        }
        over.store(true, SeqCst);
        server.join().expect("no panic");
        Ok(())
    })?;
    listener.settles(Counts::NONE)?;
    // Then resets in the accept queue, and the listener goes with it full.
    for _ in 0..500 {
        reset(listener.connect_to([127, 0, 0, 1])?)?;
    }
    listener.settles(Counts::NONE)?;
    let left: Vec<TcpStream> = (0..500)
        .map(|_| listener.connect_to([127, 0, 0, 1]))
        .collect::<Result<_, _>>()?;
    listener.settles(Counts::pending(500))?;
    let maps = plane.maps();
    drop(listener);
    gate_tests::kernel::counted::settles(&maps, 0, Counts::NONE)?;
    drop(left);
    Ok(())
}

/// Connects and closes, one in two with a RST.
fn churn(address: SocketAddr, rounds: u32) -> Result<()> {
    for round in 0..rounds {
        let client = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
        if round % 2 == 0 {
            reset(client)?;
        }
    }
    Ok(())
}

fn l3_outgoing() -> Result<()> {
    let plane = start("outgoing")?;
    let listener = Counted::new(&plane, 0, ANY)?;
    let backend = std::net::TcpListener::bind(ANY)?;
    // From this very cgroup: to the backend, and to gate's own port.
    let mut dials = Vec::new();
    for _ in 0..20 {
        let dial = TcpStream::connect(backend.local_addr()?)?;
        let (accepted, _) = backend.accept()?;
        ensure!(
            plane.maps().record(dial.as_fd()).is_none(),
            "a dial has a record"
        );
        ensure!(
            plane.maps().record(accepted.as_fd()).is_none(),
            "a backend's socket has a record"
        );
        dials.push((dial, accepted));
    }
    listener.settles(Counts::NONE)?;
    let (client, server) = listener.pair()?;
    ensure!(
        plane.maps().record(client.as_fd()).is_none(),
        "a client has a record"
    );
    listener.settles(Counts::pending(1))?;
    drop(dials);
    listener.settles(Counts::pending(1))?;
    drop(client);
    listener.settles(Counts::pending(1))?;
    drop(server);
    listener.settles(Counts::NONE)?;
    Ok(())
}
