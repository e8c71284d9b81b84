//! Lists sessions: asks each worker, gathers, sorts.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};

use super::api::{Session, SessionQuery, Sessions};
use crate::config::name::{self, NameError};
use crate::config::{Backend, Config};
use crate::session::outcome::SessionState;
use crate::sessions::{Answer, Filter, Inquiry, Record};
use crate::state::State;
use crate::stats::Direction;

/// A worker answers within a round or a few of its loop.
const PATIENCE: Duration = Duration::from_secs(2);

/// Why sessions cannot be listed as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// A name that is none.
    #[error("{0}")]
    Name(#[from] NameError),
    /// No state.
    #[error("`{0}` is no state of a session; there are: {known}", known = states())]
    State(String),
    /// No address.
    #[error("`{0}` is no IP address")]
    Source(String),
}

fn states() -> String {
    let words: Vec<&str> = SessionState::ALL
        .iter()
        .map(|state| state.label())
        .collect();
    words.join(", ")
}

/// What a query asks for.
///
/// # Errors
/// See [`QueryError`].
pub fn filter(query: &SessionQuery) -> Result<Filter, QueryError> {
    let name = |text: &Option<String>| text.as_deref().map(name::parse).transpose();
    let state = query.state.as_deref().map(|word| {
        SessionState::from_label(word).ok_or_else(|| QueryError::State(word.to_owned()))
    });
    let source = query.source.as_deref().map(|text| {
        let address: Result<std::net::IpAddr, _> = text.parse();
        address.map_err(|_| QueryError::Source(text.to_owned()))
    });
    Ok(Filter {
        user: name(&query.user)?,
        database: name(&query.database)?,
        state: state.transpose()?,
        source: source.transpose()?.map(|address| address.to_canonical()),
    })
}

/// The sessions that a query asks for, oldest first.
///
/// # Errors
/// See [`QueryError`].
pub async fn list(state: &State, query: &SessionQuery) -> Result<Sessions, QueryError> {
    let filter = Arc::new(filter(query)?);
    let (mut records, unanswered) = gather(state, &filter).await;
    records.sort_by_key(|record| (std::cmp::Reverse(record.age), record.id));
    let found = records.len();
    records.truncate(query.limit.unwrap_or(usize::MAX));
    let config = state.config();
    let workers = state.stats.len();
    let sessions = records
        .into_iter()
        .map(|one| session(one, &config, workers));
    Ok(Sessions {
        sessions: sessions.collect(),
        found,
        unanswered: unanswered.into_iter().collect(),
    })
}

/// All records, and the workers that have not sent all of their own.
async fn gather(state: &State, filter: &Arc<Filter>) -> (Vec<Record>, BTreeSet<usize>) {
    let (answers, mut heard) = mpsc::unbounded_channel();
    for inbox in &state.inboxes {
        inbox.put(Inquiry {
            filter: Arc::clone(filter),
            answers: answers.clone(),
        });
    }
    // The channel ends when no worker is left that may send.
    drop(answers);
    state.wake_workers();
    let deadline = Instant::now() + PATIENCE;
    let mut unanswered: BTreeSet<usize> = (0..state.inboxes.len()).collect();
    let mut records = Vec::new();
    while !unanswered.is_empty() {
        match timeout_at(deadline, heard.recv()).await {
            Ok(Some(Answer::Sessions(more))) => records.extend(more),
            Ok(Some(Answer::Done(worker))) => {
                unanswered.remove(&worker);
            }
            Ok(None) | Err(_) => break,
        }
    }
    (records, unanswered)
}

fn session(record: Record, config: &Config, workers: usize) -> Session {
    let place = record.backend;
    let backend: Option<&Backend> = place.and_then(|(backend, _)| config.backends.get(backend));
    let address = backend
        .zip(place)
        .and_then(|(backend, (_, address))| backend.addresses.get(address));
    Session {
        id: record.id.0,
        user: record.user.as_deref().map(name::escape),
        database: record.database.as_deref().map(name::escape),
        source: record.source.map(|source| source.to_string()),
        backend: backend.map(|backend| backend.name.clone()),
        backend_address: address.map(ToString::to_string),
        state: record.state.label().to_owned(),
        age_seconds: seconds(record.age),
        idle_seconds: seconds(record.idle),
        bytes_to_backend: record.bytes[Direction::ToBackend as usize],
        bytes_to_client: record.bytes[Direction::ToClient as usize],
        worker: record.id.place(workers).map_or(0, |(worker, _)| worker),
    }
}

/// To the millisecond.
fn seconds(duration: Duration) -> f64 {
    duration.as_millis() as f64 / 1e3
}
