//! HTTP over the control socket.

use std::io;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper::{Method, Request, header};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

/// An answer: whether it is a success, and its body.
pub struct Answer {
    pub success: bool,
    pub body: Bytes,
}

/// Asks once. `patience` bounds the whole exchange.
///
/// # Errors
/// Nobody listens, nobody answers in time, or the answer is no HTTP.
pub fn ask(
    socket: &Path,
    method: Method,
    path: &str,
    body: Option<String>,
    patience: Duration,
) -> io::Result<Answer> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let exchange = exchange(socket, method, path, body);
        tokio::time::timeout(patience, exchange)
            .await
            .map_err(|_| {
                io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("no answer within {patience:?}"),
                )
            })?
    })
}

async fn exchange(
    socket: &Path,
    method: Method,
    path: &str,
    body: Option<String>,
) -> io::Result<Answer> {
    let stream = UnixStream::connect(socket).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(io::Error::other)?;
    tokio::spawn(connection);
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header(header::HOST, "gate");
    if body.is_some() {
        request = request.header(header::CONTENT_TYPE, "application/json");
    }
    let request = request
        .body(Full::new(Bytes::from(body.unwrap_or_default())))
        .map_err(io::Error::other)?;
    let answer = sender
        .send_request(request)
        .await
        .map_err(io::Error::other)?;
    let success = answer.status().is_success();
    let body = answer
        .into_body()
        .collect()
        .await
        .map_err(io::Error::other)?
        .to_bytes();
    Ok(Answer { success, body })
}
