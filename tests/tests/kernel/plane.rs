//! Loading, pinning, replacing.

use anyhow::Result;
use gate_tests::kernel::counted::start;

use crate::Test;

pub const TESTS: &[Test] = &[("plane_starts_and_its_probe_is_counted", starts)];

fn starts() -> Result<()> {
    let plane = start("first")?;
    plane.probe()?;
    Ok(())
}
