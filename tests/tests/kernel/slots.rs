//! Slots: taken by the setsockopt hook, given back by the last close.

use std::net::{Shutdown, TcpStream};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;

use anyhow::{Context as _, Result, ensure};
use gate::kernel::{Maps, Plane};
use gate_common::abi::{SlotKind, SlotRef, slot};
use gate_common::errno::AdmitErrno;
use gate_common::limit::Setting;
use gate_common::slots::{claim, recycle};
use gate_tests::kernel::counted::{Counted, Counts, TOTAL, admit, set, start, used};
use gate_tests::kernel::net::reset;

use crate::Test;

pub const TESTS: &[Test] = &[
    (
        "slots_are_held_through_shut_wr_and_client_rst_until_close",
        held,
    ),
    (
        "slots_are_held_until_the_last_descriptor_closes",
        last_descriptor,
    ),
    ("slots_are_taken_all_or_none", all_or_none),
    (
        "slots_come_back_as_often_as_they_were_taken",
        a_thousand_times,
    ),
    ("each_limit_refuses_with_its_own_errno", errnos),
    ("a_recycled_name_answers_estale", recycled),
    ("a_socket_without_our_record_is_left_alone", left_alone),
    (
        "two_instances_in_one_cgroup_do_not_see_each_other",
        two_instances,
    ),
];

pub const ANY: &str = "127.0.0.1:0";
const ABSENT: SlotRef = SlotRef::ABSENT;
/// Indices that stand for a user's and a database's slot.
pub const USER: u32 = slot::FIRST_NAMED;
pub const DATABASE: u32 = slot::FIRST_NAMED + 1;
pub const BACKEND: u32 = slot::FIRST_NAMED + 2;

/// A slot that belongs to somebody from now on.
fn claimed(maps: &Maps, index: u32) -> Result<SlotRef> {
    let generation = claim(&maps.slots[index as usize]).context("the slot is not free")?;
    Ok(SlotRef { index, generation })
}

pub fn all_slots(maps: &Maps) -> Result<[SlotRef; 4]> {
    Ok([
        TOTAL,
        claimed(maps, USER)?,
        claimed(maps, DATABASE)?,
        claimed(maps, BACKEND)?,
    ])
}

fn uses(maps: &Maps) -> [u32; 4] {
    [slot::TOTAL, USER, DATABASE, BACKEND].map(|index| used(maps, index))
}

pub fn ensure_uses(maps: &Maps, expected: [u32; 4]) -> Result<()> {
    let found = uses(maps);
    ensure!(
        found == expected,
        "slots in use are {found:?}, expected {expected:?}"
    );
    Ok(())
}

pub fn ok(answer: Result<(), AdmitErrno>) -> Result<()> {
    answer.map_err(|refusal| anyhow::anyhow!("refused: {refusal:?}"))
}

fn held() -> Result<()> {
    let plane = start("held")?;
    let maps = plane.maps();
    let slots = all_slots(&maps)?;
    let listener = Counted::new(&plane, 0, ANY)?;
    let (client, server) = listener.pair()?;
    ok(admit(&maps, server.as_fd(), slots))?;
    ensure_uses(&maps, [1; 4])?;
    server.shutdown(Shutdown::Write)?;
    ensure_uses(&maps, [1; 4])?;
    reset(client)?;
    // The socket is gone, the session is not: its backend may still work.
    let session_alone = Counts {
        admitted: 1,
        ..Counts::NONE
    };
    listener.settles(session_alone)?;
    ensure_uses(&maps, [1; 4])?;
    drop(server);
    listener.settles(Counts::NONE)?;
    ensure_uses(&maps, [0; 4])
}

fn last_descriptor() -> Result<()> {
    let plane = start("dup")?;
    let maps = plane.maps();
    let listener = Counted::new(&plane, 0, ANY)?;
    let (_client, server) = listener.pair()?;
    ok(admit(
        &maps,
        server.as_fd(),
        [TOTAL, ABSENT, ABSENT, ABSENT],
    ))?;
    let copy = server.try_clone()?;
    drop(server);
    ensure!(
        used(&maps, slot::TOTAL) == 1,
        "gone with the first of two descriptors"
    );
    drop(copy);
    ensure!(used(&maps, slot::TOTAL) == 0, "left after the last close");
    listener.settles(Counts::NONE)
}

fn all_or_none() -> Result<()> {
    let plane = start("allornone")?;
    let maps = plane.maps();
    let slots = all_slots(&maps)?;
    let listener = Counted::new(&plane, 0, ANY)?;
    for full in [slot::TOTAL, USER, DATABASE, BACKEND] {
        set(&maps.limits[full as usize], Setting::AtMost(1));
        let (_a, first) = listener.pair()?;
        ok(admit(&maps, first.as_fd(), slots))?;
        let (_b, second) = listener.pair()?;
        let refusal = admit(&maps, second.as_fd(), slots);
        ensure!(
            matches!(refusal, Err(AdmitErrno::Full(_))),
            "{refusal:?} at slot {full}"
        );
        ensure_uses(&maps, [1; 4])?;
        // Refused once is not refused for good: it holds nothing.
        drop(first);
        ok(admit(&maps, second.as_fd(), slots))?;
        drop(second);
        ensure_uses(&maps, [0; 4])?;
        set(&maps.limits[full as usize], Setting::Inherit);
    }
    listener.settles(Counts::NONE)
}

fn a_thousand_times() -> Result<()> {
    let plane = start("thousand")?;
    let maps = plane.maps();
    let slots = all_slots(&maps)?;
    let listener = Counted::new(&plane, 0, ANY)?;
    for round in 0..1000 {
        let (client, server) = listener.pair()?;
        ok(admit(&maps, server.as_fd(), slots))?;
        if round % 2 == 0 {
            reset(client)?;
        }
    }
    ensure_uses(&maps, [0; 4])?;
    listener.settles(Counts::NONE)
}

fn errnos() -> Result<()> {
    let plane = start("errnos")?;
    let maps = plane.maps();
    let slots = all_slots(&maps)?;
    let listener = Counted::new(&plane, 0, ANY)?;
    let (_client, server) = listener.pair()?;
    let ask = |slots| admit(&maps, server.as_fd(), slots);
    for (index, kind) in [
        (slot::TOTAL, SlotKind::Total),
        (USER, SlotKind::User),
        (DATABASE, SlotKind::Database),
        (BACKEND, SlotKind::Backend),
    ] {
        set(&maps.limits[index as usize], Setting::None);
        let answer = ask(slots);
        ensure!(
            answer == Err(AdmitErrno::Full(kind)),
            "{answer:?} for {kind:?}"
        );
        set(&maps.limits[index as usize], Setting::Inherit);
    }
    // A default limit is read through a named slot that has none of its own.
    set(&maps.limits[slot::DEFAULT_USER as usize], Setting::None);
    ensure!(
        ask(slots) == Err(AdmitErrno::Full(SlotKind::User)),
        "default user limit"
    );
    set(&maps.limits[USER as usize], Setting::Unlimited);
    let unknown = SlotRef {
        index: u32::MAX - 1,
        generation: 0,
    };
    ensure!(
        ask([unknown, ABSENT, ABSENT, ABSENT]) == Err(AdmitErrno::Unknown),
        "unknown slot"
    );
    ok(ask(slots))?;
    ensure!(ask(slots) == Err(AdmitErrno::Already), "a second admission");
    ensure_uses(&maps, [1; 4])?;
    listener.ceiling(Setting::None);
    let (_client, over) = listener.pair()?;
    ensure!(
        admit(&maps, over.as_fd(), slots) == Err(AdmitErrno::Over),
        "over"
    );
    ensure_uses(&maps, [1; 4])
}

fn recycled() -> Result<()> {
    let plane = start("recycled")?;
    let maps = plane.maps();
    let word = &maps.slots[USER as usize];
    let old = claimed(&maps, USER)?;
    let listener = Counted::new(&plane, 0, ANY)?;
    let (_client, server) = listener.pair()?;
    let ask = |slot| admit(&maps, server.as_fd(), [TOTAL, slot, ABSENT, ABSENT]);
    ensure!(
        recycle(word, old.generation),
        "an unused slot is not recycled"
    );
    ensure!(ask(old) == Err(AdmitErrno::Stale), "a free slot is taken");
    let new = claimed(&maps, USER)?;
    ensure!(
        new.generation != old.generation,
        "the generation did not change"
    );
    ensure!(
        ask(old) == Err(AdmitErrno::Stale),
        "the new owner's slot is taken"
    );
    ensure!(used(&maps, slot::TOTAL) == 0, "the total was taken");
    ok(ask(new))?;
    ensure!(!recycle(word, new.generation), "a slot in use is recycled");
    drop(server);
    ensure!(
        recycle(word, new.generation),
        "a released slot is not recycled"
    );
    Ok(())
}

fn left_alone() -> Result<()> {
    let plane = start("alone")?;
    let maps = plane.maps();
    let slots = [TOTAL, ABSENT, ABSENT, ABSENT];
    let foreign = std::net::TcpListener::bind(ANY)?;
    let client = TcpStream::connect(foreign.local_addr()?)?;
    let (accepted, _) = foreign.accept()?;
    let (unix, _peer) = UnixStream::pair()?;
    let fresh = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
    for socket in [
        client.as_fd(),
        accepted.as_fd(),
        foreign.as_fd(),
        fresh.as_fd(),
    ] {
        let answer = admit(&maps, socket, slots);
        ensure!(
            answer == Err(AdmitErrno::NotOurs),
            "{answer:?} on a foreign socket"
        );
        ensure!(
            maps.record(socket).is_none(),
            "a foreign socket got a record"
        );
    }
    // AF_UNIX has no such level: EOPNOTSUPP, which is no answer of ours.
    let answer = admit(&maps, unix.as_fd(), slots);
    ensure!(
        matches!(answer, Err(AdmitErrno::Other(_))),
        "{answer:?} on a unix socket"
    );
    ensure!(used(&maps, slot::TOTAL) == 0, "a slot was taken");
    // Options of others pass as before.
    accepted.set_nodelay(true)?;
    ensure!(accepted.nodelay()?, "TCP_NODELAY was not set");
    drop((client, accepted, foreign, fresh));
    ensure!(used(&maps, slot::TOTAL) == 0, "a slot was given back");
    established_before_the_tag(&plane)
}

/// A connection older than the tag of its listener is nobody's.
fn established_before_the_tag(plane: &Plane) -> Result<()> {
    let maps = plane.maps();
    let late = std::net::TcpListener::bind(ANY)?;
    let _client = TcpStream::connect(late.local_addr()?)?;
    let (accepted, _) = late.accept()?;
    plane.tag_listener(late.as_fd(), 5)?;
    let answer = admit(&maps, accepted.as_fd(), [TOTAL, ABSENT, ABSENT, ABSENT]);
    ensure!(
        answer == Err(AdmitErrno::NotOurs),
        "{answer:?} on an older connection"
    );
    drop(accepted);
    gate_tests::kernel::counted::settles(&maps, 5, Counts::NONE)
}

fn two_instances() -> Result<()> {
    let (one, two) = (start("one")?, start("two")?);
    let (maps_one, maps_two) = (one.maps(), two.maps());
    ensure!(
        maps_one.meta().instance != maps_two.meta().instance,
        "same identity"
    );
    let (a, b) = (Counted::new(&one, 0, ANY)?, Counted::new(&two, 0, ANY)?);
    let (_client, server) = a.pair()?;
    a.settles(Counts::pending(1))?;
    b.settles(Counts::NONE)?;
    let slots = [TOTAL, ABSENT, ABSENT, ABSENT];
    let wrong = admit(&maps_two, server.as_fd(), slots);
    ensure!(
        wrong == Err(AdmitErrno::NotOurs),
        "{wrong:?} from the other instance"
    );
    ok(admit(&maps_one, server.as_fd(), slots))?;
    let admitted = Counts {
        sockets: 1,
        admitted: 1,
        ..Counts::NONE
    };
    a.settles(admitted)?;
    b.settles(Counts::NONE)?;
    ensure!(
        used(&maps_two, slot::TOTAL) == 0,
        "the other instance took a slot"
    );
    let (_other, second) = b.pair()?;
    ok(admit(&maps_two, second.as_fd(), slots))?;
    drop(server);
    a.settles(Counts::NONE)?;
    b.settles(admitted)
}
