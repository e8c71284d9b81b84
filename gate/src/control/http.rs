//! HTTP at the admin address and at the control socket.
//!
//! The control socket serves all that the admin address serves, and also
//! whatever changes something: only its owner can reach it.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinHandle;

use super::api::{Draining, Failure, LatencyQuery, LimitChange, SessionQuery};
use super::latency::{self, LatencyError};
use super::limits::{self, LimitError};
use super::sessions::{self, QueryError};
use super::{Shared, connections, metrics, reload, status};
use crate::state::Phase;

/// Requests served at once by each of the two servers: their descriptors are
/// part of the reserve that sessions never get.
const REQUESTS_MAX: usize = 8;
/// For the head of a request to arrive.
const HEAD_DEADLINE: Duration = Duration::from_secs(5);
/// For a whole request and its answer.
const DEADLINE: Duration = Duration::from_secs(30);
/// Bytes that a request's body can have.
const BODY_BYTES_MAX: usize = 16 * 1024;
/// Pause after accept failed: it will fail again until descriptors come back.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// What is served at the admin address: reading only.
pub(super) fn admin_routes(shared: Arc<Shared>) -> Router {
    readers().with_state(shared)
}

/// What is served at the control socket.
pub(super) fn control_routes(shared: Arc<Shared>) -> Router {
    readers()
        .route("/status", get(get_status))
        .route("/latency", get(get_latency))
        // A query with a body: names are of any bytes.
        .route("/sessions", post(list_sessions))
        .route("/limits", get(get_limits))
        .route("/limits/export", get(export_limits))
        .route("/limits/set", post(set_limit))
        .route("/limits/unset", post(unset_limit))
        .route("/reload", post(post_reload))
        .route("/drain", post(post_drain))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(shared)
}

/// Something that accepts connections.
pub(super) trait Accept {
    type Stream: AsyncRead + AsyncWrite + Unpin + 'static;
    async fn accept_one(&self) -> std::io::Result<Self::Stream>;
}

impl Accept for tokio::net::TcpListener {
    type Stream = tokio::net::TcpStream;

    async fn accept_one(&self) -> std::io::Result<Self::Stream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

impl Accept for tokio::net::UnixListener {
    type Stream = tokio::net::UnixStream;

    async fn accept_one(&self) -> std::io::Result<Self::Stream> {
        self.accept().await.map(|(stream, _)| stream)
    }
}

/// Serves for ever. When every place is taken the oldest request loses its
/// own: an honest one is answered in milliseconds, so it is a silent one.
pub(super) async fn serve<L: Accept>(listener: L, routes: Router) {
    let mut places: VecDeque<JoinHandle<()>> = VecDeque::with_capacity(REQUESTS_MAX);
    loop {
        match listener.accept_one().await {
            Ok(stream) => {
                places.retain(|place| !place.is_finished());
                if places.len() == REQUESTS_MAX
                    && let Some(oldest) = places.pop_front()
                {
                    oldest.abort();
                }
                places.push_back(tokio_uring::spawn(serve_one(stream, routes.clone())));
            }
            Err(error) => {
                tracing::debug!(%error, "accept failed in the control plane");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// One request: no connection is kept, so that nobody holds a place.
async fn serve_one(stream: impl AsyncRead + AsyncWrite + Unpin + 'static, routes: Router) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes));
    match tokio::time::timeout(DEADLINE, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a request of the control plane failed"),
        Err(_) => tracing::debug!("a request of the control plane took too long"),
    }
}

fn readers() -> Router<Arc<Shared>> {
    Router::new()
        .route("/metrics", get(get_metrics))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(get_ready))
        .route("/connections", get(get_connections))
}

async fn get_metrics(State(shared): State<Arc<Shared>>) -> Result<Response, Failed> {
    let text = metrics::scrape(&shared.state, &shared.limited).map_err(Failed::internal)?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], text).into_response())
}

async fn get_ready(State(shared): State<Arc<Shared>>) -> (StatusCode, String) {
    let phase = shared.state.phase();
    match phase {
        Phase::Serving => (StatusCode::OK, "ready\n".to_owned()),
        _ => (
            StatusCode::SERVICE_UNAVAILABLE,
            format!("{}\n", status::phase_word(phase)),
        ),
    }
}

async fn get_connections(State(shared): State<Arc<Shared>>) -> Result<Response, Failed> {
    let state = &shared.state;
    let read = connections::read(&state.ledger, &state.listeners, &state.kernel);
    Ok(Json(read.map_err(Failed::internal)?).into_response())
}

async fn get_status(State(shared): State<Arc<Shared>>) -> Result<Response, Failed> {
    Ok(Json(status::of_process(&shared).map_err(Failed::internal)?).into_response())
}

async fn get_latency(
    State(shared): State<Arc<Shared>>,
    Query(query): Query<LatencyQuery>,
) -> Result<Response, Failed> {
    Ok(Json(latency::read(&shared.state, &query)?).into_response())
}

async fn list_sessions(
    State(shared): State<Arc<Shared>>,
    Json(query): Json<SessionQuery>,
) -> Result<Response, Failed> {
    Ok(Json(sessions::list(&shared.state, &query).await?).into_response())
}

async fn get_limits(State(shared): State<Arc<Shared>>) -> Result<Response, Failed> {
    let listed = limits::list(&shared.state.ledger).map_err(Failed::internal)?;
    Ok(Json(listed).into_response())
}

async fn export_limits(State(shared): State<Arc<Shared>>) -> Result<String, Failed> {
    let waits = &shared.state.config().limits.waits;
    limits::export(&shared.state.ledger, Some(waits)).map_err(Failed::internal)
}

async fn set_limit(
    State(shared): State<Arc<Shared>>,
    Json(change): Json<LimitChange>,
) -> Result<Response, Failed> {
    let ledger = &shared.state.ledger;
    let entry = limits::set(ledger, &change)?;
    limits::warn_of_excess(ledger);
    Ok(Json(entry).into_response())
}

async fn unset_limit(
    State(shared): State<Arc<Shared>>,
    Json(change): Json<LimitChange>,
) -> Result<Response, Failed> {
    let ledger = &shared.state.ledger;
    let entry = limits::unset(ledger, &change)?;
    limits::warn_of_excess(ledger);
    Ok(Json(entry).into_response())
}

async fn post_reload(State(shared): State<Arc<Shared>>) -> Result<Response, Failed> {
    match reload::reload(&shared).await {
        Ok(reloaded) => Ok(Json(reloaded).into_response()),
        Err(error) => Err(Failed(StatusCode::UNPROCESSABLE_ENTITY, error)),
    }
}

async fn post_drain(State(shared): State<Arc<Shared>>) -> Response {
    shared.drain.notify_one();
    let draining = Draining {
        active: shared.state.ledger.admitted(),
        deadline_seconds: shared.state.config().timeouts.drain.as_secs(),
    };
    Json(draining).into_response()
}

/// A failure with its status.
struct Failed(StatusCode, String);

impl Failed {
    fn internal(error: impl ToString) -> Self {
        Self(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
    }
}

/// What is asked cannot be.
macro_rules! unprocessable {
    ($($error:ty),*) => {$(
        impl From<$error> for Failed {
            fn from(error: $error) -> Self {
                Self(StatusCode::UNPROCESSABLE_ENTITY, error.to_string())
            }
        }
    )*};
}

unprocessable!(LimitError, LatencyError, QueryError);

impl IntoResponse for Failed {
    fn into_response(self) -> Response {
        (self.0, Json(Failure { error: self.1 })).into_response()
    }
}
