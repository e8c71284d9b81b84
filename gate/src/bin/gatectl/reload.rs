//! `gatectl reload`.

use gate::control::api::Reloaded;

use crate::output::Output;
use crate::target::{Failure, Target};

pub fn run(target: &Target, output: Output) -> Result<(), Failure> {
    let reloaded: Reloaded = target.post("/reload", None::<&()>)?;
    output.print(&reloaded, |reloaded| match reloaded.waiting.as_slice() {
        [] => "reloaded\n".to_owned(),
        waiting => format!(
            "reloaded, but these settings changed too and wait for the next start: {}\n",
            waiting.join(", ")
        ),
    })
}
