//! The workers of one world, and whose round is next.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gate::state::State;
use gate::worker::{Holdings, Listening, Worker};

use super::machine::SimMachine;
use super::world::World;
use super::{evictions, operations, oracle, turns};

/// More rounds than any world needs: workers that spin are a failure.
const ROUNDS_MAX: u64 = 200_000;

/// See the module.
pub struct Crew {
    world: Rc<RefCell<World>>,
    /// Those that have not ended.
    seats: Vec<Option<Seat>>,
}

struct Seat {
    worker: Worker<SimMachine>,
    /// When its round is over: its work takes time.
    busy_until: Duration,
    /// When it stops waiting for something to happen.
    waits_until: Duration,
}

impl Crew {
    /// The workers of that world, which begin now.
    pub fn new(world: Rc<RefCell<World>>, state: &Arc<State>) -> Self {
        let base = Instant::now();
        let index = state.listeners[0].index;
        let seats = (0..state.stats.len())
            .map(|number| {
                let machine = SimMachine::new(Rc::clone(&world), number, base);
                let listeners = machine.listeners().into_iter();
                let listening = listeners.map(|socket| Listening::new(socket, 0, index));
                let mut worker =
                    Worker::new(number, Arc::clone(state), listening.collect(), machine);
                worker.begin().expect("it begins");
                Some(Seat {
                    busy_until: Duration::ZERO,
                    waits_until: worker.timeout(),
                    worker,
                })
            })
            .collect();
        Self { world, seats }
    }

    /// Runs them until the last one ends. Counts their rounds in `step`.
    pub fn run(&mut self, step: &Cell<u64>) {
        let mut rested = false;
        while let Some(number) = self.next() {
            step.set(step.get() + 1);
            assert!(step.get() < ROUNDS_MAX, "the workers spin");
            self.round(number, step.get());
            if !rested && self.world.borrow().rested {
                rested = true;
                for seat in self.seats.iter().flatten() {
                    let holdings = seat.worker.holdings();
                    assert_eq!(holdings, Holdings::default(), "something is left");
                }
            }
        }
    }

    fn round(&mut self, number: usize, round: u64) {
        let Some(seat) = &mut self.seats[number] else {
            return;
        };
        {
            let world = &mut *self.world.borrow_mut();
            world.round = round;
            oracle::at_step(world);
            evictions::before_round(world, number);
        }
        let goes_on = seat.worker.round().expect("it accepts and the ring works");
        {
            let world = &mut *self.world.borrow_mut();
            world.take_wakes();
            oracle::after_round(world, &seat.worker.holdings());
            turns::after_round(world, number);
            evictions::after_round(world, number);
            seat.busy_until = world.now + world.random.delay(world.plan.work_max);
            seat.waits_until = world.now + seat.worker.timeout();
        }
        if goes_on.is_break() {
            self.seats[number] = None;
        }
    }

    /// Whose round is next, once the world has come to it.
    fn next(&self) -> Option<usize> {
        let world = &mut *self.world.borrow_mut();
        loop {
            while world.next_at().is_some_and(|at| at <= world.now) {
                world.happen();
            }
            operations::collect(world);
            turns::look(world);
            evictions::look(world);
            let mut due = Vec::with_capacity(self.seats.len());
            let mut next = world.next_at();
            for (number, seat) in self.seats.iter().enumerate() {
                let Some(seat) = seat else { continue };
                let told = world.rings[number].next_at().unwrap_or(Duration::MAX);
                let at = seat.busy_until.max(seat.waits_until.min(told));
                if at <= world.now {
                    due.push((number, told <= world.now));
                } else {
                    next = Some(next.map_or(at, |next| next.min(at)));
                }
            }
            if !due.is_empty() {
                let (number, is_told) = world.random.pick(&due);
                if !is_told {
                    world.rest();
                }
                return Some(number);
            }
            if self.seats.iter().all(Option::is_none) {
                return None;
            }
            world.now = world.now.max(next?);
        }
    }
}
