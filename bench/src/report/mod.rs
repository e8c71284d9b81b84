//! What a run found: as JSON, as text, as plots, beside another one.

pub mod histogram;
pub mod model;
