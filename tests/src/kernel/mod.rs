//! What the kernel tier shares: the jail, and a listener that is counted.

pub mod counted;
pub mod jail;
