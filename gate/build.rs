//! Chooses the kernel object that gate embeds, and names it in `GATE_BPF_OBJECT`.
//!
//! It is the committed one, which must belong to the sources beside it, unless
//! `GATE_BPF_OBJECT` in the environment names a freshly built one. Nothing but cargo is needed.

use std::env;
use std::path::{Path, PathBuf};

// One half of the module belongs to `xtask build-ebpf`, which writes what is checked here.
#[allow(dead_code)]
#[path = "../xtask/src/fingerprint.rs"]
mod fingerprint;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=GATE_BPF_OBJECT");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let chosen = match env::var_os("GATE_BPF_OBJECT") {
        Some(path) => fresh(&root, Path::new(&path)),
        None => prebuilt(&root),
    };
    match chosen {
        Ok(object) => println!("cargo::rustc-env=GATE_BPF_OBJECT={}", object.display()),
        Err(text) => {
            for line in text.lines() {
                println!("cargo::error={line}");
            }
        }
    }
}

/// A freshly built object; a relative path counts from the root of the checkout.
fn fresh(root: &Path, path: &Path) -> Result<PathBuf, String> {
    println!("cargo::rerun-if-changed={}", root.join(path).display());
    root.join(path).canonicalize().map_err(|error| {
        format!(
            "GATE_BPF_OBJECT={}: {error}; run `cargo xtask build-ebpf` or unset it",
            path.display()
        )
    })
}

/// The committed object, if it is the object of the sources in this checkout.
fn prebuilt(root: &Path) -> Result<PathBuf, String> {
    let prebuilt = [fingerprint::OBJECT, fingerprint::FINGERPRINT, "Cargo.lock"];
    for path in fingerprint::SOURCES.iter().chain(&prebuilt) {
        println!("cargo::rerun-if-changed={}", root.join(path).display());
    }
    let stale = |why: String| {
        format!(
            "the committed kernel object does not belong to these sources:\n{why}\n\
             run `cargo xtask build-ebpf` (its tool chain: `cargo xtask setup --what ebpf`)"
        )
    };
    fingerprint::verify(root).map_err(stale)?;
    let object = root.join(fingerprint::OBJECT);
    object
        .canonicalize()
        .map_err(|error| format!("{}: {error}", object.display()))
}
