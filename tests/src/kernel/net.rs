//! Small network helpers of the kernel tier; they change the jail only.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd as _};
use std::time::Duration;

use anyhow::{Context as _, Result};
use socket2::{Domain, Protocol, SockAddr, SockRef, Socket, Type};

/// Closes with a RST.
///
/// # Errors
/// The option's.
pub fn reset(socket: TcpStream) -> io::Result<()> {
    SockRef::from(&socket).set_linger(Some(Duration::ZERO))
}

/// Begins a connection and does not wait for it.
///
/// # Errors
/// The connection's, if it fails at once.
pub fn connect_nonblocking(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    socket.set_nonblocking(true)?;
    match socket.connect(&SockAddr::from(address)) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(socket),
    }
}

/// Writes a sysctl of this network namespace, for instance
/// `net/ipv4/tcp_syncookies`.
///
/// # Errors
/// It does not exist or refuses the value.
pub fn sysctl(name: &str, value: &str) -> Result<()> {
    fs::write(format!("/proc/sys/{name}"), value).with_context(|| format!("sysctl {name}={value}"))
}

/// Keeps this thread on one CPU. On loopback the kernel then handles its
/// packets there as well.
///
/// # Errors
/// There is no such CPU.
pub fn pin_to_cpu(cpu: usize) -> io::Result<()> {
    // SAFETY: a set of bits on the stack, and its size.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Lets this process open many sockets.
///
/// # Errors
/// The kernel's refusal.
pub fn raise_file_limit(wanted: u64) -> io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: wanted,
        rlim_max: wanted,
    };
    // SAFETY: a value on the stack.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Lets a child process inherit a descriptor.
///
/// # Errors
/// The kernel's refusal.
pub fn inherit(fd: &impl AsFd) -> io::Result<i32> {
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: a call on a borrowed descriptor.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } == 0 {
        Ok(fd)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The last four numbers of an IPv4 SYN packet's sender.
#[derive(Clone, Copy, Debug)]
pub struct Sender {
    /// Its address.
    pub address: [u8; 4],
    /// Its port.
    pub port: u16,
}

/// Sends one SYN to a loopback address, as if `from` had.
///
/// # Errors
/// The raw socket's.
pub fn send_syn(raw: &Socket, from: Sender, to: SocketAddr) -> io::Result<()> {
    let SocketAddr::V4(to) = to else {
        return Err(io::ErrorKind::Unsupported.into());
    };
    let mut segment = [0_u8; 20];
    segment[..2].copy_from_slice(&from.port.to_be_bytes());
    segment[2..4].copy_from_slice(&to.port().to_be_bytes());
    segment[4..8].copy_from_slice(&1_u32.to_be_bytes());
    segment[12] = 5 << 4;
    segment[13] = 0x02;
    segment[14..16].copy_from_slice(&1024_u16.to_be_bytes());
    let sum = tcp_checksum(from.address, to.ip().octets(), &segment);
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    let mut packet = [0_u8; 40];
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&40_u16.to_be_bytes());
    packet[8] = 64;
    packet[9] = 6;
    packet[12..16].copy_from_slice(&from.address);
    packet[16..20].copy_from_slice(&to.ip().octets());
    packet[20..].copy_from_slice(&segment);
    raw.send_to(&packet, &SockAddr::from(to)).map(drop)
}

/// A raw socket for [`send_syn`].
///
/// # Errors
/// The kernel's refusal.
pub fn raw_socket() -> io::Result<Socket> {
    let kind = Type::from(libc::SOCK_RAW);
    let socket = Socket::new(Domain::IPV4, kind, Some(Protocol::from(libc::IPPROTO_RAW)))?;
    socket.set_header_included_v4(true)?;
    Ok(socket)
}

/// RFC 1071 over the pseudo header of RFC 9293 and the segment.
fn tcp_checksum(from: [u8; 4], to: [u8; 4], segment: &[u8; 20]) -> u16 {
    let pseudo = [0, 6, 0, 20];
    let bytes = from.iter().chain(&to).chain(&pseudo).chain(segment);
    let bytes: Vec<u8> = bytes.copied().collect();
    let mut sum: u32 = bytes
        .chunks_exact(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
