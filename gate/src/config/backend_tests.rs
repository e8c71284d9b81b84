//! Addresses and socket options as their users meet them: text in, values or
//! errors out.

use super::*;

fn backend(settings: &str) -> Result<Backend, ConfigError> {
    let text = format!("[backend.default]\n{settings}");
    Config::from_toml(&text).map(|mut config| config.backends.remove(0))
}

fn addresses(settings: &str) -> Vec<String> {
    let backend = backend(settings).unwrap_or_else(|error| panic!("{settings}: {error}"));
    backend.addresses.iter().map(Address::to_string).collect()
}

#[test]
fn an_address_is_of_tcp_or_a_path() {
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path().to_str().expect("utf-8");
    let named_as_a_socket = format!("{directory}/.s.PGSQL.9");
    std::fs::create_dir(&named_as_a_socket).expect("made");
    let table = [
        ("127.0.0.1:5432".to_owned(), "127.0.0.1:5432".to_owned()),
        ("[::1]:5432".to_owned(), "[::1]:5432".to_owned()),
        (directory.to_owned(), format!("{directory}/.s.PGSQL.5432")),
        (
            format!("{directory}/.s.PGSQL.5433"),
            format!("{directory}/.s.PGSQL.5433"),
        ),
        (
            named_as_a_socket.clone(),
            format!("{named_as_a_socket}/.s.PGSQL.5432"),
        ),
        (
            "/not/there/yet".to_owned(),
            "/not/there/yet/.s.PGSQL.5432".to_owned(),
        ),
        (
            "/not/there/.s.PGSQL.1/".to_owned(),
            "/not/there/.s.PGSQL.1/.s.PGSQL.5432".to_owned(),
        ),
    ];
    for (text, address) in table {
        assert_eq!(
            addresses(&format!("address = \"{text}\"")),
            [address],
            "{text}"
        );
    }
    assert_eq!(
        addresses("addresses = [\"/x\", \"127.0.0.1:2\", \"127.0.0.1:1\"]"),
        ["/x/.s.PGSQL.5432", "127.0.0.1:2", "127.0.0.1:1"],
        "in the order of the file"
    );
}

#[test]
fn a_vanished_peer_is_gone_within_two_minutes_by_default() {
    let config = Config::from_toml("").expect("valid");
    for tcp in [&config.listeners[0].tcp, &config.backends[0].tcp] {
        let keepalive = tcp.keepalive.expect("on");
        let silent = keepalive.idle + keepalive.interval * keepalive.probes;
        assert!(silent < Duration::from_secs(120), "{silent:?}");
        assert!(!tcp.user_timeout.is_zero() && tcp.user_timeout < Duration::from_secs(120));
        assert_eq!(tcp.congestion_control, None, "the system's");
    }
    assert_eq!(config.backends[0].check, Duration::from_secs(2));
}

#[test]
fn every_option_is_read() {
    let read = backend(
        "address = \"127.0.0.1:1\"\ncheck = \"0s\"\nkeepalive = \"5s\"\n\
         keepalive_interval = \"1s\"\nkeepalive_probes = 1\nuser_timeout = \"1ms\"\n\
         congestion_control = \"cubic\"",
    )
    .expect("valid");
    assert_eq!(read.check, Duration::ZERO);
    let expected = TcpOptions {
        keepalive: Some(Keepalive {
            idle: Duration::from_secs(5),
            interval: Duration::from_secs(1),
            probes: 1,
        }),
        user_timeout: Duration::from_millis(1),
        congestion_control: Some("cubic".to_owned()),
    };
    assert_eq!(read.tcp, expected);
    let off = backend("address = \"/x\"\nkeepalive = \"0s\"\nkeepalive_probes = 0");
    assert_eq!(off.expect("no probes are sent").tcp.keepalive, None);
    let of_listener = Config::from_toml("[[listener]]\nkeepalive = \"7s\"").expect("valid");
    let keepalive = of_listener.listeners[0].tcp.keepalive.expect("on");
    assert_eq!(keepalive.idle, Duration::from_secs(7));
}

#[test]
fn what_cannot_be_names_cause_and_cure() {
    let long = format!("address = \"/{}\"", "x".repeat(107));
    let many: Vec<String> = (1..=17)
        .map(|port| format!("\"127.0.0.1:{port}\""))
        .collect();
    let many = format!("addresses = [{}]", many.join(", "));
    let at = |rest: &str| format!("address = \"127.0.0.1:1\"\n{rest}");
    let table = [
        (
            "address = \"\"".to_owned(),
            "backend.default: it has no address",
        ),
        (
            "addresses = []".to_owned(),
            "backend.default: it has no address",
        ),
        (
            at("addresses = [\"127.0.0.1:2\"]"),
            "backend.default: it has both address and addresses",
        ),
        (
            "addresses = [\"127.0.0.1:2\", \"127.0.0.1:2\"]".to_owned(),
            "backend.default.addresses[1]: 127.0.0.1:2 is listed twice",
        ),
        (
            "addresses = [\"/x\", \"/x/.s.PGSQL.5432\"]".to_owned(),
            "listed twice",
        ),
        (
            "addresses = [\"127.0.0.1:2\", \"127.0.0.1:6432\"]".to_owned(),
            "gate's own listener",
        ),
        (
            "address = \"/run/gate/default/control.sock\"".to_owned(),
            "gate's own control socket",
        ),
        (many, "backend.default.addresses: there are 17"),
        (long, "backend.default.address: a path of 122 bytes"),
        (
            at("keepalive = \"1500ms\""),
            "backend.default.keepalive: the kernel has no such time",
        ),
        (
            at("check = \"9ms\""),
            "backend.default.check: a check each 9ms",
        ),
        (at("keepalive = \"10h\""), "\"1s\" to \"32767s\""),
        (
            at("keepalive_interval = \"0s\""),
            "backend.default.keepalive_interval",
        ),
        (at("keepalive_probes = 0"), "use 1 to 127"),
        (at("keepalive_probes = 128"), "128 probes"),
        (
            at("user_timeout = \"25days\""),
            "backend.default.user_timeout: the kernel has no such time",
        ),
        (at("user_timeout = \"1us\""), "whole milliseconds"),
        (
            at("congestion_control = \"\""),
            "backend.default.congestion_control: `` is no name",
        ),
        (
            at("congestion_control = \"0123456789abcdef\""),
            "is no name of one",
        ),
        (
            "[[listener]]\nkeepalive_probes = 0".to_owned(),
            "listener[0].keepalive_probes",
        ),
    ];
    for (text, message) in table {
        let error = backend(&text).expect_err(&text).to_string();
        assert!(error.contains(message), "{text}:\n{error}");
        assert!(error.contains("; "), "no cure: {error}");
    }
}

#[test]
fn the_backend_of_the_command_line_replaces_all_addresses() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let text = "[backend.default]\naddresses = [\"127.0.0.1:1\", \"/x\"]\nkeepalive = \"9s\"";
    std::fs::write(file.path(), text).expect("written");
    let flags = Flags {
        config: Some(file.path().to_owned()),
        backend: Some("/y".to_owned()),
        ..Flags::default()
    };
    let config = ConfigSource::new(flags).load().expect("valid");
    let [only] = config.backends[0].addresses.as_slice() else {
        panic!("{:?}", config.backends);
    };
    assert_eq!(only.to_string(), "/y/.s.PGSQL.5432");
    let keepalive = config.backends[0].tcp.keepalive.expect("on");
    assert_eq!(keepalive.idle, Duration::from_secs(9), "kept from the file");
}

#[test]
fn a_changed_address_or_option_waits_for_the_next_start() {
    let config = |settings: &str| Config::from_toml(settings).expect("valid");
    let old = config("");
    let at = "[backend.default]\naddress = \"127.0.0.1:5432\"\n";
    let table = [
        (format!("{at}max_connections = 3"), None),
        (format!("{at}check = \"9s\""), Some("backend")),
        (format!("{at}user_timeout = \"9s\""), Some("backend")),
        (
            "[backend.default]\naddresses = [\"127.0.0.1:5432\", \"/x\"]".to_owned(),
            Some("backend"),
        ),
        (
            "[[listener]]\nkeepalive = \"9s\"".to_owned(),
            Some("listener"),
        ),
    ];
    for (text, waits) in table {
        let waiting = config(&text).fixed_differences(&old);
        assert_eq!(waiting.first().copied(), waits, "{text}");
    }
}
