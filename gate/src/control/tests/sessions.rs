//! Sessions as workers tell them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::super::api::{SessionQuery, Sessions};
use super::super::sessions::{self, QueryError};
use super::Fixture;
use crate::config::name::NameError;
use crate::session::outcome::SessionState;
use crate::sessions::{Answer, Inquiry, Record, SessionId};
use crate::state::State;

fn list(state: &State, query: &SessionQuery) -> Result<Sessions, QueryError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .expect("a runtime");
    runtime.block_on(sessions::list(state, query))
}

/// A worker's thread that answers one inquiry.
fn worker(
    state: &Arc<State>,
    number: usize,
    answer: impl FnOnce(&Inquiry) + Send + 'static,
) -> JoinHandle<()> {
    let state = Arc::clone(state);
    thread::spawn(move || {
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(10) {
            if let Some(inquiry) = state.inboxes[number].take().pop() {
                return answer(&inquiry);
            }
            thread::sleep(Duration::from_millis(1));
        }
    })
}

fn record(worker: usize, generation: u32, age: u64) -> Record {
    Record {
        id: SessionId::new(worker, 2, generation),
        user: Some(b"a\\b\xff\n".to_vec()),
        database: None,
        source: "[::ffff:10.0.0.1]:5000"
            .parse::<SocketAddr>()
            .ok()
            .map(Into::into),
        backend: Some((0, 0)),
        state: SessionState::Active,
        age: Duration::from_millis(age),
        idle: Duration::from_millis(3),
        bytes: [7, 800],
    }
}

fn send(inquiry: &Inquiry, records: Vec<Record>) {
    let _ = inquiry.answers.send(Answer::Sessions(records));
}

fn done(inquiry: &Inquiry, worker: usize) {
    let _ = inquiry.answers.send(Answer::Done(worker));
}

#[test]
fn the_sessions_of_all_workers_come_oldest_first() {
    let gate = Fixture::new("[backend.default]\naddress = \"127.0.0.1:5555\"");
    let threads = [
        worker(&gate.state, 0, |inquiry| {
            send(inquiry, vec![record(0, 1, 10), record(0, 2, 30)]);
            send(inquiry, vec![record(0, 3, 20)]);
            done(inquiry, 0);
        }),
        worker(&gate.state, 1, |inquiry| {
            send(inquiry, vec![record(1, 1, 25)]);
            done(inquiry, 1);
        }),
    ];
    let query = SessionQuery {
        limit: Some(3),
        ..SessionQuery::default()
    };
    let began = Instant::now();
    let listed = list(&gate.state, &query).expect("listed");
    assert!(began.elapsed() < Duration::from_secs(2), "it did not wait");
    for thread in threads {
        thread.join().expect("no panic");
    }
    let ids: Vec<u64> = listed.sessions.iter().map(|session| session.id).collect();
    assert_eq!((ids, listed.found), (vec![4, 3, 6], 4));
    assert!(listed.unanswered.is_empty());
    let first = serde_json::to_value(&listed.sessions[0]).expect("JSON");
    let expected = serde_json::json!({
        "id": 4, "user": "a\\\\b\\xff\\x0a", "database": null, "source": "10.0.0.1:5000",
        "backend": "default", "backend_address": "127.0.0.1:5555", "state": "active",
        "age_seconds": 0.03, "idle_seconds": 0.003, "bytes_to_backend": 7, "bytes_to_client": 800,
        "worker": 0,
    });
    assert_eq!(first, expected);
}

#[test]
fn a_worker_that_does_not_answer_is_named() {
    let gate = Fixture::new("");
    // This one keeps the question and says nothing more.
    let stuck = worker(&gate.state, 0, |inquiry| {
        send(inquiry, vec![record(0, 1, 10)]);
        let answers = inquiry.answers.clone();
        let began = Instant::now();
        while !answers.is_closed() && began.elapsed() < Duration::from_secs(10) {
            thread::sleep(Duration::from_millis(5));
        }
    });
    let other = worker(&gate.state, 1, |inquiry| {
        send(inquiry, vec![record(1, 1, 25)]);
        done(inquiry, 1);
    });
    let began = Instant::now();
    let listed = list(&gate.state, &SessionQuery::default()).expect("listed");
    let took = began.elapsed();
    assert!(
        took >= Duration::from_secs(2) && took < Duration::from_secs(4),
        "{took:?}"
    );
    assert_eq!((listed.sessions.len(), listed.unanswered), (2, vec![0]));
    for thread in [stuck, other] {
        thread.join().expect("no panic");
    }
}

#[test]
fn a_query_is_read_as_it_is_shown() {
    let query = SessionQuery {
        user: Some("caf\\xe9".to_owned()),
        database: Some("prod".to_owned()),
        state: Some("half_closed".to_owned()),
        source: Some("::ffff:10.0.0.1".to_owned()),
        limit: None,
    };
    let filter = sessions::filter(&query).expect("a filter");
    assert_eq!(filter.user.as_deref(), Some(&b"caf\xe9"[..]));
    assert_eq!(filter.database.as_deref(), Some(&b"prod"[..]));
    assert_eq!(filter.state, Some(SessionState::HalfClosed));
    assert_eq!(filter.source, "10.0.0.1".parse().ok());
    let bad = |query: SessionQuery| sessions::filter(&query).expect_err("no filter");
    let error = bad(SessionQuery {
        state: Some("asleep".to_owned()),
        ..SessionQuery::default()
    });
    assert!(
        error.to_string().contains("there are: startup, waiting,"),
        "{error}"
    );
    let error = bad(SessionQuery {
        source: Some("10.0.0.1:5".to_owned()),
        ..SessionQuery::default()
    });
    assert_eq!(error, QueryError::Source("10.0.0.1:5".to_owned()));
    let error = bad(SessionQuery {
        user: Some(String::new()),
        ..SessionQuery::default()
    });
    assert_eq!(error, QueryError::Name(NameError::Empty));
}
