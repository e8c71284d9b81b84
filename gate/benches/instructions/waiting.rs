//! Waiting for a slot, and the choice of a worker: what every connection pays
//! where nobody waits, and what one pays beside many that do.

use std::hint::black_box;
use std::sync::atomic::AtomicU64;

use gate::admission::{Join, Ticket, WaitsFor};
use gate::waiting::Waiting;
use gate_common::steer::{WorkerLoad, candidates, takes_second};

use crate::{Call, Case};

/// Clients that wait beside the one that is measured, of as many users.
const WAITING: u32 = 1000;
const WORKER: u16 = 3;

/// Names are `module: what`.
pub const CASES: &[Case] = &[
    Case {
        name: "waiting: nobody, at an admission",
        prepare: asked,
    },
    Case {
        name: "waiting: nobody, at a close",
        prepare: released,
    },
    Case {
        name: "waiting: joined and left beside 1000",
        prepare: joined,
    },
    Case {
        name: "steer: the less loaded of two",
        prepare: steered,
    },
];

fn asked() -> Call {
    let waiting = Waiting::default();
    Box::new(move || {
        assert!(black_box(&waiting).line_of(black_box(b"app")).is_none());
    })
}

fn released() -> Call {
    let waiting = Waiting::default();
    Box::new(move || black_box(&waiting).released(|_| panic!("nobody waits")))
}

fn ticket(id: u32) -> Ticket {
    Ticket {
        worker: WORKER,
        id,
        generation: 1,
    }
}

fn joined() -> Call {
    let waiting = Waiting::default();
    let join = move |waiting: &Waiting, id: u32, user: &str| {
        waiting.join(ticket(id), user.as_bytes(), WaitsFor::Total, 2 * WAITING)
    };
    for id in 0..WAITING {
        join(&waiting, id, &format!("user_{id}"));
    }
    Box::new(move || {
        let joined = join(&waiting, black_box(WAITING), "app");
        assert_eq!(joined, Join::Head);
        assert!(waiting.leave(black_box(ticket(WAITING)), |_| {}));
    })
}

fn steered() -> Call {
    let workers: Vec<WorkerLoad<AtomicU64>> = (0..64)
        .map(|held| {
            let load = WorkerLoad::default();
            load.holds(held);
            load
        })
        .collect();
    let mut hash = 0_u32;
    Box::new(move || {
        hash = hash.wrapping_add(0x9e37_79b9);
        let [first, second] = candidates(black_box(hash), workers.len() as u32);
        let [one, other] = [first, second].map(|index| &workers[index as usize]);
        let chosen = if takes_second(one.now(), other.now()) {
            other
        } else {
            one
        };
        black_box(chosen).send();
    })
}
