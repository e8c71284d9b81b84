//! What the kernel tier shares: the jail, a listener that is counted, small
//! network helpers.

pub mod counted;
pub mod jail;
pub mod net;
