//! Descriptors: RLIMIT_NOFILE of this process, which its children inherit.

use anyhow::{Context, Result, ensure};
use rustix::process::{Resource, getrlimit, setrlimit};

/// Lets this process have as many as it may have at most.
///
/// # Errors
/// The kernel does not let it.
pub fn raise() -> Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).context("cannot raise RLIMIT_NOFILE")
}

/// Fails if so many sessions need more than there may be at most.
///
/// # Errors
/// `whose` descriptors do not suffice, with the cure.
pub fn ensure_enough(needed: u64, sessions: usize, whose: &str) -> Result<()> {
    let limit = getrlimit(Resource::Nofile).maximum;
    ensure!(
        limit.is_none_or(|limit| needed <= limit),
        "{sessions} sessions take {needed} descriptors of {whose}, and RLIMIT_NOFILE is {}: raise \
         it (ulimit -Hn {needed})",
        limit.unwrap_or_default()
    );
    Ok(())
}
