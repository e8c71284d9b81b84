//! One socket's record: the ends of a connection in every order.

use gate_common::abi::{ListenerState, slot};
use gate_common::cells::Cells;
use gate_common::record::{self, SocketRecord, Verdict};
use gate_common::word::Word as _;
use loom::sync::Arc;

use super::slots::{SmallBook, ask};
use super::{ModelWord, empty_listener, explore, race};

const USER: u32 = slot::FIRST_NAMED;
const CEILING: u64 = 1;

/// One listener, one socket, one user.
struct Connection {
    state: ListenerState<ModelWord>,
    cells: [ModelWord; 1],
    record: SocketRecord<ModelWord>,
    book: SmallBook,
}

fn record_with(state: u64) -> SocketRecord<ModelWord> {
    SocketRecord {
        state: ModelWord::shared(state),
        listener: 0,
        reserved: 0,
        slots: [(); 4].map(|()| ModelWord::shared(0)),
    }
}

impl Cells for Connection {
    type Word = ModelWord;

    fn this_cpu(&self) -> u32 {
        0
    }

    fn cell(&self, cpu: u32) -> Option<&ModelWord> {
        self.cells.get(cpu as usize)
    }
}

impl Connection {
    /// An established connection that found a token, or none.
    fn established(ceiling: u64) -> Arc<Self> {
        let connection = Self {
            state: empty_listener(),
            cells: [ModelWord::shared(0)],
            record: record_with(0),
            book: SmallBook::new([1, 1, 0, 0]),
        };
        let Self { state, record, .. } = &connection;
        record::established(record, state, &connection, || ceiling);
        Arc::new(connection)
    }

    fn admit(&self) -> Verdict {
        record::admit(&self.record, &self.state, &self.book, &ask(USER, None))
    }

    fn closed(&self) {
        record::closed(&self.record, &self.state, self);
    }

    fn released(&self) {
        record::released(&self.record, &self.state, &self.book);
    }

    fn assert_all_given_back(&self, errors: u64) {
        let Self { state, .. } = self;
        assert_eq!(state.in_use(self.cells[0].load()), 0);
        assert_eq!(state.pending.load(), 0);
        assert_eq!(state.over.load(), 0);
        assert_eq!(state.admitted.load(), 0);
        assert_eq!(self.book.used(slot::TOTAL), 0);
        assert_eq!(self.book.used(USER), 0);
        assert_eq!(state.errors.load(), errors);
    }
}

/// A7: whatever closes, however often and in whatever order, each thing comes
/// back once.
#[test]
fn an_admitted_connection_gives_back_once() {
    explore(|| {
        let connection = Connection::established(CEILING);
        assert_eq!(connection.admit(), Verdict::Admitted);
        assert_eq!(connection.book.used(USER), 1);
        race(
            &connection,
            [Connection::closed, Connection::released, |connection| {
                connection.released();
                connection.closed();
            }],
        );
        connection.assert_all_given_back(0);
    });
}

#[test]
fn a_pending_connection_gives_back_once() {
    explore(|| {
        let connection = Connection::established(CEILING);
        assert_eq!(connection.state.pending.load(), 1);
        race(
            &connection,
            [Connection::closed, Connection::released, Connection::closed],
        );
        connection.assert_all_given_back(0);
    });
}

#[test]
fn an_over_connection_gives_back_once() {
    explore(|| {
        let connection = Connection::established(0);
        assert_eq!(connection.state.over.load(), 1);
        race(
            &connection,
            [
                |connection| {
                    let over_or_gone = connection.admit();
                    assert!(matches!(over_or_gone, Verdict::Over | Verdict::Admitted));
                    connection.released();
                },
                Connection::closed,
            ],
        );
        connection.assert_all_given_back(0);
    });
}

/// A client's reset in the middle of its own admission.
#[test]
fn an_admission_that_races_the_end_of_tcp_gives_back_once() {
    explore(|| {
        let connection = Connection::established(CEILING);
        race(
            &connection,
            [
                |connection| {
                    assert_eq!(connection.admit(), Verdict::Admitted);
                    assert_eq!(connection.admit(), Verdict::Already);
                    connection.released();
                },
                Connection::closed,
            ],
        );
        connection.assert_all_given_back(0);
    });
}

/// A denied connection holds nothing but its token.
#[test]
fn a_denied_connection_gives_back_once() {
    explore(|| {
        let connection = Connection::established(CEILING);
        let other = ask(USER, None);
        assert_eq!(gate_common::slots::admit(&connection.book, &other), Ok(()));
        race(
            &connection,
            [
                |connection| {
                    assert!(matches!(connection.admit(), Verdict::Denied(_)));
                    connection.released();
                },
                Connection::closed,
            ],
        );
        assert!(gate_common::slots::give(&connection.book, slot::TOTAL));
        assert!(gate_common::slots::give(&connection.book, USER));
        connection.assert_all_given_back(0);
    });
}

/// A4: counts that nobody holds are errors when they come back, and stay 0.
#[test]
fn counts_given_back_twice_are_errors() {
    explore(|| {
        let connection = Connection::established(CEILING);
        connection.state.pending.store(0);
        race(
            &connection,
            [Connection::closed, |connection| {
                let stray = record_with(record::PENDING);
                record::released(&stray, &connection.state, &connection.book);
            }],
        );
        connection.assert_all_given_back(2);
    });
}
