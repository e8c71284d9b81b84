//! Reload: limits of the configuration change at once, timeouts for the
//! connections that come later, all else waits for the next start.
#![forbid(unsafe_code)]

use std::sync::Arc;

use super::Shared;
use super::api::Reloaded;
use super::limits;
use crate::budget;
use crate::config::Config;

/// Reads the configuration again and puts its limits and timeouts in force. No
/// count is touched, and limits set by `gatectl` still win.
///
/// # Errors
/// A sentence that says why the old configuration stays in force.
pub(super) async fn reload(shared: &Arc<Shared>) -> Result<Reloaded, String> {
    let _alone = shared.reloading.lock().await;
    let reader = Arc::clone(shared);
    // Files and name servers can be slow. A thread of its own, not the
    // runtime's: that one would make the end of gate wait for it.
    let (sender, read) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        // Nobody waits any more when gate ends meanwhile.
        let _ = sender.send(reader.source.load());
    });
    let result = match read.await {
        Ok(Ok(new)) => apply(shared, &new),
        Ok(Err(error)) => Err(error.to_string()),
        Err(error) => Err(error.to_string()),
    };
    match &result {
        Ok(Reloaded { waiting }) if waiting.is_empty() => tracing::info!("reloaded"),
        Ok(Reloaded { waiting }) => tracing::warn!(
            waiting = waiting.join(", "),
            "reloaded, but these settings changed too and wait for the next start"
        ),
        Err(error) => {
            tracing::error!(error, "not reloaded: the old configuration stays in force");
        }
    }
    result
}

fn apply(shared: &Shared, new: &Config) -> Result<Reloaded, String> {
    let old = shared.state.config();
    let merged = with_changes_of(&old, new);
    let merged =
        budget::fit(&merged, &shared.state.fd_budget()).map_err(|error| error.to_string())?;
    let ledger = &shared.state.ledger;
    if let Err(error) = ledger.apply_config(&merged) {
        // What was written before the failure must not stay half in force.
        if let Err(again) = ledger.apply_config(&old) {
            tracing::error!(error = %again, "the old limits cannot be restored");
        }
        return Err(error.to_string());
    }
    limits::warn_of_excess(ledger);
    shared.state.set_config(Arc::new(merged));
    let waiting = new.fixed_differences(&old);
    Ok(Reloaded {
        waiting: waiting.into_iter().map(str::to_owned).collect(),
    })
}

/// The running configuration with what can change of another.
fn with_changes_of(old: &Config, new: &Config) -> Config {
    let mut merged = old.clone();
    merged.limits = new.limits.clone();
    merged.timeouts = new.timeouts;
    for listener in &mut merged.listeners {
        let same = new
            .listeners
            .iter()
            .find(|other| other.address == listener.address);
        if let Some(same) = same {
            listener.ceiling = same.ceiling;
        }
    }
    for backend in &mut merged.backends {
        if let Some(same) = new.backends.iter().find(|other| other.name == backend.name) {
            backend.max_connections = same.max_connections;
        }
    }
    merged
}
