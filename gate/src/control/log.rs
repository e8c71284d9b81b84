//! How log lines look.
#![forbid(unsafe_code)]

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;

/// What is logged unless RUST_LOG says otherwise.
const DEFAULT: &str = "info";

/// Begins to write log lines to standard error: `info` and above, or what the
/// environment variable RUST_LOG says. A second call changes nothing.
pub fn init(format: LogFormat) {
    let written = std::env::var(EnvFilter::DEFAULT_ENV).unwrap_or_default();
    let filter = match written.trim() {
        "" => Ok(EnvFilter::new(DEFAULT)),
        written => EnvFilter::try_new(written),
    };
    let wrong = filter.as_ref().err().map(ToString::to_string);
    let filter = filter.unwrap_or_else(|_| EnvFilter::new(DEFAULT));
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    let _ = match format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    if let Some(error) = wrong {
        tracing::warn!(
            error,
            "RUST_LOG is no filter and is ignored: write info, warn, debug or gate=debug"
        );
    }
}
