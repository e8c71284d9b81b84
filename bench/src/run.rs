//! A run from its options to its report.

use anyhow::Result;

use crate::options::Options;

/// Runs what was asked for.
///
/// # Errors
/// A signal came, the options make no sense, or a way to the server failed.
pub fn run(options: &Options) -> Result<()> {
    let _ = options.plan()?;
    Ok(())
}
