//! The house rules as code: one function each, a path and a text in, complaints out.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

use super::source::{code_only, lines_naming};
use crate::fingerprint;
use crate::host;
use crate::test::{KNOWN_TEST_TARGETS, UNIT_TEST_TARGETS};

/// Where one rule is broken, and what to do about it.
type Complaint = String;

const LINES_MAX: usize = 600;
const LINES_WANTED: usize = 400;

/// Modules that take values and return values: no I/O, no clock, no unsafe.
const PURE: [&str; 3] = ["gate/src/proto", "gate/src/admission", "gate/src/session"];

/// The modules of gate that may contain `unsafe`.
const UNSAFE: [&str; 3] = ["gate/src/ring", "gate/src/kernel", "gate/src/host"];

/// Checks every rule on every file of the checkout.
pub fn check(root: &Path) -> Result<()> {
    let mut complaints = Vec::new();
    let mut sources = Vec::new();
    for file in host::checkout_files(root)? {
        let bytes = fs::read(root.join(&file)).with_context(|| file.display().to_string())?;
        let path = file.to_string_lossy().into_owned();
        complaints.extend(machine_paths(&path, &bytes));
        if let Ok(text) = String::from_utf8(bytes) {
            sources.push((path, text));
        }
    }
    for (path, text) in &sources {
        if path.ends_with(".rs") {
            let code = code_only(text);
            complaints.extend(length(path, text));
            complaints.extend(aya_in_one_module(path, &code));
            complaints.extend(io_uring_in_one_module(path, &code));
            complaints.extend(unsafe_in_few_modules(path, &code));
            complaints.extend(pure_module_is_pure(path, &code));
        } else if path.ends_with("Cargo.toml") {
            complaints.extend(versions_in_one_place(path, text));
        }
    }
    complaints.extend(pure_modules_forbid_unsafe(&sources));
    complaints.extend(test_targets_are_run(&sources));
    complaints.extend(prebuilt_is_fresh(root));
    if complaints.is_empty() {
        return Ok(());
    }
    for complaint in &complaints {
        eprintln!("{complaint}");
    }
    bail!("house rules broken: {}", complaints.len());
}

/// Files stay readable in one sitting.
fn length(path: &str, text: &str) -> Option<Complaint> {
    let lines = text.lines().count();
    if lines > LINES_WANTED && lines <= LINES_MAX {
        eprintln!("warning: {path}: {lines} lines; about {LINES_WANTED} are wanted");
    }
    (lines > LINES_MAX).then(|| format!("{path}: {lines} lines; split it, {LINES_MAX} is the most"))
}

/// In userspace one module knows the BPF loader; gate-common only marks its types for it, and the
/// bench asks the kernel how long programs ran.
fn aya_in_one_module(path: &str, code: &str) -> Vec<Complaint> {
    if within(
        path,
        &[
            "gate/src/kernel",
            "gate-common/src",
            "gate-ebpf/src",
            "bench/src/scenario/kernel",
        ],
    ) {
        return Vec::new();
    }
    ["aya", "aya_log", "aya_obj"]
        .iter()
        .flat_map(|name| naming(path, code, name, "only gate/src/kernel names aya"))
        .collect()
}

/// In gate, submission and completion entries stay behind typed operations. Tests and load
/// generators have rings of their own.
fn io_uring_in_one_module(path: &str, code: &str) -> Vec<Complaint> {
    if within(path, &["gate/src/ring", "tests", "bench"]) {
        return Vec::new();
    }
    naming(path, code, "io_uring", "only gate/src/ring names io_uring")
}

/// `unsafe` is where the system calls are.
fn unsafe_in_few_modules(path: &str, code: &str) -> Vec<Complaint> {
    if !path.starts_with("gate/") || within(path, &UNSAFE) {
        return Vec::new();
    }
    let rule = "unsafe belongs into gate/src/ring, kernel or host";
    naming(path, code, "unsafe", rule)
}

/// Pure modules are given `now` and bytes; they own no clock and no socket.
fn pure_module_is_pure(path: &str, code: &str) -> Vec<Complaint> {
    const IMPURE: [&str; 9] = [
        "Instant::now",
        "SystemTime",
        "TcpStream",
        "TcpListener",
        "UdpSocket",
        "UnixStream",
        "UnixListener",
        "UnixDatagram",
        "libc",
    ];
    if !within(path, &PURE) || path.ends_with("tests.rs") {
        return Vec::new();
    }
    // Tests begin their clock somewhere.
    let code = code.split("#[cfg(test)]\nmod ").next().unwrap_or(code);
    IMPURE
        .iter()
        .flat_map(|name| naming(path, code, name, "a pure module has no clock and no socket"))
        .collect()
}

/// The compiler holds the rule, if the head of the module says so.
fn pure_modules_forbid_unsafe(sources: &[(String, String)]) -> Vec<Complaint> {
    let complaint = |module: &&str| {
        let heads = [format!("{module}.rs"), format!("{module}/mod.rs")];
        match sources.iter().find(|(path, _)| heads.contains(path)) {
            None => Some(format!(
                "{module}: no such module; is it renamed? the rules name it"
            )),
            Some((path, text)) => (!code_only(text).contains("#![forbid(unsafe_code)]"))
                .then(|| format!("{path}: a pure module begins with #![forbid(unsafe_code)]")),
        }
    };
    PURE.iter().filter_map(complaint).collect()
}

/// A path of somebody's machine in a committed file helps nobody else.
fn machine_paths(path: &str, bytes: &[u8]) -> Vec<Complaint> {
    // In two pieces, so that this file passes its own rule.
    let folders = [
        concat!("/ro", "ot/"),
        concat!("/ho", "me/"),
        concat!("/wo", "rk/"),
    ];
    let inside_a_longer_path = |at: usize| {
        at.checked_sub(1).is_some_and(|before| {
            bytes[before].is_ascii_alphanumeric() || b"_.-})*".contains(&bytes[before])
        })
    };
    folders
        .iter()
        .filter_map(|folder| {
            let at = (0..bytes.len()).find(|at| {
                bytes[*at..].starts_with(folder.as_bytes()) && !inside_a_longer_path(*at)
            })?;
            let line = 1 + bytes[..at].iter().filter(|byte| **byte == b'\n').count();
            Some(format!(
                "{path}:{line}: names {folder}, a path of one machine"
            ))
        })
        .collect()
}

/// Members take every version from the workspace. A workspace of its own can take none from there.
fn versions_in_one_place(path: &str, text: &str) -> Vec<Complaint> {
    if path == "Cargo.toml" || text.lines().any(|line| line == "[workspace]") {
        return Vec::new();
    }
    let mut complaints = Vec::new();
    let mut in_dependencies = false;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.starts_with('[') {
            in_dependencies = line.ends_with("dependencies]");
        } else if in_dependencies && line.contains('=') && !line.starts_with('#') {
            let inherits = line.replace(' ', "").contains("workspace=true");
            if !inherits {
                complaints.push(format!(
                    "{path}:{}: take the version from the workspace: workspace = true",
                    index + 1
                ));
            }
        }
    }
    complaints
}

/// A tier of tests that `cargo xtask test` does not know would never run in CI.
fn test_targets_are_run(sources: &[(String, String)]) -> Vec<Complaint> {
    sources
        .iter()
        .filter_map(|(path, _)| path.strip_prefix("tests/tests/"))
        .filter_map(|path| path.strip_suffix("/main.rs").or(path.strip_suffix(".rs")))
        .filter(|name| !name.contains('/') && !KNOWN_TEST_TARGETS.contains(name))
        .filter(|name| !UNIT_TEST_TARGETS.contains(name))
        .map(|name| format!("tests/tests/{name}: cargo xtask test does not run it"))
        .collect()
}

/// What users embed is what the sources say.
fn prebuilt_is_fresh(root: &Path) -> Option<Complaint> {
    let why = fingerprint::verify(root).err()?;
    let object = fingerprint::OBJECT;
    Some(format!(
        "{object} is stale, run `cargo xtask build-ebpf`:\n{why}"
    ))
}

fn naming(path: &str, code: &str, name: &str, rule: &str) -> Vec<Complaint> {
    lines_naming(code, name)
        .into_iter()
        .map(|line| format!("{path}:{line}: names {name}; {rule}"))
        .collect()
}

/// Whether `path` is one of `modules`: `a/b` stands for `a/b.rs` and everything under `a/b/`.
fn within(path: &str, modules: &[&str]) -> bool {
    modules.iter().any(|module| {
        path.strip_prefix(module)
            .is_some_and(|rest| rest.starts_with('/') || rest == ".rs")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> (String, String) {
        (path.to_owned(), text.to_owned())
    }

    #[test]
    fn long_files_are_refused() {
        assert!(length("a.rs", &"x\n".repeat(LINES_MAX)).is_none());
        assert!(length("a.rs", &"x\n".repeat(LINES_MAX + 1)).is_some());
    }

    #[test]
    fn aya_is_named_in_the_kernel_module_alone() {
        let code = "use aya::Ebpf;";
        assert!(aya_in_one_module("gate/src/kernel/load.rs", code).is_empty());
        assert!(aya_in_one_module("gate/src/kernel.rs", code).is_empty());
        assert!(aya_in_one_module("gate-common/src/abi.rs", code).is_empty());
        assert_eq!(aya_in_one_module("gate/src/kernel_log.rs", code).len(), 1);
        assert_eq!(
            aya_in_one_module("gate/src/bin/gate.rs", "aya_log::x").len(),
            1
        );
    }

    #[test]
    fn io_uring_is_named_in_the_ring_module_alone() {
        let code = "io_uring::IoUring::new(8)";
        assert!(io_uring_in_one_module("gate/src/ring/mod.rs", code).is_empty());
        assert_eq!(
            io_uring_in_one_module("gate/src/worker/mod.rs", code).len(),
            1
        );
        assert!(io_uring_in_one_module("gate/src/control/mod.rs", "tokio_uring::start").is_empty());
    }

    #[test]
    fn unsafe_is_kept_to_three_modules() {
        let code = "unsafe { f() }";
        for allowed in [
            "gate/src/ring/sq.rs",
            "gate/src/kernel/a.rs",
            "gate/src/host/b.rs",
        ] {
            assert!(unsafe_in_few_modules(allowed, code).is_empty());
        }
        assert!(unsafe_in_few_modules("bench/src/main.rs", code).is_empty());
        assert_eq!(
            unsafe_in_few_modules("gate/src/worker/mod.rs", code).len(),
            1
        );
        assert!(unsafe_in_few_modules("gate/src/lib.rs", "#![deny(unsafe_code)]").is_empty());
    }

    #[test]
    fn pure_modules_have_no_clock_and_no_socket() {
        let code = "let a = Instant::now();\nlet b: std::net::TcpStream;";
        assert_eq!(
            pure_module_is_pure("gate/src/session/mod.rs", code).len(),
            2
        );
        assert!(pure_module_is_pure("gate/src/worker/mod.rs", code).is_empty());
        let test = format!("fn f() {{}}\n#[cfg(test)]\nmod tests {{\n{code} }}");
        assert!(pure_module_is_pure("gate/src/session/mod.rs", &test).is_empty());
        assert!(pure_module_is_pure("gate/src/proto.rs", "now: Instant, a: IpAddr").is_empty());
    }

    #[test]
    fn pure_modules_say_that_they_are() {
        let good = "//! Pure.\n#![forbid(unsafe_code)]\n";
        let sources = [
            file("gate/src/proto/mod.rs", good),
            file(
                "gate/src/admission.rs",
                "//! says #![forbid(unsafe_code)] in vain\n",
            ),
        ];
        let complaints = pure_modules_forbid_unsafe(&sources);
        assert_eq!(complaints.len(), 2);
        assert!(complaints[0].starts_with("gate/src/admission.rs"));
        assert!(complaints[1].starts_with("gate/src/session: no such module"));
    }

    #[test]
    fn machine_paths_are_found_in_text_and_binary() {
        let home = concat!("/ho", "me/me/x");
        assert_eq!(
            machine_paths("a", format!("x\ny {home}").as_bytes()).len(),
            1
        );
        assert!(machine_paths("a", format!("x\ny {home}").as_bytes())[0].contains("a:2"));
        let mut binary = vec![0xff, 0];
        binary.extend(concat!("/ro", "ot/.cargo").bytes());
        assert_eq!(machine_paths("o", &binary).len(), 1);
        assert!(machine_paths("a", concat!("chroot/wo", "rk/x").as_bytes()).is_empty());
    }

    #[test]
    fn members_inherit_versions() {
        let good =
            "[dependencies]\naya.workspace = true\nx = { workspace = true }\n[lints]\na = 1\n";
        assert!(versions_in_one_place("gate/Cargo.toml", good).is_empty());
        let bad = "[target.'cfg(loom)'.dev-dependencies]\n# why\nloom = \"0.7\"\n";
        let complaints = versions_in_one_place("gate/Cargo.toml", bad);
        assert_eq!(complaints.len(), 1);
        assert!(complaints[0].starts_with("gate/Cargo.toml:3"));
        assert!(versions_in_one_place("Cargo.toml", bad).is_empty());
        let apart = format!("{bad}[workspace]\n");
        assert!(versions_in_one_place("tests/fuzz/Cargo.toml", &apart).is_empty());
    }

    #[test]
    fn unknown_test_targets_are_found() {
        let known = format!("tests/tests/{}.rs", KNOWN_TEST_TARGETS[0]);
        let sources = [
            file(&known, ""),
            file("tests/tests/forgotten.rs", ""),
            file("tests/tests/lost/main.rs", ""),
            file("tests/tests/harness/mod.rs", ""),
        ];
        assert_eq!(test_targets_are_run(&sources).len(), 2);
    }
}
