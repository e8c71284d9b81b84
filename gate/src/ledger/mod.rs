//! The ledger: slots taken and released exactly once.
//!
//! Two forms with one face. The *kernel* form keeps every word in pinned maps;
//! the kernel takes slots under the socket's lock and gives them back when the
//! last descriptor of the client's socket is closed, so no count outlives its
//! socket, whoever dies. The *local* form runs the same arithmetic on the
//! memory of one process; [`Ledger::closed`] gives back.

mod limits;
mod local;
mod names;
mod pinned;

pub use limits::{Layer, LimitKey, LimitRow, LimitSource};
pub use local::LocalBook;
pub use names::{NameCache, NamesError};

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use gate_common::abi::{
    AdmitRequest, LISTENERS_MAX, ListenerState, NameKey, NameKind, SLOTS_MAX, SlotKind, SlotRef,
    slot,
};
use gate_common::errno::AdmitErrno;
use gate_common::limit::{Limit, LimitWords};
use gate_common::record::{SocketRecord, Verdict};
use gate_common::slots::{self, Book, Denial};
use std::sync::atomic::Ordering::SeqCst;

use crate::kernel::{self, Maps};
use crate::session::outcome::Reason;

/// Lookups of a name that was recycled under us before we give up.
pub const STALE_RETRIES: usize = 4;

/// Who asks for admission.
#[derive(Clone, Copy, Debug)]
pub struct Applicant<'a> {
    /// The user, cut as PostgreSQL cuts it.
    pub user: &'a [u8],
    /// The database; `None` for physical replication.
    pub database: Option<&'a [u8]>,
    /// Name of the backend it will be connected to.
    pub backend: &'a [u8],
}

/// How a fresh connection stands with its listener's ceiling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It holds a token.
    Counted,
    /// It found none: to be refused once it has spoken.
    Over,
}

/// How an admission goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It is over: all slots are held, or none because of this limit.
    Decided(Result<(), Reason>),
    /// It is over before it began: a limit is reached, and the connection is as
    /// pending as before.
    Refused(Reason),
    /// Ask the kernel this on the client's socket.
    Ask(AdmitRequest),
}

/// A connection's entry in the ledger; ends in [`Ledger::closed`].
#[derive(Debug)]
#[must_use = "an entry ends in Ledger::closed, after its socket was closed"]
pub struct Entry {
    listener: u32,
    /// Only the local form keeps the record here; the kernel's hangs on the socket.
    record: Option<Box<SocketRecord<AtomicU64>>>,
}

/// Where the names lie.
pub(crate) trait NameTable {
    fn get(&self, key: &NameKey) -> io::Result<Option<SlotRef>>;
    /// Inserts unless the key exists; returns whether it inserted.
    fn insert(&self, key: &NameKey, value: SlotRef) -> io::Result<bool>;
    fn remove(&self, key: &NameKey) -> io::Result<()>;
    fn entries(&self) -> io::Result<Vec<(NameKey, SlotRef)>>;
    /// Keeps other processes and threads from removing names meanwhile.
    /// `None` if the lock cannot be had in a few milliseconds.
    fn lock(&self) -> Option<Box<dyn Guard + '_>>;
}

/// What a lock guard is: something to drop.
pub(crate) trait Guard {}
impl<T> Guard for T {}

enum Form {
    Kernel(Arc<Maps>),
    Local(LocalBook),
}

/// See the module.
pub struct Ledger {
    form: Form,
    /// Where the search for a free slot begins; only a hint.
    next_free: AtomicU32,
    /// The local form answers as the kernel does, through the machine.
    asks: bool,
}

impl Ledger {
    /// The form that lies in pinned maps.
    #[must_use]
    pub fn kernel(maps: Arc<Maps>) -> Self {
        Self {
            form: Form::Kernel(maps),
            next_free: AtomicU32::new(0),
            asks: false,
        }
    }

    /// The form that lies in this process.
    #[must_use]
    pub fn local() -> Self {
        Self::of_slots(SLOTS_MAX)
    }

    /// The local form for a simulation, with room for so many names. If it
    /// `asks`, a simulated machine brings the answer of each admission when it
    /// likes: its errno, or 0, is the request's instance.
    #[must_use]
    pub fn simulated(names_max: u32, asks: bool) -> Self {
        Self {
            asks,
            ..Self::of_slots(slot::FIRST_NAMED + names_max.min(SLOTS_MAX - slot::FIRST_NAMED))
        }
    }

    fn of_slots(slots: u32) -> Self {
        Self {
            form: Form::Local(LocalBook::new(slots)),
            next_free: AtomicU32::new(0),
            asks: false,
        }
    }

    /// Whether counts and limits lie in pinned maps.
    #[must_use]
    pub fn is_kernel(&self) -> bool {
        matches!(self.form, Form::Kernel(_))
    }

    /// Enters an accepted connection.
    pub fn accepted(&self, client: BorrowedFd<'_>, listener: u32) -> (Entry, Standing) {
        match &self.form {
            Form::Kernel(maps) => {
                let over =
                    self.state(listener).over.load(SeqCst) > 0 && pinned::is_over(maps, client);
                let entry = Entry {
                    listener,
                    record: None,
                };
                (
                    entry,
                    if over {
                        Standing::Over
                    } else {
                        Standing::Counted
                    },
                )
            }
            Form::Local(book) => {
                let entry = Entry {
                    listener,
                    record: Some(book.established(listener)),
                };
                (entry, Standing::Counted)
            }
        }
    }

    /// Takes the total's, the user's, the database's and the backend's slot,
    /// or none of them. [`Step::Ask`]: only the kernel can take them; bring its
    /// answer to [`Ledger::answered`]. It is not asked while a limit is reached, so
    /// that a storm of refusals does not cost a call each.
    pub fn admit(&self, names: &mut NameCache, entry: &Entry, who: &Applicant<'_>) -> Step {
        for _ in 0..STALE_RETRIES {
            let asked = match self.slots_of(names, who) {
                Ok(asked) => asked,
                Err(reason) => return Step::Refused(reason),
            };
            let verdict = match (&self.form, &entry.record) {
                (Form::Local(book), Some(record)) if !self.asks => {
                    book.admit(record, entry.listener, &asked)
                }
                (Form::Local(_), None) => Verdict::Already,
                _ => match slots::look(self, &asked) {
                    Err(Denial::Full(kind)) => return Step::Refused(reason(kind)),
                    Err(denial @ Denial::Stale) => Verdict::Denied(denial),
                    _ => return Step::Ask(self.request(entry, &asked)),
                },
            };
            if let Some(decided) = judge(names, who, verdict) {
                return Step::Decided(decided);
            }
        }
        Step::Refused(Reason::NamesFull)
    }

    fn request(&self, entry: &Entry, asked: &[SlotRef; 4]) -> AdmitRequest {
        match (&self.form, &entry.record) {
            (Form::Kernel(maps), _) => pinned::request(maps, asked),
            (Form::Local(book), record) => {
                let verdict = match record {
                    Some(record) => book.admit(record, entry.listener, asked),
                    None => Verdict::Already,
                };
                let code = verdict.answer().map_or_else(AdmitErrno::code, |()| 0);
                AdmitRequest {
                    instance: code as u64,
                    slots: *asked,
                }
            }
        }
    }

    /// What the kernel's answer means. `None`: a slot had gone to another name
    /// meanwhile; ask again, [`STALE_RETRIES`] times at most.
    pub fn answered(
        &self,
        names: &mut NameCache,
        who: &Applicant<'_>,
        answer: Result<(), AdmitErrno>,
    ) -> Option<Result<(), Reason>> {
        judge(names, who, Verdict::from(answer))
    }

    /// A connection has said what it wants and asks for no slot: it is pending
    /// no more.
    pub fn spoken(&self, client: BorrowedFd<'_>, entry: &Entry) {
        let nothing = [SlotRef::ABSENT; 4];
        match (&self.form, &entry.record) {
            (Form::Kernel(maps), _) => {
                Verdict::from(kernel::admit(client, &pinned::request(maps, &nothing)))
            }
            (Form::Local(book), Some(record)) => book.admit(record, entry.listener, &nothing),
            (Form::Local(_), None) => Verdict::Already,
        };
    }

    /// Ends an entry. Call it once, after the client's socket was closed.
    pub fn closed(&self, entry: Entry) {
        // The kernel form gave everything back at the close itself.
        if let (Form::Local(book), Some(record)) = (&self.form, &entry.record) {
            book.closed(record, entry.listener);
        }
    }

    /// A listener's words.
    #[must_use]
    pub fn state(&self, listener: u32) -> &ListenerState<AtomicU64> {
        &self.listener_states()[listener as usize]
    }

    /// Pending connections of all listeners: the very words that
    /// `max_pending` is held against.
    #[must_use]
    pub fn pending(&self) -> u64 {
        let states = &self.listener_states()[..LISTENERS_MAX as usize];
        states.iter().map(|state| state.pending.load(SeqCst)).sum()
    }

    /// Admitted sessions in all.
    #[must_use]
    pub fn admitted(&self) -> u64 {
        u64::from(slots::used(self.words()[slot::TOTAL as usize].load(SeqCst)))
    }

    /// Sockets of a listener that hold a token of its ceiling.
    #[must_use]
    pub fn sockets(&self, listener: u32) -> u64 {
        let cells = match &self.form {
            Form::Kernel(maps) => pinned::cells_sum(maps, listener),
            Form::Local(_) => 0,
        };
        // Cells move while they are summed: a moment's reading may be off by
        // what moved, never below zero for a reader.
        self.state(listener).in_use(cells).max(0).cast_unsigned()
    }

    /// `max_pending` in force.
    #[must_use]
    pub fn max_pending(&self) -> Limit {
        self.plain_limit(slot::MAX_PENDING)
    }

    /// Impossible counts ever seen; must be 0.
    #[must_use]
    pub fn errors(&self) -> u64 {
        let states = self.listener_states();
        states.iter().map(|state| state.errors.load(SeqCst)).sum()
    }

    fn slots_of(&self, names: &mut NameCache, who: &Applicant<'_>) -> Result<[SlotRef; 4], Reason> {
        let mut find = |kind, name: &[u8]| {
            names
                .find(self, &NameKey::new(kind, name))
                .map_err(|error| {
                    tracing::debug!(%error, "no slot for a name");
                    Reason::NamesFull
                })
        };
        let total = SlotRef {
            index: slot::TOTAL,
            generation: 0,
        };
        Ok([
            total,
            find(NameKind::User, who.user)?,
            match who.database {
                Some(database) => find(NameKind::Database, database)?,
                None => SlotRef::ABSENT,
            },
            find(NameKind::Backend, who.backend)?,
        ])
    }

    fn words(&self) -> &[AtomicU64] {
        match &self.form {
            Form::Kernel(maps) => &maps.slots,
            Form::Local(book) => book.slots(),
        }
    }

    fn limit_words(&self) -> &[LimitWords<AtomicU64>] {
        match &self.form {
            Form::Kernel(maps) => &maps.limits,
            Form::Local(book) => book.limits(),
        }
    }

    fn listener_limit_words(&self) -> &[LimitWords<AtomicU64>] {
        match &self.form {
            Form::Kernel(maps) => &maps.listener_limits,
            Form::Local(book) => book.listener_limits(),
        }
    }

    fn listener_states(&self) -> &[ListenerState<AtomicU64>] {
        match &self.form {
            Form::Kernel(maps) => &maps.listeners,
            Form::Local(book) => book.listeners(),
        }
    }

    fn names(&self) -> &dyn NameTable {
        match &self.form {
            Form::Kernel(maps) => &**maps,
            Form::Local(book) => book,
        }
    }
}

impl Book for Ledger {
    type Word = AtomicU64;

    fn slot(&self, index: u32) -> Option<&AtomicU64> {
        self.words().get(index as usize)
    }

    fn limit(&self, index: u32) -> Option<&LimitWords<AtomicU64>> {
        self.limit_words().get(index as usize)
    }
}

/// What a verdict means; `None`: the names are to be looked up anew.
fn judge(
    names: &mut NameCache,
    who: &Applicant<'_>,
    verdict: Verdict,
) -> Option<Result<(), Reason>> {
    Some(match verdict {
        Verdict::Admitted => Ok(()),
        Verdict::Over => Err(Reason::OverCeiling),
        Verdict::Denied(Denial::Full(kind)) => Err(reason(kind)),
        Verdict::Denied(Denial::Stale) => {
            names.forget(who);
            return None;
        }
        Verdict::Denied(Denial::Unknown | Denial::Contended) | Verdict::Already => {
            tracing::error!(?verdict, "admission answered what must not happen");
            Err(Reason::MaxConnections)
        }
    })
}

const fn reason(kind: SlotKind) -> Reason {
    match kind {
        SlotKind::Total => Reason::MaxConnections,
        SlotKind::User => Reason::User,
        SlotKind::Database => Reason::Database,
        SlotKind::Backend => Reason::Backend,
    }
}

#[cfg(test)]
mod tests;
