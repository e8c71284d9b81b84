//! Random sequences of connections, refusals, ends and changes of limits
//! against a reference that counts what is alive (CASES A4, A5, A7, A9).

// The model check's build has nothing to do here.
#![cfg(not(loom))]

mod book;

use std::sync::atomic::Ordering::SeqCst;

use gate_common::abi::SlotKind;
use gate_common::limit::{Limit, Setting};
use gate_common::record::{self, PENDING, Verdict};
use gate_common::slots::{self, Denial};
use proptest::prelude::*;

use book::{CPUS, DATABASES, Socket, USERS, World, ask, database, user};

/// One thing that happens.
#[derive(Clone, Copy, Debug)]
enum Step {
    Connect,
    Admit {
        connection: usize,
        user: usize,
        database: Option<usize>,
    },
    /// TCP is done with the socket.
    Closed {
        connection: usize,
    },
    /// The last descriptor is closed.
    Released {
        connection: usize,
    },
    Total(Setting),
    User(usize, Setting),
    DefaultUser(Setting),
    Database(usize, Setting),
    Ceiling(u64),
    /// A slot and a count come back that nobody holds.
    Stray {
        user: usize,
    },
}

fn setting() -> impl Strategy<Value = Setting> {
    prop_oneof![
        Just(Setting::Inherit),
        Just(Setting::Unlimited),
        Just(Setting::None),
        (1_u64..4).prop_map(Setting::AtMost),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let connection = 0_usize..16;
    let a_database = prop::option::of(0..DATABASES);
    prop_oneof![
        5 => Just(Step::Connect),
        6 => (connection.clone(), 0..USERS, a_database).prop_map(|(connection, user, database)| {
            Step::Admit { connection, user, database }
        }),
        4 => connection.clone().prop_map(|connection| Step::Closed { connection }),
        4 => connection.prop_map(|connection| Step::Released { connection }),
        1 => setting().prop_map(Step::Total),
        1 => (0..USERS, setting()).prop_map(|(user, setting)| Step::User(user, setting)),
        1 => setting().prop_map(Step::DefaultUser),
        1 => (0..DATABASES, setting()).prop_map(|(name, setting)| Step::Database(name, setting)),
        2 => (0_u64..8).prop_map(Step::Ceiling),
        1 => (0..USERS).prop_map(|user| Step::Stray { user }),
    ]
}

/// A connection as the reference sees it.
#[derive(Default)]
struct Expected {
    counted: bool,
    over: bool,
    pending: bool,
    admitted: Option<(usize, Option<usize>)>,
}

/// What should be true, in the plainest words.
struct Reference {
    connections: Vec<(Socket, Expected)>,
    total: Setting,
    default_user: Setting,
    users: [Setting; USERS],
    databases: [Setting; DATABASES],
    ceiling: u64,
    errors: u64,
}

impl Reference {
    fn new() -> Self {
        Self {
            connections: Vec::new(),
            total: Setting::Inherit,
            default_user: Setting::Inherit,
            users: [Setting::Inherit; USERS],
            databases: [Setting::Inherit; DATABASES],
            ceiling: 0,
            errors: 0,
        }
    }

    fn count(&self, is: impl Fn(&Expected) -> bool) -> u64 {
        self.connections.iter().filter(|(_, it)| is(it)).count() as u64
    }

    fn of_user(&self, user: usize) -> u64 {
        self.count(|it| it.admitted.is_some_and(|(name, _)| name == user))
    }

    fn of_database(&self, database: usize) -> u64 {
        self.count(|it| it.admitted.is_some_and(|(_, name)| name == Some(database)))
    }

    /// The limit that should deny, if any.
    fn denial(&self, user: usize, database: Option<usize>) -> Option<SlotKind> {
        let fits = |setting, default, used| {
            let setting = if setting == Setting::Inherit {
                default
            } else {
                setting
            };
            match setting {
                Setting::None => false,
                Setting::AtMost(most) => used < most,
                _ => true,
            }
        };
        let admitted = self.count(|it| it.admitted.is_some());
        if !fits(self.total, Setting::Inherit, admitted) {
            return Some(SlotKind::Total);
        }
        if !fits(self.users[user], self.default_user, self.of_user(user)) {
            return Some(SlotKind::User);
        }
        let database = database?;
        let used = self.of_database(database);
        (!fits(self.databases[database], Setting::Inherit, used)).then_some(SlotKind::Database)
    }

    fn apply(&mut self, world: &World, step: Step, cpu: u32) -> Result<(), TestCaseError> {
        match step {
            Step::Connect => self.connect(world, cpu),
            Step::Admit {
                connection,
                user,
                database,
            } => {
                return self.admit(world, connection, user, database);
            }
            Step::Closed { connection } => {
                if let Some((socket, expected)) = self.connections.get_mut(connection) {
                    record::closed(socket, &world.state, &world.on(cpu));
                    (expected.counted, expected.over) = (false, false);
                    expected.pending = false;
                }
            }
            Step::Released { connection } => {
                if let Some((socket, expected)) = self.connections.get_mut(connection) {
                    record::released(socket, &world.state, world);
                    (expected.pending, expected.admitted) = (false, None);
                }
            }
            Step::Total(setting) => {
                self.total = setting;
                world.set_total(setting);
            }
            Step::User(name, setting) => {
                self.users[name] = setting;
                world.set(user(name), setting);
            }
            Step::DefaultUser(setting) => {
                self.default_user = setting;
                world.set(SlotKind::User.default_limit(), setting);
            }
            Step::Database(name, setting) => {
                self.databases[name] = setting;
                world.set(database(name), setting);
            }
            Step::Ceiling(tokens) => self.ceiling = tokens,
            Step::Stray { user: name } => return self.stray(world, name),
        }
        Ok(())
    }

    fn connect(&mut self, world: &World, cpu: u32) {
        let socket = Socket::default();
        record::established(&socket, &world.state, &world.on(cpu), || self.ceiling);
        let counted = self.count(|it| it.counted) < self.ceiling;
        let expected = Expected {
            counted,
            over: !counted,
            pending: counted,
            admitted: None,
        };
        self.connections.push((socket, expected));
    }

    fn admit(
        &mut self,
        world: &World,
        connection: usize,
        user: usize,
        database: Option<usize>,
    ) -> Result<(), TestCaseError> {
        let Some((socket, expected)) = self.connections.get(connection) else {
            return Ok(());
        };
        let right = if expected.over {
            Verdict::Over
        } else if expected.admitted.is_some() {
            Verdict::Already
        } else if let Some(kind) = self.denial(user, database) {
            Verdict::Denied(Denial::Full(kind))
        } else {
            Verdict::Admitted
        };
        let verdict = record::admit(socket, &world.state, world, &ask(user, database));
        prop_assert_eq!(verdict, right);
        let expected = &mut self.connections[connection].1;
        expected.pending = false;
        if verdict == Verdict::Admitted {
            expected.admitted = Some((user, database));
        }
        Ok(())
    }

    fn stray(&mut self, world: &World, name: usize) -> Result<(), TestCaseError> {
        if self.of_user(name) == 0 {
            prop_assert!(!slots::give(world, user(name)), "nobody held it");
        }
        if self.count(|it| it.pending) == 0 {
            let stray = Socket::default();
            stray.state.store(PENDING, SeqCst);
            record::released(&stray, &world.state, world);
            self.errors += 1;
        }
        Ok(())
    }

    fn check(&self, world: &World) -> Result<(), TestCaseError> {
        let state = &world.state;
        prop_assert_eq!(state.pending.load(SeqCst), self.count(|it| it.pending));
        prop_assert_eq!(state.over.load(SeqCst), self.count(|it| it.over));
        let admitted = self.count(|it| it.admitted.is_some());
        prop_assert_eq!(state.admitted.load(SeqCst), admitted);
        prop_assert_eq!(world.used(SlotKind::Total.default_limit()), admitted);
        prop_assert_eq!(world.in_use(), self.count(|it| it.counted).cast_signed());
        prop_assert_eq!(state.errors.load(SeqCst), self.errors);
        for name in 0..USERS {
            prop_assert_eq!(world.used(user(name)), self.of_user(name));
        }
        for name in 0..DATABASES {
            prop_assert_eq!(world.used(database(name)), self.of_database(name));
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn a4_counts_are_what_is_alive_at_every_step(
        steps in prop::collection::vec((step(), 0..CPUS), 1..60),
    ) {
        let world = World::default();
        let mut reference = Reference::new();
        for (step, cpu) in steps {
            reference.apply(&world, step, cpu)?;
            reference.check(&world)?;
        }
    }
}

#[test]
fn a9_unlimited_one_and_none_are_three_values() {
    let table = [
        (Setting::from_number(0), 3, Limit::Unlimited),
        (Setting::from_number(1), 1, Limit::AtMost(1)),
        (Setting::None, 0, Limit::None),
    ];
    for (setting, expected, limit) in table {
        let world = World::default();
        world.set(user(0), setting);
        let admitted = (0..3).filter(|_| slots::admit(&world, &ask(0, None)).is_ok());
        assert_eq!(admitted.count(), expected, "{limit:?}");
        assert_eq!(world.used(user(0)), expected as u64, "{limit:?}");
    }
}

/// A5: whichever of the slots refuses, those taken before it come back.
#[test]
fn a5_a_refusal_at_each_stage_leaves_nothing() {
    for refusing in [SlotKind::Total.default_limit(), user(0), database(0)] {
        let world = World::default();
        world.set(refusing, Setting::None);
        let verdict = slots::admit(&world, &ask(0, Some(0)));
        assert!(matches!(verdict, Err(Denial::Full(_))));
        for index in [SlotKind::Total.default_limit(), user(0), database(0)] {
            assert_eq!(world.used(index), 0);
        }
    }
}

#[test]
fn a_slot_of_another_generation_or_beyond_the_end_is_denied() {
    let world = World::default();
    let mut asked = ask(0, None);
    asked[SlotKind::User as usize].generation = 2;
    assert_eq!(slots::admit(&world, &asked), Err(Denial::Stale));
    asked[SlotKind::User as usize].index = u32::MAX - 1;
    assert_eq!(slots::admit(&world, &asked), Err(Denial::Unknown));
    assert_eq!(world.used(SlotKind::Total.default_limit()), 0);
    assert!(!slots::give(&world, u32::MAX - 1));
}

/// A count that is as high as it can be does not run into the generation.
#[test]
fn a_full_count_is_full_even_if_unlimited() {
    let world = World::default();
    world.slots[user(0) as usize].store(u64::from(u32::MAX), SeqCst);
    let full = Err(Denial::Full(SlotKind::User));
    assert_eq!(slots::admit(&world, &ask(0, None)), full);
    assert_eq!(
        slots::generation(world.slots[user(0) as usize].load(SeqCst)),
        0
    );
}

#[test]
fn a_slot_in_use_or_owned_is_not_given_away() {
    let world = World::default();
    let word = &world.slots[user(0) as usize];
    assert_eq!(slots::claim(word), Some(1));
    assert_eq!(slots::claim(word), None, "owned");
    word.store(slots::unused(1) + 1, SeqCst);
    assert!(!slots::recycle(word, 1), "in use");
    assert!(slots::give(&world, user(0)));
    assert!(!slots::recycle(word, 3), "another generation");
    assert!(slots::recycle(word, 1));
    assert_eq!(slots::claim(word), Some(3));
}
