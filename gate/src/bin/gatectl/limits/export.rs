//! `gatectl limits export`.

use gate::control::limits;
use serde_json::json;

use crate::output::Output;
use crate::target::{Failure, Reached, Target};

pub fn run(target: &Target, output: Output) -> Result<(), Failure> {
    let toml = match target.get("/limits/export")? {
        Reached::Gate(answer) => String::from_utf8_lossy(&answer.body).into_owned(),
        Reached::Maps(ledger) => limits::export(&ledger, None).map_err(Failure::new)?,
    };
    output.print(&json!({ "toml": toml }), |_| toml.clone())
}
