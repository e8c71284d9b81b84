//! `gatectl completions SHELL`.

use clap::CommandFactory;
use clap_complete::Shell;

use crate::output::{self, Output};
use crate::target::Failure;

pub fn run<Line: CommandFactory>(shell: Shell, _output: Output) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Line::command(), "gatectl", &mut script);
    output::write(&String::from_utf8_lossy(&script))
}
