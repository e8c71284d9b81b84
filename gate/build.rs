//! Says which kernel object is embedded.
fn main() {
    let root = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    let object = format!("{root}/../gate-ebpf/prebuilt/gate.bpf.o");
    println!("cargo::rerun-if-changed={object}");
    println!("cargo::rustc-env=GATE_BPF_OBJECT={object}");
}
