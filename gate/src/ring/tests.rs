use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;

use super::*;

fn wait_for(ring: &mut Ring, kind: Kind) -> Completion {
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
    ring.accept(listener.as_fd(), accept).unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let accepted = wait_for(&mut ring, Kind::Accept);
    assert!(accepted.more);
    let Event::Accepted(socket) = accepted.event else {
        panic!("{accepted:?}");
    };

    let key = Key::new(Kind::Client, 7, 9);
    ring.poll(socket.as_fd(), ready::READ | ready::PEER_ENDED, key)
        .unwrap();
    drop(client);
    let ended = wait_for(&mut ring, Kind::Client);
    assert_eq!(ended.key, key);
    assert!(matches!(ended.event, Event::Ready(bits) if bits & ready::PEER_ENDED != 0));

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
fn a_wait_ends_at_its_timeout() {
    let mut ring = Ring::new().unwrap();
    let mut completions = Vec::new();
    ring.wait(Duration::from_millis(10), &mut completions)
        .unwrap();
    assert!(completions.is_empty());
}
