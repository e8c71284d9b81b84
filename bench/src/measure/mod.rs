//! What a run costs: CPU time, waiting for a CPU, memory, and who disturbed it.

pub mod memory;
pub mod processes;
pub mod system;
pub mod window;
