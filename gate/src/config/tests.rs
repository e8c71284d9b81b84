//! The configuration as its users meet it: text in, values or errors out.

use clap::Parser;

use super::settings::{LimitSettings, Settings};
use super::value::LimitValue;
use super::*;

#[test]
fn defaults_are_those_of_the_interface() {
    let config = Config::from_toml("").expect("an empty file is a configuration");
    assert_eq!(config.instance, "default");
    assert_eq!(config.listeners[0].address.to_string(), "127.0.0.1:6432");
    assert_eq!(config.listeners[0].ceiling, Setting::Inherit);
    assert_eq!(
        config.backends[0].addresses[0].to_string(),
        "127.0.0.1:5432"
    );
    assert_eq!(config.backends[0].max_connections, Setting::Unlimited);
    assert_eq!(config.limits.max_connections, Setting::AtMost(5000));
    assert!(config.limits.max_connections_auto);
    assert!(!config.limits.waits.max_connections.waits());
    assert_eq!(config.limits.max_pending, Setting::AtMost(1000));
    assert_eq!(config.limits.ceiling, Setting::Auto);
    assert_eq!(config.limits.default_user, Setting::Unlimited);
    assert_eq!(config.timeouts.abandoned, Duration::from_secs(60));
    assert_eq!(config.timeouts.idle, Duration::ZERO);
    assert_eq!(
        config.control,
        PathBuf::from("/run/gate/default/control.sock")
    );
    assert_eq!(config.admin.map(|admin| admin.port()), Some(9632));
    assert!(config.workers.count >= Some(1));
}

/// Everything that a file can say.
const FULL: &str = r#"
    instance = "pg-main"
    kernel = "off"
    control = "/tmp/it's \"here\".sock"
    admin = "off"
    log_format = "json"
    [[listener]]
    address = "127.0.0.1:7000"
    ceiling = 500
    [[listener]]
    address = "[::1]:7000"
    keepalive = "0s"
    user_timeout = "0s"
    [backend.a]
    addresses = ["127.0.0.2:5432", "[::1]:5433", "/nonexistent/.s.PGSQL.5434"]
    check = "500ms"
    max_connections = 7
    keepalive = "2m"
    keepalive_interval = "1s"
    keepalive_probes = 127
    user_timeout = "1500ms"
    congestion_control = "reno"
    [backend.default]
    address = "localhost:5432"
    [database.prod]
    backend = "a"
    [database."caf\\xe9"]
    [limits]
    max_connections = "none"
    max_pending = 10
    ceiling = "unlimited"
    over_headroom = 3
    default_user = 2
    default_database = 4
    [limits.user]
    app = 50
    admin = 0
    retired = "none"
    "a b" = "unlimited"
    '\xff\\' = 4294967295
    [limits.database]
    prod = 300
    [timeouts]
    startup = "1m 30s"
    connect = "1500ms"
    auth = "1h"
    cancel = "1s"
    idle = "0s"
    drain = "0s"
    abandoned = "5s"
    [workers]
    pin = [0]
"#;

#[test]
fn everything_that_a_file_can_say_is_read() {
    let config = Config::from_toml(FULL).expect("valid");
    assert_eq!(config.listeners[0].ceiling, Setting::AtMost(500));
    let names: Vec<_> = config
        .backends
        .iter()
        .map(|backend| backend.name.as_str())
        .collect();
    assert_eq!(names, ["default", "a"]);
    assert_eq!(config.databases[b"prod".as_slice()], 1);
    assert_eq!(config.databases[b"caf\xe9".as_slice()], 0);
    assert_eq!(config.limits.max_connections, Setting::None);
    assert!(!config.limits.max_connections_auto);
    assert_eq!(config.limits.ceiling, Setting::Unlimited);
    assert_eq!(config.limits.user[b"app".as_slice()], Setting::AtMost(50));
    assert_eq!(config.limits.user[b"admin".as_slice()], Setting::Unlimited);
    assert_eq!(config.limits.user[b"retired".as_slice()], Setting::None);
    assert_eq!(
        config.limits.user[b"\xff\\".as_slice()],
        Setting::AtMost(u64::from(u32::MAX))
    );
    assert_eq!(config.timeouts.startup, Duration::from_secs(90));
    assert_eq!(config.workers.pin, Pin::List(vec![0]));
    assert_eq!(config.workers.count, Some(1));
    assert_eq!(config.admin, None);
}

#[test]
fn workers_on_the_queues_of_a_device_are_counted_at_the_start() {
    let config = Config::from_toml("[workers]\npin = \"nic:eth0\"").expect("valid");
    assert_eq!(config.workers.pin, Pin::Nic("eth0".to_owned()));
    assert_eq!(config.workers.count, None);
    let config = Config::from_toml("[workers]\npin = \"nic:eth0\"\ncount = 4").expect("valid");
    assert_eq!(config.workers.count, Some(4));
}

#[test]
fn what_is_printed_reads_back_as_the_same() {
    for text in ["", FULL, "[workers]\npin = \"nic:eth0\""] {
        let settings: Settings = toml::from_str(text).expect("valid");
        let printed = render::to_toml(&settings);
        let back: Settings = toml::from_str(&printed).unwrap_or_else(|e| panic!("{e}\n{printed}"));
        assert_eq!(back, settings);
        let config = Config::from_toml(&printed).expect("valid");
        assert_eq!(config, Config::from_settings(&settings).expect("valid"));
    }
}

#[test]
fn exported_limits_read_back_as_the_same() {
    let settings: Settings = toml::from_str(FULL).expect("valid");
    let printed = render::limits_to_toml(&settings.limits);
    let back: Settings = toml::from_str(&printed).expect("valid");
    assert_eq!(back.limits, settings.limits);
    assert!(!printed.contains('#'), "{printed}");
}

#[test]
fn the_committed_example_is_what_is_printed() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/gate.toml");
    let current = render::to_toml(&Settings::default());
    if std::env::var_os("GATE_UPDATE_DOCS").is_some() {
        std::fs::write(path, &current).expect("docs/gate.toml can be written");
    }
    let committed = std::fs::read_to_string(path).expect("docs/gate.toml");
    assert!(
        committed == current,
        "docs/gate.toml is not what gate --print-config prints: run this test with GATE_UPDATE_DOCS=1"
    );
    for documented in [
        "# ceiling = 500",
        "abandoned = \"1m\"",
        "# [limits.user]",
        "[limits]",
    ] {
        assert!(current.contains(documented), "{documented} is missing");
    }
}

#[test]
fn errors_in_the_text_name_the_line() {
    let table = [
        (
            "instance = \"a\"\nsurprise = 1",
            "line 2",
            "unknown field `surprise`",
        ),
        ("[limits]\n\nmax = 1", "line 3", "unknown field `max`"),
        (
            "[limits]\nmax_connections = -1",
            "line 2",
            "-1 is not a limit",
        ),
        (
            "[limits]\nmax_connections = 4294967296",
            "line 2",
            "is not a limit",
        ),
        (
            "[limits.user]\na = 1\nb = \"many\"",
            "line 3",
            "`many` is not a limit",
        ),
        ("[timeouts]\nstartup = 15", "line 2", "needs its unit"),
        (
            "[timeouts]\nstartup = \"15\"",
            "line 2",
            "is not a duration",
        ),
        (
            "[timeouts]\nstartup = \"3years\"",
            "line 2",
            "longer than a year",
        ),
        ("[workers]\ncount = 0", "line 2", "use `auto` or 1 to"),
        (
            "[workers]\npin = \"nic:\"",
            "line 2",
            "names no network device",
        ),
        ("[workers]\npin = [1, 1]", "line 2", "listed twice"),
        ("[workers]\npin = []", "line 2", "an empty list"),
        ("kernel = \"on\"", "line 1", "`on` is none of the words"),
        ("instance = ", "line 1", ""),
    ];
    for (text, line, message) in table {
        let error = Config::from_toml(text).expect_err(text).to_string();
        assert!(
            error.contains(line) && error.contains(message),
            "{text}:\n{error}"
        );
    }
}

#[test]
fn errors_between_settings_name_cause_and_cure() {
    let table = [
        ("instance = \"A.b\"", "instance: `A.b` is not 1 to 32"),
        ("instance = \"\"", "is not 1 to 32"),
        (
            "control = \"x.sock\"",
            "control: `x.sock` is not an absolute path",
        ),
        ("listener = []", "listener: there is none"),
        (
            "[[listener]]\n[[listener]]",
            "127.0.0.1:6432 is listed twice",
        ),
        ("[[listener]]\naddress = \"127.0.0.1:0\"", "has port 0"),
        (
            "[[listener]]\naddress = \"/run/x\"",
            "a unix socket is possible for a backend only",
        ),
        (
            "[[listener]]\naddress = \"6432\"",
            "listener[0].address: `6432` is no address",
        ),
        (
            "[[listener]]\naddress = \"*:6432\"",
            "0.0.0.0 or [::] for every address",
        ),
        ("[[listener]]\naddress = \":6432\"", "it has no host"),
        ("[[listener]]\naddress = \"127.0.0.1:70000\"", "is no port"),
        (
            "admin = \"none\"",
            "it has no port; use host:port or [v6]:port, or \"off\"",
        ),
        ("control = \"/nonexistent/\"", "name the socket in it"),
        (
            "[backend.default]\naddress = \"var/run/postgresql\"",
            "which begins with `/`",
        ),
        (
            "[backend.x]\naddress = \"127.0.0.1:1\"",
            "there is none named `default`",
        ),
        ("[backend.default]", "backend.default: it has no address"),
        (
            "[backend.default]\naddress = \"127.0.0.1:6432\"",
            "it would connect to itself",
        ),
        (
            "[[listener]]\naddress = \"0.0.0.0:6432\"\n[backend.default]\naddress = \"127.0.0.1:6432\"",
            "gate's own listener 0.0.0.0:6432",
        ),
        (
            "[backend.default]\naddress = \"0.0.0.0:1\"",
            "nobody can connect",
        ),
        (
            "[database.a]\nbackend = \"x\"",
            "there is no backend `x`; known are: default",
        ),
        (
            "admin = \"127.0.0.1:6432\"",
            "admin: the address of the listener",
        ),
        (
            "[limits]\ndefault_user = \"auto\"",
            "limits.default_user: \"auto\" is for ceilings, over_headroom and max_connections",
        ),
        ("[limits]\nmax_pending = \"none\"", "would let nobody in"),
        (
            "[limits]\nmax_pending = \"auto\"",
            "use a number, or 0 (unlimited)",
        ),
        ("[limits]\nceiling_per_source = 5", "not supported yet"),
        ("[limits.user]\n\"\" = 1", "a name is empty"),
        ("[limits.user]\n'\\y' = 1", "begins no escape"),
        ("[limits.user]\na = 1\n'\\x61' = 1", "second spelling"),
        ("[timeouts]\nauth = \"0s\"", "timeouts.auth: 0 would end"),
        ("[workers]\ncount = 2\npin = [0]", "2 workers, but 1 CPUs"),
    ];
    for (text, message) in table {
        let error = Config::from_toml(text).expect_err(text).to_string();
        assert!(error.contains(message), "{text}:\n{error}");
        assert!(error.contains("; "), "no cure: {error}");
    }
    let long = format!("[limits.database]\n{} = 1", "x".repeat(64));
    let error = Config::from_toml(&long).expect_err("too long").to_string();
    assert!(error.contains("64 bytes"), "{error}");
}

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    flags: Flags,
}

fn source(arguments: &[&str]) -> ConfigSource {
    let line = Line::try_parse_from([&["gate"], arguments].concat()).expect("valid flags");
    ConfigSource::new(line.flags)
}

#[test]
fn flags_win_over_the_file() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), FULL).expect("written");
    let path = file.path().to_str().expect("utf-8");
    let line = [
        "--config",
        path,
        "--listen",
        "127.0.0.1:7000",
        "--listen",
        "127.0.0.1:7001",
        "--backend",
        "127.0.0.9:9",
        "--instance",
        "other",
        "--kernel",
        "required",
        "--admin",
        "127.0.0.1:9",
        "--log-format",
        "text",
        "--control",
        "/c.sock",
    ];
    let config = source(&line).load().expect("valid");
    assert_eq!(config.listeners.len(), 2);
    assert_eq!(
        config.listeners[0].ceiling,
        Setting::AtMost(500),
        "kept from the file"
    );
    assert_eq!(config.listeners[1].ceiling, Setting::Inherit);
    assert_eq!(config.backends[0].addresses[0].to_string(), "127.0.0.9:9");
    assert_eq!(config.instance, "other");
    assert_eq!(config.kernel, KernelMode::Required);
    assert_eq!(config.log_format, LogFormat::Text);
    assert_eq!(config.control, PathBuf::from("/c.sock"));
    assert_eq!(config.limits.max_pending, Setting::AtMost(10), "the file's");
    assert_eq!(
        source(&["--workers", "3"])
            .load()
            .expect("valid")
            .workers
            .count,
        Some(3)
    );
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let error = source(&["--config", "/nonexistent/gate.toml"])
        .load()
        .expect_err("no file");
    assert!(
        error.to_string().contains("/nonexistent/gate.toml"),
        "{error}"
    );
}

#[test]
fn a_reload_names_what_waits_for_the_next_start() {
    let old = Config::from_toml("").expect("valid");
    let new = Config::from_toml(
        "[[listener]]\nceiling = 9\n[limits]\nmax_connections = 9\n[timeouts]\nauth = \"1s\"",
    )
    .expect("valid");
    assert!(new.fixed_differences(&old).is_empty());
    let moved = Config::from_toml("[[listener]]\naddress = \"127.0.0.1:1\"").expect("valid");
    assert_eq!(moved.fixed_differences(&old), ["listener"]);
}

#[test]
fn limits_are_written_as_they_are_read() {
    for text in ["none", "unlimited", "auto", "1", "4294967295"] {
        let value: LimitValue = text.parse().expect(text);
        assert_eq!(value.to_string(), text);
    }
    assert_eq!("0".parse(), Ok(LimitValue(Setting::Unlimited)));
    for text in ["-1", "4294967296", "", "1.5", "None", "inherit"] {
        assert!(text.parse::<LimitValue>().is_err(), "{text}");
    }
    assert_eq!(LimitSettings::default().ceiling.to_string(), "auto");
}
