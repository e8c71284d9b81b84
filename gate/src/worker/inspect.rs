//! Answers what the control plane asks of this worker's sessions.

use std::time::Instant;

use super::Worker;
use super::connection::Mode;
use super::machine::Machine;
use crate::session::outcome::SessionState;
use crate::sessions::{Answer, Filter, Inquiry, Record, SessionId, Source};

/// Places of the table looked at in one round: a listing of thousands must not
/// keep live sessions waiting.
const PLACES_PER_ROUND: usize = 1024;

/// An inquiry that is being answered.
pub(super) struct Listing {
    inquiry: Inquiry,
    /// The first place that was not looked at.
    next: usize,
}

impl<M: Machine> Worker<M> {
    /// Takes up what was asked.
    pub(super) fn take_inquiries(&mut self) {
        let asked = self.state.inboxes[self.id].take().into_iter();
        self.listings
            .extend(asked.map(|inquiry| Listing { inquiry, next: 0 }));
    }

    /// Goes on with the oldest inquiry. A session that lives all the while is
    /// told of once: it stays at its place.
    pub(super) fn answer_inquiries(&mut self, now: Instant) {
        let Some(Listing { inquiry, next }) = self.listings.pop_front() else {
            return;
        };
        // No connection's place is beyond.
        let places = self.connections.capacity();
        let end = places.min(next + PLACES_PER_ROUND);
        let records: Vec<Record> = (next..end)
            .filter_map(|place| self.record(place, &inquiry.filter, now))
            .collect();
        // Whoever asked may have gone.
        let mut heard =
            records.is_empty() || inquiry.answers.send(Answer::Sessions(records)).is_ok();
        if end == places {
            let _ = inquiry.answers.send(Answer::Done(self.id));
            heard = false;
        }
        if heard {
            self.listings.push_front(Listing { inquiry, next: end });
        }
    }

    fn record(&mut self, place: usize, filter: &Filter, now: Instant) -> Option<Record> {
        if !self.connections.contains(place) {
            return None;
        }
        // Nobody may have asked for it so far.
        let source = self.source(place as u32);
        let connection = &self.connections[place];
        let session = &connection.session;
        // A failure that the session does not know of closes it too.
        let state = match connection.mode {
            Mode::Closing => SessionState::Ending,
            _ => session.state(),
        };
        let who = session.identity().map(|who| &**who);
        if !filter.fits(who, state, source) {
            return None;
        }
        let has_backend = connection.backend.is_some()
            || connection.mode == Mode::Dialing
            || state == SessionState::Waiting;
        Some(Record {
            id: SessionId::new(self.id, self.state.stats.len(), connection.generation),
            user: who.map(|who| who.user.clone()),
            database: who.and_then(|who| who.database.clone()),
            source: (source != Source::NOWHERE).then_some(source),
            backend: has_backend.then_some((
                usize::from(connection.backend_index),
                usize::from(connection.address),
            )),
            state,
            age: now.saturating_duration_since(connection.born),
            idle: now.saturating_duration_since(connection.active),
            bytes: connection.relayed,
        })
    }
}
