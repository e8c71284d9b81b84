//! The control plane as its users meet it, over a ledger in memory.

mod metrics;
mod server;
mod sessions;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::api::{Connections, LimitChange};
use super::limited::{self, Limited, Scope, Watch};
use super::{connections, limits};
use crate::budget;
use crate::config::Config;
use crate::host::FdBudget;
use crate::ledger::{Applicant, Entry, Ledger, NameCache, Step};
use crate::session::outcome::Reason;
use crate::state::{KernelState, ListenerInfo, State};
use crate::stats::Stats;

/// A gate without workers: tests admit by hand.
pub(super) struct Fixture {
    pub state: Arc<State>,
    names: NameCache,
    held: Vec<Entry>,
}

impl Fixture {
    pub fn new(toml: &str) -> Self {
        let config = Config::from_toml(toml).expect("a valid configuration");
        let ledger = Ledger::local();
        ledger.apply_config(&config).expect("limits");
        let listener = |listener: &crate::config::Listener| ListenerInfo {
            address: listener.address,
            index: ledger
                .listener_index(&listener.address.to_string())
                .expect("an index"),
        };
        let listeners: Vec<_> = config.listeners.iter().map(listener).collect();
        let stats = |_| Arc::new(Stats::new(listeners.len(), config.backends.len()));
        let state = State::new(
            Arc::new(config.clone()),
            Arc::new(ledger),
            listeners.clone(),
            (0..2).map(stats).collect(),
            KernelState::Off,
            Vec::new(),
        );
        Self {
            state: Arc::new(state),
            names: NameCache::default(),
            held: Vec::new(),
        }
    }

    /// An accepted connection that stays pending.
    pub fn pending(&mut self) {
        let (entry, _) = self.accept();
        self.held.push(entry);
    }

    /// A connection that asks for admission, and stays if it gets it.
    pub fn admit(&mut self, user: &[u8], database: &[u8]) -> Result<(), Reason> {
        let (entry, _client) = self.accept();
        let who = Applicant {
            user,
            database: Some(database),
            backend: b"default",
        };
        let step = self.state.ledger.admit(&mut self.names, &entry, &who);
        let Step::Decided(admitted) = step else {
            panic!("the local ledger asks nobody");
        };
        match admitted {
            Ok(()) => self.held.push(entry),
            Err(_) => self.state.ledger.closed(entry),
        }
        admitted
    }

    /// Ends every connection.
    pub fn close_all(&mut self) {
        for entry in self.held.drain(..) {
            self.state.ledger.closed(entry);
        }
    }

    pub fn connections(&self) -> Connections {
        let state = &self.state;
        connections::read(&state.ledger, &state.listeners, &state.kernel).expect("read")
    }

    fn accept(&self) -> (Entry, std::fs::File) {
        // The form in memory never looks at the descriptor.
        let client = std::fs::File::open("/dev/null").expect("/dev/null");
        let (entry, _) = self
            .state
            .ledger
            .accepted(client.as_fd(), self.state.listeners[0].index);
        (entry, client)
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.close_all();
    }
}

const LIMITS: &str = r#"
    [limits]
    max_connections = 5000
    max_pending = 1000
    [limits.user]
    app = 3
    retired = "none"
    [limits.database]
    prod = 300
"#;

#[test]
fn connections_have_the_shape_of_the_interface() {
    let mut gate = Fixture::new(LIMITS);
    for _ in 0..3 {
        assert_eq!(gate.admit(b"app", b"prod"), Ok(()));
    }
    assert_eq!(gate.admit(b"app", b"prod"), Err(Reason::User));
    assert_eq!(gate.admit(b"strange\xff\n", b"prod"), Ok(()));
    gate.pending();
    let expected = json!({
        "total": {"active": 4, "pending": 1, "limit": 5000},
        "by_user": {
            "app": {"active": 3, "limit": 3, "source": "config"},
            "retired": {"active": 0, "limit": null, "none": true, "source": "config"},
            "strange\\xff\\x0a": {"active": 1, "limit": 0, "source": "default"},
        },
        "by_database": {"prod": {"active": 4, "limit": 300, "source": "config"}},
        "by_backend": {"default": {"active": 4, "limit": 0}},
        "defaults": {"per_user": 0, "per_database": 0},
        "kernel": {"state": "off", "listeners": [
            {"address": "127.0.0.1:6432", "sockets": 5, "ceiling": null, "over": 0},
        ]},
    });
    let read = gate.connections();
    assert_eq!(serde_json::to_value(&read).expect("JSON"), expected);
    let text = serde_json::to_string(&read).expect("JSON");
    assert!(
        text.starts_with(r#"{"total":{"active":4,"pending":1,"limit":5000},"by_user""#),
        "{text}"
    );
    let back: Connections = serde_json::from_str(&text).expect("gatectl reads it");
    assert_eq!(back, read);
    gate.close_all();
    assert_eq!(gate.connections().total.active, 0);
    assert!(
        !gate.connections().by_user.contains_key("strange\\xff\\x0a"),
        "names in use only"
    );
}

fn change(key: &str, name: Option<&str>, value: Option<&str>) -> LimitChange {
    LimitChange {
        key: key.to_owned(),
        name: name.map(str::to_owned),
        value: value.map(str::to_owned),
    }
}

#[test]
fn a_limit_set_while_running_wins_until_it_is_unset() {
    let mut gate = Fixture::new(LIMITS);
    let ledger = Arc::clone(&gate.state.ledger);
    assert_eq!(gate.admit(b"app", b"prod"), Ok(()));
    let entry = limits::set(&ledger, &change("user", Some("app"), Some("1"))).expect("set");
    assert_eq!((entry.source.as_str(), entry.used), ("runtime", Some(1)));
    assert_eq!(gate.admit(b"app", b"prod"), Err(Reason::User));
    // A reload keeps it.
    ledger.apply_config(&gate.state.config()).expect("limits");
    assert_eq!(gate.admit(b"app", b"prod"), Err(Reason::User));
    let entry = limits::unset(&ledger, &change("user", Some("app"), None)).expect("unset");
    assert_eq!(entry.source, "config");
    assert_eq!(gate.admit(b"app", b"prod"), Ok(()));
    for (value, verdict) in [
        ("none", Err(Reason::User)),
        ("0", Ok(())),
        ("unlimited", Ok(())),
    ] {
        limits::set(&ledger, &change("user", Some("app"), Some(value))).expect("set");
        assert_eq!(gate.admit(b"app", b"prod"), verdict, "{value}");
    }
    limits::set(&ledger, &change("max-connections", None, Some("1"))).expect("set");
    assert_eq!(gate.admit(b"app", b"prod"), Err(Reason::MaxConnections));
}

#[test]
fn e7_a_hostile_name_is_accepted_as_it_is_shown() {
    let mut gate = Fixture::new("");
    let ledger = Arc::clone(&gate.state.ledger);
    let name = b"a\\b\xff\n\"%s";
    let shown = "a\\\\b\\xff\\x0a\"%s";
    limits::set(&ledger, &change("user", Some(shown), Some("1"))).expect("set");
    assert_eq!(gate.admit(name, b"d"), Ok(()));
    assert_eq!(gate.admit(name, b"d"), Err(Reason::User));
    let listed = limits::list(&ledger).expect("listed");
    assert!(
        listed
            .iter()
            .any(|entry| entry.name.as_deref() == Some(shown)),
        "{listed:?}"
    );
    assert!(
        limits::export(&ledger, None)
            .expect("exported")
            .contains("'a\\\\b\\xff\\x0a\"%s' = 1")
    );
}

#[test]
fn a_change_that_cannot_be_says_why() {
    let gate = Fixture::new("[backend.default]\naddress = \"127.0.0.1:1\"");
    let table = [
        ("user", None, "1", "needs a name"),
        ("user", Some(""), "1", "a name is empty"),
        ("user", Some("a"), "many", "is not a limit"),
        ("user", Some("a"), "auto", "`auto` is for ceiling"),
        ("max-pending", None, "none", "would let nobody in"),
        ("max-connections", Some("x"), "1", "takes no name"),
        ("backend", Some("defualt"), "1", "known are: default"),
        (
            "ceiling",
            Some("127.0.0.1:1"),
            "1",
            "known are: 127.0.0.1:6432",
        ),
        ("per-source", None, "1", "not supported yet"),
        ("surprise", None, "1", "is no limit; there are: user NAME"),
    ];
    for (key, name, value, message) in table {
        let error = limits::set(&gate.state.ledger, &change(key, name, Some(value)));
        let error = error.expect_err(key).to_string();
        assert!(error.contains(message), "{key}: {error}");
    }
    let nobody = limits::unset(&gate.state.ledger, &change("user", Some("nobody"), None));
    assert!(
        nobody
            .expect_err("unknown")
            .to_string()
            .contains("no user `nobody` is known")
    );
    assert!(
        limits::list(&gate.state.ledger)
            .expect("listed")
            .iter()
            .all(|entry| entry.key != "user")
    );
}

#[test]
fn a_limit_over_the_descriptors_is_not_set() {
    let gate = Fixture::new(
        "[limits]\nmax_connections = 20\nmax_pending = 10\n\
         default_user = { max = 9, wait = \"1s\", max_waiting = 5 }",
    );
    let ledger = &gate.state.ledger;
    let set = |key: &str, name: Option<&str>, value: u64| {
        let value = value.to_string();
        limits::set(ledger, &change(key, name, Some(&value)))
    };
    let assert_most = |key: &str, name: Option<&str>, most: u64, parts: &[&str]| {
        let error = set(key, name, most + 1).expect_err(key).to_string();
        let own = [
            key.to_owned(),
            format!(" {} ", most + 1),
            format!("need {} of them", 2 * (most + 1)),
            "has 100 ".to_owned(),
            format!("to {most} or less"),
            "NOFILE".to_owned(),
        ];
        let own = own.iter().map(String::as_str);
        for part in own.chain(parts.iter().copied()) {
            assert!(error.contains(part), "{part}: {error}");
        }
        set(key, name, most).expect("fits");
    };
    ledger.set_fd_cap(100);
    // 50 connections: 10 pending, 5 waiting, and sessions.
    let others = [
        ", 10 pending clients (max_pending) 20",
        ", 5 waiting clients (max_waiting) 10",
    ];
    for (key, name) in [
        ("max-connections", None),
        ("default-user", None),
        ("default-database", None),
        ("user", Some("app")),
        ("database", Some("prod")),
    ] {
        assert_most(key, name, 35, &others);
    }
    set("max-connections", None, 21).expect("less");
    let others = [
        ", 21 sessions 42",
        ", 5 waiting clients (max_waiting) 10, 2 each",
    ];
    assert_most("max-pending", None, 24, &others);
    set("user", Some("other"), 35).expect("as the default, which was set before");
    // Without a limit on all the largest of the others counts.
    set("max-connections", None, 0).expect("none");
    set("max-pending", None, 3).expect("less");
    assert_most("max-pending", None, 10, &[", 35 sessions 70"]);
    set("max-pending", None, 0).expect("none");
    assert_most("max-connections", None, 45, &[]);
}

#[test]
fn exported_limits_are_a_configuration() {
    let gate = Fixture::new(LIMITS);
    let ledger = &gate.state.ledger;
    limits::set(ledger, &change("default-user", None, Some("7"))).expect("set");
    limits::set(ledger, &change("database", Some("prod"), Some("none"))).expect("set");
    limits::set(ledger, &change("backend", Some("default"), Some("9"))).expect("set");
    let exported = limits::export(ledger, Some(&gate.state.config().limits.waits));
    let exported = exported.expect("exported");
    let config = Config::from_toml(&exported).expect("valid");
    let mut expected = gate.state.config().limits.clone();
    // How many may wait where nobody waits says nothing.
    expected.waits = config.limits.waits.clone();
    expected.default_user = gate_common::limit::Setting::AtMost(7);
    expected
        .database
        .insert(b"prod".to_vec(), gate_common::limit::Setting::None);
    assert_eq!(config.limits, expected, "{exported}");
    assert!(
        exported.contains("# backend default: max_connections = 9"),
        "{exported}"
    );
}

#[test]
fn exported_limits_keep_their_waits_while_gate_runs() {
    let toml = "[limits]\nmax_connections = { max = 9, wait = \"1s\", max_waiting = 4 }\n\
                default_user = { max = 2, wait = \"5ms\" }\n\
                [limits.user]\napp = { max = 3, wait = \"2s\" }\nplain = 4";
    let gate = Fixture::new(toml);
    let ledger = &gate.state.ledger;
    limits::set(ledger, &change("user", Some("app"), Some("5"))).expect("set");
    let waits = gate.state.config().limits.waits.clone();
    let exported = limits::export(ledger, Some(&waits)).expect("exported");
    for line in [
        "max_connections = { max = 9, wait = \"1s\", max_waiting = 4 }",
        "default_user = { max = 2, wait = \"5ms\" }",
        "default_database = 0",
        "app = { max = 5, wait = \"2s\" }",
        "plain = 4",
    ] {
        assert!(exported.contains(&format!("{line}\n")), "{exported}");
    }
    let down = limits::export(ledger, None).expect("exported");
    assert!(down.contains("app = 5\n") && down.contains("# no gate runs"));
}

#[test]
fn exported_limits_promise_no_more_clients_a_wait_than_before() {
    // 100 connections.
    let budget = FdBudget {
        limit: 256,
        sessions: 200,
        pipes: 0,
    };
    let toml = "[limits]\nmax_connections = { max = \"auto\", wait = \"1s\" }\n\
                default_user = { max = 500, wait = \"1s\" }\n\
                default_database = { max = 20, wait = \"1s\", max_waiting = 5 }";
    let gate = Fixture::new(toml);
    let ledger = &gate.state.ledger;
    limits::set(ledger, &change("default-user", None, Some("30"))).expect("set");
    let mut config = Config::clone(&gate.state.config());
    config.limits.default_user = gate_common::limit::Setting::AtMost(30);
    let config = budget::fit(&config, &budget).expect("fits");
    ledger.apply_config(&config).expect("applied");
    let waits = &config.limits.waits;
    let exported = limits::export(ledger, Some(waits)).expect("exported");
    for line in [
        "max_connections = { max = 38, wait = \"1s\" }",
        "default_user = { max = 30, wait = \"1s\" }",
        "default_database = { max = 20, wait = \"1s\", max_waiting = 5 }",
    ] {
        assert!(exported.contains(&format!("{line}\n")), "{exported}");
    }
    let again = Config::from_toml(&exported).expect("valid");
    assert_eq!(again.limits.waits.promised(), waits.promised());
    budget::fit(&again, &budget).expect("the next start takes it");
}

#[test]
fn a_user_at_its_limit_is_a_limited_state() {
    let mut gate =
        Fixture::new("[limits]\nmax_connections = 4\n[limits.user]\napp = 2\nretired = \"none\"");
    let (mut watch, limited) = (Watch::default(), Limited::default());
    let mut look = |gate: &Fixture| {
        watch.look(&gate.state, &limited, Duration::from_secs(5));
        [Scope::User, Scope::MaxConnections].map(|scope| limited.is_limited(scope))
    };
    assert_eq!(
        look(&gate),
        [false, false],
        "a limit of nobody is not reached"
    );
    for _ in 0..2 {
        gate.admit(b"app", b"d").expect("admitted");
    }
    assert_eq!(look(&gate), [true, false]);
    let now = limited::now(&gate.state.ledger, false);
    assert_eq!(
        (now.len(), now[0].names.as_slice()),
        (1, ["app".to_owned()].as_slice())
    );
    for _ in 0..2 {
        gate.admit(b"other", b"d").expect("admitted");
    }
    assert_eq!(look(&gate), [true, true]);
    gate.close_all();
    assert_eq!(look(&gate), [false, false]);
    gate.state.stats[1].rejected(0, Reason::User);
    assert_eq!(
        look(&gate),
        [true, false],
        "a refusal between two looks is seen"
    );
}

#[test]
fn limits_on_sockets_say_that_nobody_enforces_them() {
    let gate = Fixture::new("");
    let listed = limits::list(&gate.state.ledger).expect("listed");
    let inactive: Vec<_> = listed.iter().filter(|entry| entry.inactive).collect();
    assert_eq!(inactive.len(), 3, "{inactive:?}");
    assert!(
        inactive
            .iter()
            .all(|entry| matches!(entry.key.as_str(), "ceiling" | "over-headroom"))
    );
}
