//! Both parts against each other, over a real socket.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use super::message::Message;
use super::{Estate, Heir, Item, Owner, TakeoverError, ask, serve};
use crate::host::mail::{self, Mailbox};

const SOON: Duration = Duration::from_secs(5);

/// What an owner was told.
#[derive(Debug, PartialEq)]
enum Told {
    Leave(Heir),
    Stay,
}

struct Reporter(mpsc::Sender<Told>);

impl Owner for Reporter {
    fn leave(&self, heir: Heir) {
        let _ = self.0.send(Told::Leave(heir));
    }

    fn stay(&self) {
        let _ = self.0.send(Told::Stay);
    }
}

fn listener(port: u16) -> Item {
    Item::Listener {
        address: ([127, 0, 0, 1], port).into(),
    }
}

fn null() -> OwnedFd {
    File::open("/dev/null").expect("opened").into()
}

/// A running gate with 300 sockets, more than one message carries.
fn running(path: &Path) -> mpsc::Receiver<Told> {
    let socket = mail::listen_at(path).expect("bound");
    let mut items: Vec<_> = (0..300).map(|_| (listener(1), null())).collect();
    items.push((listener(2), null()));
    items.push((Item::InstanceLock, null()));
    let (told, telling) = mpsc::channel();
    let estate = Estate {
        items,
        kernel: true,
    };
    serve(socket, estate, Reporter(told)).expect("a thread");
    telling
}

#[test]
fn everything_is_handed_over_and_the_old_one_leaves_at_the_word() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("takeover");
    let told = running(&path);
    let mut predecessor = ask(&path).expect("answered").expect("somebody");
    assert!(predecessor.kernel);
    assert_eq!(predecessor.pid, std::process::id());
    let address = ([127, 0, 0, 1], 2).into();
    assert!(predecessor.has_listener(address));
    assert_eq!(predecessor.sockets(address), 1);
    assert_eq!(predecessor.descriptors(), 303);
    assert_eq!(predecessor.take_all(&listener(1)).len(), 300);
    assert_eq!(predecessor.take_all(&listener(2)).len(), 1);
    assert!(!predecessor.has_listener(address), "taken");
    assert!(predecessor.take(&Item::InstanceLock).is_some());
    assert!(predecessor.take(&Item::Takeover).is_none());
    assert!(told.try_recv().is_err(), "it left before the word");
    predecessor.ready(true).expect("it has left");
    let heir = Heir {
        pid: std::process::id(),
        keeps_control: true,
    };
    assert_eq!(told.recv_timeout(SOON), Ok(Told::Leave(heir)));
}

#[test]
fn an_heir_that_dies_leaves_the_old_one_in_its_place() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("takeover");
    let told = running(&path);
    drop(ask(&path).expect("answered").expect("somebody"));
    assert_eq!(told.recv_timeout(SOON), Ok(Told::Stay));
    let again = ask(&path).expect("answered").expect("somebody");
    again.ready(false).expect("it has left");
    assert!(matches!(told.recv_timeout(SOON), Ok(Told::Leave(_))));
}

#[test]
fn another_protocol_is_refused_with_both_numbers() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("takeover");
    let told = running(&path);
    let mailbox = Mailbox::connect(&path).expect("connected");
    let strange = Message::TakeOver { protocol: 77 };
    strange.send(&mailbox, &[], SOON).expect("sent");
    let (answer, _) = Message::receive(&mailbox, SOON).expect("answered");
    let Message::Refused { why } = answer else {
        panic!("{answer:?}");
    };
    assert!(why.contains("protocol 77"), "{why}");
    // It may be at the sockets until it hangs up, whatever else it says.
    strange.send(&mailbox, &[], SOON).expect("sent");
    let early = told.recv_timeout(Duration::from_millis(50));
    assert_eq!(early, Err(mpsc::RecvTimeoutError::Timeout));
    drop(mailbox);
    assert_eq!(told.recv_timeout(SOON), Ok(Told::Stay));
}

#[test]
fn nobody_to_ask_is_no_error_and_a_refusal_is() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("takeover");
    assert!(ask(&path).expect("no error").is_none());
    let socket = mail::listen_at(&path).expect("bound");
    let other = std::thread::spawn(move || {
        let mailbox = Mailbox::accept(socket.as_fd()).expect("accepted");
        Message::receive(&mailbox, SOON).expect("asked");
        let why = "not today".to_owned();
        Message::Refused { why }
            .send(&mailbox, &[], SOON)
            .expect("sent");
    });
    let error = ask(&path).expect_err("refused");
    assert!(matches!(&error, TakeoverError::Refused(why) if why == "not today"));
    other.join().expect("ended");
    // Its listener is closed, its file is still there.
    assert!(ask(&path).expect("no error").is_none());
}

#[test]
fn whether_the_old_one_waits_is_seen_before_the_word() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("takeover");
    let socket = mail::listen_at(&path).expect("bound");
    let (say, said) = mpsc::channel::<()>();
    let (heard, hearing) = mpsc::channel();
    let other = std::thread::spawn(move || {
        let mailbox = Mailbox::accept(socket.as_fd()).expect("accepted");
        Message::receive(&mailbox, SOON).expect("asked");
        let holds = Message::Holds {
            pid: 1,
            version: String::new(),
            kernel: false,
            items: 0,
        };
        holds.send(&mailbox, &[], SOON).expect("sent");
        said.recv().expect("told to refuse");
        let why = "too late".to_owned();
        let refused = Message::Refused { why };
        refused.send(&mailbox, &[], SOON).expect("sent");
        heard.send(()).expect("heard");
    });
    let predecessor = ask(&path).expect("answered").expect("somebody");
    predecessor.waits().expect("it waits");
    say.send(()).expect("heard");
    hearing.recv_timeout(SOON).expect("it has refused");
    let error = predecessor.waits().expect_err("it waits no longer");
    assert!(matches!(&error, TakeoverError::Refused(why) if why == "too late"));
    other.join().expect("ended");
    // One that is gone is in nobody's way.
    predecessor.waits().expect("it is gone");
}
