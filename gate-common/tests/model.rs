//! Model check of the rules: loom runs each model under every interleaving
//! with at most [`PREEMPTIONS`] preemptions (most bugs need two; raise the
//! bound with `LOOM_MAX_PREEMPTIONS` when there is time).
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release --package gate-common --test model --target-dir target/loom
//! ```
//!
//! `held` counts what callers hold: it goes up right after a take and down
//! right before a give, so it is never above the truth.

#[cfg(not(loom))]
#[test]
#[ignore = "the model check needs RUSTFLAGS=\"--cfg loom\""]
fn model_check() {
    panic!("build with RUSTFLAGS=\"--cfg loom\"");
}

#[cfg(loom)]
#[path = "model/mod.rs"]
mod model;
