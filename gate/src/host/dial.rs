//! Sockets to backends, and what the sockets of clients inherit.

use std::io;
use std::time::Duration;

use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};

use crate::config::{Address, Config, TcpOptions};
use crate::session::outcome::ConnectFailure;

/// What this kernel can be asked for by name.
const AVAILABLE: &str = "/proc/sys/net/ipv4/tcp_available_congestion_control";

/// What this kernel takes unless it is asked for another.
const DEFAULT: &str = "/proc/sys/net/ipv4/tcp_congestion_control";

/// Bytes that wait in a socket of TCP beyond those on their way, until its
/// receiver has shown that it takes much. The kernel's own bound is megabytes: a
/// thousand clients that ask for much and never read would fill the memory that
/// all of TCP has (`net.ipv4.tcp_mem`), and slow down everybody.
const UNSENT_BYTES_MAX: u32 = 128 << 10;

/// A non-blocking socket that is connecting, or connected already.
///
/// # Errors
/// As connect(2), EINPROGRESS aside; a connection to itself is one that was
/// refused. [`io::ErrorKind::WouldBlock`] comes from a
/// unix socket whose server has not accepted as many connections as its
/// backlog holds: nothing is under way and no poll will tell, so dial again a
/// little later. A unix socket that is not there is
/// [`io::ErrorKind::NotFound`].
pub fn connect(address: &Address, options: &TcpOptions) -> io::Result<Socket> {
    let kind = Type::STREAM.nonblocking().cloexec();
    let (socket, address) = match address {
        Address::Tcp(address) => {
            let domain = Domain::for_address(*address);
            let socket = Socket::new(domain, kind, Some(Protocol::TCP))?;
            socket.set_tcp_nodelay(true)?;
            set_options(&socket, options)?;
            (socket, SockAddr::from(*address))
        }
        Address::Unix(path) => (
            Socket::new(Domain::UNIX, kind, None)?,
            SockAddr::unix(path)?,
        ),
    };
    start_connect(socket, &address)
}

fn start_connect(socket: Socket, address: &SockAddr) -> io::Result<Socket> {
    match socket.connect(address) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
        _ => {}
    }
    // Where the kernel picks the server's own port, and nobody listens there, TCP
    // connects the socket to itself: a client would hear its own words, and the
    // server could not bind its port.
    if address.is_ipv4() || address.is_ipv6() {
        let own = socket.local_addr()?;
        if own.as_socket() == address.as_socket() {
            // Gone at once, without TIME_WAIT at the server's port.
            let _ = socket.set_linger(Some(Duration::ZERO));
            return Err(io::Error::from_raw_os_error(libc::ECONNREFUSED));
        }
    }
    Ok(socket)
}

/// The kind of a failed connect. A unix socket that is not there is a server
/// that is not there.
#[must_use]
pub fn connect_failure(error: &io::Error) -> ConnectFailure {
    match error.raw_os_error() {
        Some(libc::ECONNREFUSED | libc::ENOENT) => ConnectFailure::Refused,
        Some(libc::ETIMEDOUT) => ConnectFailure::Timeout,
        Some(libc::ECONNRESET | libc::EPIPE | libc::ECONNABORTED) => ConnectFailure::Reset,
        Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENETDOWN | libc::EHOSTDOWN) => {
            ConnectFailure::Unreachable
        }
        Some(
            libc::EMFILE
            | libc::ENFILE
            | libc::ENOBUFS
            | libc::ENOMEM
            | libc::EADDRNOTAVAIL
            | libc::EPERM,
        ) => ConnectFailure::Host,
        _ => ConnectFailure::Other,
    }
}

/// Sets up a listening socket so that each socket it accepts inherits the
/// options and TCP_NODELAY: nothing is left to do at an accept. What another gate
/// that shares the socket has set and this one has not is as the system has it.
///
/// # Errors
/// The system refuses one of them.
pub fn set_client_options(listener: &Socket, options: &TcpOptions) -> io::Result<()> {
    listener.set_tcp_nodelay(true)?;
    if options.keepalive.is_none() {
        listener.set_keepalive(false)?;
    }
    if options.user_timeout.is_zero() {
        listener.set_tcp_user_timeout(None)?;
    }
    if options.congestion_control.is_none()
        && let Ok(name) = std::fs::read_to_string(DEFAULT)
        && listener.tcp_congestion()? != name.trim_end().as_bytes()
    {
        // Only then: one that was set follows the system's no more.
        listener.set_tcp_congestion(name.trim_end().as_bytes())?;
    }
    set_options(listener, options)
}

/// Checks that this kernel lets gate use every congestion control that is
/// configured.
///
/// # Errors
/// A sentence with the setting, the cause and the cure.
pub fn check_congestion_controls(config: &Config) -> Result<(), String> {
    let of_listeners = config
        .listeners
        .iter()
        .enumerate()
        .map(|(index, listener)| (format!("listener[{index}]"), &listener.tcp));
    let of_backends = config
        .backends
        .iter()
        .map(|backend| (format!("backend.{}", backend.name), &backend.tcp));
    for (section, options) in of_listeners.chain(of_backends) {
        if let Some(name) = &options.congestion_control {
            check_congestion_control(name).map_err(|error| {
                let known = std::fs::read_to_string(AVAILABLE).unwrap_or_default();
                format!(
                    "{section}.congestion_control: this kernel does not let gate use `{name}`: \
                     {error}; it has: {}; load the module (modprobe tcp_{name}), or choose one of \
                     these",
                    known.trim()
                )
            })?;
        }
    }
    Ok(())
}

fn check_congestion_control(name: &str) -> io::Result<()> {
    // A machine without one family still has the other.
    let socket = Socket::new(Domain::IPV4, Type::STREAM.cloexec(), Some(Protocol::TCP))
        .or_else(|_| Socket::new(Domain::IPV6, Type::STREAM.cloexec(), Some(Protocol::TCP)))?;
    socket.set_tcp_congestion(name.as_bytes())
}

fn set_options(socket: &Socket, options: &TcpOptions) -> io::Result<()> {
    if let Some(keepalive) = &options.keepalive {
        let keepalive = TcpKeepalive::new()
            .with_time(keepalive.idle)
            .with_interval(keepalive.interval)
            .with_retries(keepalive.probes);
        socket.set_tcp_keepalive(&keepalive)?;
    }
    if !options.user_timeout.is_zero() {
        socket.set_tcp_user_timeout(Some(options.user_timeout))?;
    }
    if let Some(name) = &options.congestion_control {
        socket.set_tcp_congestion(name.as_bytes())?;
    }
    socket.set_tcp_notsent_lowat(UNSENT_BYTES_MAX)
}

/// Lets as much wait for a receiver as the kernel allows (`net.ipv4.tcp_wmem`).
pub fn widen(socket: &Socket) {
    // A unix socket has no such bound.
    let _ = socket.set_tcp_notsent_lowat(0);
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};

    use super::*;
    use crate::config::Keepalive;

    fn options() -> TcpOptions {
        TcpOptions {
            keepalive: Some(Keepalive {
                idle: Duration::from_secs(61),
                interval: Duration::from_secs(11),
                probes: 6,
            }),
            user_timeout: Duration::from_millis(98_765),
            congestion_control: Some("reno".to_owned()),
        }
    }

    fn assert_has_options(socket: &Socket) {
        assert!(socket.tcp_nodelay().expect("nodelay"));
        let unsent = socket.tcp_notsent_lowat().expect("lowat");
        assert_eq!(unsent, UNSENT_BYTES_MAX);
        assert!(socket.keepalive().expect("keepalive"));
        assert_eq!(
            socket.tcp_keepalive_time().expect("time"),
            Duration::from_secs(61)
        );
        assert_eq!(
            socket.tcp_keepalive_interval().expect("interval"),
            Duration::from_secs(11)
        );
        assert_eq!(socket.tcp_keepalive_retries().expect("retries"), 6);
        assert_eq!(
            socket.tcp_user_timeout().expect("timeout"),
            Some(Duration::from_millis(98_765))
        );
        let name = socket.tcp_congestion().expect("name");
        assert!(name.starts_with(b"reno\0"), "{name:?}");
    }

    fn listener() -> (Socket, SocketAddr) {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        let anywhere: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
        socket.bind(&anywhere.into()).expect("bound");
        socket.listen(1).expect("listening");
        let address = socket.local_addr().expect("bound");
        (socket, address.as_socket().expect("of IPv4"))
    }

    #[test]
    fn a_tcp_socket_has_every_option() {
        let (_listener, address) = listener();
        let socket = connect(&Address::Tcp(address), &options()).expect("connecting");
        assert_has_options(&socket);
        assert!(socket.nonblocking().expect("flags"));
        let plain = connect(&Address::Tcp(address), &TcpOptions::default()).expect("connecting");
        assert!(plain.tcp_nodelay().expect("nodelay"), "always");
        assert!(!plain.keepalive().expect("keepalive"));
    }

    #[test]
    fn a_socket_that_reaches_itself_is_refused_and_leaves_the_port() {
        let anywhere: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
        let socket = Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None).expect("a socket");
        socket.bind(&anywhere.into()).expect("bound");
        let itself = socket.local_addr().expect("bound");
        let error = start_connect(socket, &itself).expect_err("nobody listens there");
        assert_eq!(connect_failure(&error), ConnectFailure::Refused);
        let server = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        server.bind(&itself).expect("the port is free");
    }

    #[test]
    fn an_accepted_socket_inherits_every_option() {
        let (listener, address) = listener();
        set_client_options(&listener, &options()).expect("set");
        let _client = std::net::TcpStream::connect(address).expect("connected");
        let (accepted, _) = listener.accept().expect("accepted");
        assert_has_options(&accepted);
        // Another gate with another configuration takes it over.
        let system = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        set_client_options(&listener, &TcpOptions::default()).expect("set");
        assert!(!listener.keepalive().expect("keepalive"));
        assert_eq!(listener.tcp_user_timeout().expect("timeout"), None);
        assert_eq!(
            listener.tcp_congestion().expect("name"),
            system.tcp_congestion().expect("name")
        );
    }

    #[test]
    fn a_unix_socket_connects_and_a_full_one_says_would_block() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join(".s.PGSQL.5432");
        let address = Address::Unix(path.clone());
        let missing = connect(&address, &options()).expect_err("nobody is there");
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        assert_eq!(connect_failure(&missing), ConnectFailure::Refused);
        let listener = Socket::new(Domain::UNIX, Type::STREAM, None).expect("a socket");
        listener
            .bind(&SockAddr::unix(&path).expect("short"))
            .expect("bound");
        listener.listen(0).expect("listening");
        let first = connect(&address, &options()).expect("connected");
        assert!(first.peer_addr().expect("connected").is_unix());
        let full = connect(&address, &options()).expect_err("its backlog is full");
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        let (_accepted, _) = listener.accept().expect("accepted");
        connect(&address, &options()).expect("there is room again");
        drop(listener);
        let refused = connect(&address, &options()).expect_err("its server is gone");
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[test]
    fn a_congestion_control_that_the_kernel_lacks_is_named() {
        let text = "[backend.default]\naddress = \"127.0.0.1:1\"\ncongestion_control = ";
        let known = Config::from_toml(&format!("{text}\"reno\"")).expect("valid");
        assert_eq!(check_congestion_controls(&known), Ok(()));
        let unknown = Config::from_toml(&format!("{text}\"surprise\"")).expect("valid");
        let error = check_congestion_controls(&unknown).expect_err("unknown");
        assert!(
            error.starts_with("backend.default.congestion_control") && error.contains("reno"),
            "{error}"
        );
    }
}
