use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;

use gate_common::abi::SlotRef;

use super::*;

fn wait_for(ring: &mut Ring, kind: Kind) -> Completion<OwnedFd> {
    let mut completions = Vec::new();
    for _ in 0..50 {
        ring.wait(Duration::from_millis(100), &mut completions)
            .unwrap();
        let found = completions.iter().position(|done| done.key.kind == kind);
        if let Some(found) = found {
            return completions.swap_remove(found);
        }
    }
    panic!("no completion of {kind:?} within 5 s");
}

#[test]
fn a_connection_is_accepted_and_polled_until_cancelled() {
    let mut ring = Ring::new().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let accept = Key::new(Kind::Accept, 0, 0);
    ring.accept(listener.as_fd(), Watch::Changes, accept)
        .unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let accepted = wait_for(&mut ring, Kind::Accept);
    assert!(accepted.more);
    let Event::Accepted(socket) = accepted.event else {
        panic!("{accepted:?}");
    };

    let key = Key::new(Kind::Client, 7, 9);
    ring.poll(socket.as_fd(), Watch::Changes, key).unwrap();
    drop(client);
    let ended = loop {
        let next = wait_for(&mut ring, Kind::Client);
        assert_eq!(next.key, key);
        assert!(next.more);
        match next.event {
            Event::Ready(bits) if bits & ready::PEER_ENDED != 0 => break bits,
            Event::Ready(_) => {}
            other => panic!("{other:?}"),
        }
    };
    assert_ne!(ended & ready::READ, 0);

    ring.cancel(key).unwrap();
    let last = loop {
        let next = wait_for(&mut ring, Kind::Client);
        if !next.more {
            break next;
        }
    };
    assert!(matches!(last.event, Event::PollEnded), "{last:?}");
}

#[test]
fn k1_one_connection_is_accepted_at_a_time_where_that_is_asked() {
    let mut ring = Ring::new().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let accept = Key::new(Kind::Accept, 0, 0);
    for _ in 0..2 {
        ring.accept(listener.as_fd(), Watch::Once, accept).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let accepted = wait_for(&mut ring, Kind::Accept);
        assert!(!accepted.more);
        assert!(matches!(accepted.event, Event::Accepted(_)));
        drop(client);
    }
}

#[test]
fn a_poll_of_one_report_ends_with_it() {
    let mut ring = Ring::new().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (socket, _) = listener.accept().unwrap();
    let key = Key::new(Kind::Client, 1, 1);
    ring.poll(socket.as_fd(), Watch::Once, key).unwrap();
    drop(client);
    let report = wait_for(&mut ring, Kind::Client);
    assert!(!report.more);
    assert!(matches!(report.event, Event::Ready(bits) if bits & ready::READ != 0));
}

#[test]
fn an_admission_is_answered_in_the_ring_or_refused_for_a_plain_call() {
    let mut ring = Ring::new().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let key = Key::new(Kind::Admit, 3, 4);
    let request = AdmitRequest {
        instance: 1,
        slots: [SlotRef::ABSENT; 4],
    };
    if ring.admit(listener.as_fd(), &request, key).unwrap() {
        let answer = wait_for(&mut ring, Kind::Admit);
        assert_eq!(answer.key, key);
        assert!(!answer.more);
        // No program owns this socket.
        assert!(matches!(
            answer.event,
            Event::Admitted(Err(AdmitErrno::NotOurs))
        ));
    }
    ring.requests = None;
    assert!(!ring.admit(listener.as_fd(), &request, key).unwrap());
}

#[test]
fn a_wait_ends_at_its_timeout() {
    let mut ring = Ring::new().unwrap();
    let mut completions: Vec<Completion<OwnedFd>> = Vec::new();
    ring.wait(Duration::from_millis(10), &mut completions)
        .unwrap();
    assert!(completions.is_empty());
}
