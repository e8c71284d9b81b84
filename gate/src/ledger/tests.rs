//! The local form, which shares everything but the memory with the kernel's.

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;

use gate_common::abi::{NameKey, NameKind, SLOTS_MAX, slot};
use gate_common::limit::Setting;

use super::*;

const CAPACITY: u32 = SLOTS_MAX - slot::FIRST_NAMED;

fn user(name: &str) -> NameKey {
    NameKey::new(NameKind::User, name.as_bytes())
}

fn applicant<'a>(user: &'a str, database: &'a str) -> Applicant<'a> {
    Applicant {
        user: user.as_bytes(),
        database: Some(database.as_bytes()),
        backend: b"default",
    }
}

fn used(ledger: &Ledger, key: &NameKey) -> u32 {
    let found = ledger.find_or_make(key).unwrap();
    slots::used(ledger.words()[found.index as usize].load(SeqCst))
}

/// The local form knows the answer at once.
fn decided(step: Step) -> Result<(), Reason> {
    match step {
        Step::Decided(answer) => answer,
        Step::Refused(reason) => Err(reason),
        Step::Ask(request) => panic!("nobody to ask: {request:?}"),
    }
}

/// Any socket will do: the local form does not look at it.
fn socket() -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    TcpStream::connect(listener.local_addr().unwrap()).unwrap()
}

#[test]
fn a5_all_slots_or_none_and_each_refusal_names_its_limit() {
    let ledger = Ledger::local();
    let mut names = NameCache::default();
    let socket = socket();
    let set = |key, number| {
        let setting = Setting::AtMost(number);
        ledger.set_limit(&key, Layer::Runtime, setting).unwrap();
    };
    set(LimitKey::MaxConnections, 3);
    set(LimitKey::User(b"app".to_vec()), 2);
    set(LimitKey::Database(b"prod".to_vec()), 1);
    let mut admit = |user, database| {
        let (entry, _) = ledger.accepted(socket.as_fd(), 0);
        match decided(ledger.admit(&mut names, &entry, &applicant(user, database))) {
            Ok(()) => Ok(entry),
            Err(reason) => {
                ledger.closed(entry);
                Err(reason)
            }
        }
    };
    let first = admit("app", "prod").unwrap();
    assert_eq!(admit("app", "prod").unwrap_err(), Reason::Database);
    let second = admit("app", "dev").unwrap();
    assert_eq!(admit("app", "dev").unwrap_err(), Reason::User);
    let third = admit("other", "dev").unwrap();
    assert_eq!(admit("fourth", "dev").unwrap_err(), Reason::MaxConnections);
    assert_eq!(ledger.admitted(), 3);
    assert_eq!(
        (used(&ledger, &user("app")), used(&ledger, &user("fourth"))),
        (2, 0)
    );
    for entry in [first, second, third] {
        ledger.closed(entry);
    }
    assert_eq!(
        (ledger.admitted(), ledger.pending(), ledger.errors()),
        (0, 0, 0)
    );
    assert_eq!(ledger.sockets(0), 0);
}

#[test]
fn one_that_asks_for_nothing_is_pending_no_more() {
    let ledger = Ledger::local();
    let socket = socket();
    let (entry, standing) = ledger.accepted(socket.as_fd(), 2);
    assert_eq!((standing, ledger.pending()), (Standing::Counted, 1));
    ledger.spoken(socket.as_fd(), &entry);
    ledger.spoken(socket.as_fd(), &entry);
    assert_eq!((ledger.pending(), ledger.admitted()), (0, 0));
    ledger.closed(entry);
    assert_eq!((ledger.pending(), ledger.errors()), (0, 0));
}

#[test]
fn strangers_cannot_fill_the_table_for_good() {
    let ledger = Ledger::local();
    let limited = LimitKey::User(b"limited".to_vec());
    ledger
        .set_limit(&limited, Layer::Config, Setting::None)
        .unwrap();
    let kept = ledger.find_or_make(&user("limited")).unwrap();
    for stranger in 0..CAPACITY * 2 {
        ledger
            .find_or_make(&user(&format!("stranger-{stranger}")))
            .unwrap();
    }
    assert_eq!(ledger.find_or_make(&user("limited")).unwrap(), kept);
    let names = ledger.all_names().unwrap();
    assert!(names.len() <= CAPACITY as usize);
    let last = user(&format!("stranger-{}", CAPACITY * 2 - 1));
    assert!(names.iter().any(|(key, _)| *key == last));
    let mut indices: Vec<_> = names.iter().map(|(_, slot)| slot.index).collect();
    indices.sort_unstable();
    indices.dedup();
    assert_eq!(indices.len(), names.len(), "two names share a slot");
}

#[test]
fn nobody_is_asked_while_a_limit_is_reached() {
    let ledger = Ledger::simulated(64, true);
    let mut names = NameCache::default();
    let socket = socket();
    let set = |setting| {
        let key = LimitKey::User(b"app".to_vec());
        ledger.set_limit(&key, Layer::Runtime, setting).unwrap();
    };
    set(Setting::AtMost(1));
    let mut admit = |entry: &Entry| ledger.admit(&mut names, entry, &applicant("app", "prod"));
    let (first, _) = ledger.accepted(socket.as_fd(), 0);
    let (second, _) = ledger.accepted(socket.as_fd(), 0);
    assert!(matches!(admit(&first), Step::Ask(request) if request.instance == 0));
    assert_eq!(admit(&second), Step::Refused(Reason::User));
    assert_eq!(ledger.pending(), 1, "the refused one is still pending");
    set(Setting::AtMost(2));
    assert!(matches!(admit(&second), Step::Ask(request) if request.instance == 0));
    assert_eq!((ledger.pending(), used(&ledger, &user("app"))), (0, 2));
    ledger.closed(first);
    ledger.closed(second);
    assert_eq!(ledger.admitted(), 0);
}

#[test]
fn a_recycled_name_is_looked_up_again() {
    let ledger = Ledger::local();
    let mut names = NameCache::default();
    let socket = socket();
    let stale = names.find(&ledger, &user("app")).unwrap();
    assert!(slots::recycle(
        &ledger.words()[stale.index as usize],
        stale.generation
    ));
    let (entry, _) = ledger.accepted(socket.as_fd(), 0);
    let answer = ledger.admit(&mut names, &entry, &applicant("app", "prod"));
    assert_eq!(answer, Step::Decided(Ok(())));
    assert_eq!(used(&ledger, &user("app")), 1);
    assert_ne!(ledger.find_or_make(&user("app")).unwrap(), stale);
    ledger.closed(entry);
}

#[test]
fn slots_of_a_process_that_died_before_it_named_them_come_back() {
    let ledger = Ledger::local();
    for word in &ledger.words()[slot::FIRST_NAMED as usize..] {
        assert!(slots::claim(word).is_some());
    }
    assert!(ledger.find_or_make(&user("app")).is_ok());
}

#[test]
fn a_full_table_of_limited_names_says_so() {
    let ledger = Ledger::local();
    for name in 0..CAPACITY {
        let found = ledger.find_or_make(&user(&format!("user-{name}"))).unwrap();
        let words = &ledger.limit_words()[found.index as usize];
        words.config.store(Setting::AtMost(1).encode(), SeqCst);
    }
    let refused = ledger.find_or_make(&user("one too many"));
    assert!(matches!(refused, Err(NamesError::Full)), "{refused:?}");
}

#[test]
fn a_limit_of_gatectl_wins_until_it_is_unset() {
    let ledger = Ledger::local();
    let key = LimitKey::User(b"app".to_vec());
    let row = |ledger: &Ledger| {
        let rows = ledger.limits().unwrap();
        let row = rows.into_iter().find(|row| row.key == key).unwrap();
        (row.limit, row.source)
    };
    let set = |layer, setting| ledger.set_limit(&key, layer, setting).unwrap();
    set(Layer::Config, Setting::AtMost(5));
    assert_eq!(row(&ledger), (Limit::AtMost(5), LimitSource::Config));
    set(Layer::Runtime, Setting::AtMost(2));
    set(Layer::Config, Setting::AtMost(9));
    assert_eq!(row(&ledger), (Limit::AtMost(2), LimitSource::Runtime));
    set(Layer::Runtime, Setting::Inherit);
    assert_eq!(row(&ledger), (Limit::AtMost(9), LimitSource::Config));
    set(Layer::Config, Setting::Inherit);
    ledger
        .set_limit(&LimitKey::DefaultUser, Layer::Runtime, Setting::None)
        .unwrap();
    assert_eq!(row(&ledger), (Limit::None, LimitSource::Default));
}

#[test]
fn an_address_keeps_its_listener_and_idle_ones_make_room() {
    let ledger = Ledger::local();
    let first = ledger.listener_index("127.0.0.1:1").unwrap();
    assert_eq!(ledger.listener_index("127.0.0.1:1").unwrap(), first);
    let socket = socket();
    let (entry, _) = ledger.accepted(socket.as_fd(), first);
    for port in 2..200 {
        let index = ledger.listener_index(&format!("127.0.0.1:{port}")).unwrap();
        assert_ne!(index, first, "an index with a live socket was taken");
    }
    assert_eq!(ledger.listener_index("127.0.0.1:1").unwrap(), first);
    ledger.closed(entry);
}
