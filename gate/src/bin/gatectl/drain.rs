//! `gatectl drain`.

use gate::control::api::Draining;

use crate::output::Output;
use crate::target::{Failure, Target};

pub fn run(target: &Target, output: Output) -> Result<(), Failure> {
    let draining: Draining = target.post("/drain", None::<&()>)?;
    output.print(&draining, |draining| {
        format!(
            "draining: new sessions are refused; {} sessions have {} s to end, then gate exits\n",
            draining.active, draining.deadline_seconds
        )
    })
}
