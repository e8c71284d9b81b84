//! What the committed kernel object was built from.
//!
//! `gate-ebpf/prebuilt/fingerprint` lists the digest of every source that goes into
//! `gate.bpf.o`, the versions of the crates that shape it, and the digest of the object itself.
//! `xtask build-ebpf` writes it; gate's build script refuses to embed an object whose
//! fingerprint does not match. Both include this one file, so it needs only `std` and `sha2`.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// The committed object, relative to the root of the checkout.
pub const OBJECT: &str = "gate-ebpf/prebuilt/gate.bpf.o";

/// Its fingerprint, relative to the root of the checkout.
pub const FINGERPRINT: &str = "gate-ebpf/prebuilt/fingerprint";

/// Files and folders whose bytes go into the object.
pub const SOURCES: [&str; 4] = [
    "gate-ebpf/Cargo.toml",
    "gate-ebpf/src",
    "gate-common/Cargo.toml",
    "gate-common/src",
];

/// Crates whose code or macros end up in the object; their versions come from Cargo.lock.
const CRATES: [&str; 7] = [
    "aya-ebpf",
    "aya-ebpf-bindings",
    "aya-ebpf-cty",
    "aya-ebpf-macros",
    "aya-log-common",
    "aya-log-ebpf",
    "aya-log-ebpf-macros",
];

const HEADER: &str = "\
# What gate.bpf.o was built from: cargo xtask build-ebpf writes this file, nobody edits it.
# By hand, in the root of the checkout: grep -E '^[0-9a-f]{64} ' THIS_FILE | sha256sum -c
";

/// One covered source or crate: `name` is a path or `crate NAME`, `value` a digest or a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// A path relative to the root, or `crate NAME`.
    pub name: String,
    /// SHA-256 in hex, or the version of the crate.
    pub value: String,
}

/// The parsed form of a fingerprint file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Fingerprint {
    /// Compiler and linker that made the object, as they name themselves.
    pub built_by: String,
    /// Sources and crates, in the order of the file.
    pub entries: Vec<Entry>,
    /// SHA-256 of the object, in hex.
    pub object: String,
}

impl Fingerprint {
    /// The fingerprint of `object`, made from the sources under `root` by `built_by`.
    pub fn of(root: &Path, object: &[u8], built_by: &str) -> io::Result<Self> {
        Ok(Self {
            built_by: built_by.to_owned(),
            entries: source_entries(root)?,
            object: sha256(object),
        })
    }

    /// Reads what [`Fingerprint::render`] wrote. Lines of no known form are ignored: a missing
    /// entry shows up as a difference.
    pub fn parse(text: &str) -> Self {
        let mut parsed = Self::default();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            if let Some(by) = line.strip_prefix("built by ") {
                parsed.built_by = by.to_owned();
            } else if let Some((name, version)) = line
                .strip_prefix("crate ")
                .and_then(|rest| rest.split_once(' '))
            {
                parsed.entries.push(Entry {
                    name: format!("crate {name}"),
                    value: version.to_owned(),
                });
            } else if let Some((digest, path)) = line.split_once("  ") {
                if path == OBJECT {
                    parsed.object = digest.to_owned();
                } else {
                    parsed.entries.push(Entry {
                        name: path.to_owned(),
                        value: digest.to_owned(),
                    });
                }
            }
        }
        parsed
    }

    /// The text of the fingerprint file.
    pub fn render(&self) -> String {
        let mut text = String::from(HEADER);
        let _ = writeln!(text, "built by {}", self.built_by);
        for entry in &self.entries {
            let _ = if entry.name.starts_with("crate ") {
                writeln!(text, "{} {}", entry.name, entry.value)
            } else {
                writeln!(text, "{}  {}", entry.value, entry.name)
            };
        }
        let _ = writeln!(text, "{}  {OBJECT}", self.object);
        text
    }
}

/// Checks the committed object and its fingerprint against the sources under `root`.
///
/// The error is a text for people: what differs, one per line.
pub fn verify(root: &Path) -> Result<Fingerprint, String> {
    let text = fs::read_to_string(root.join(FINGERPRINT))
        .map_err(|error| format!("cannot read {FINGERPRINT}: {error}"))?;
    let object =
        fs::read(root.join(OBJECT)).map_err(|error| format!("cannot read {OBJECT}: {error}"))?;
    let committed = Fingerprint::parse(&text);
    let actual = Fingerprint::of(root, &object, &committed.built_by)
        .map_err(|error| format!("cannot read the sources of {OBJECT}: {error}"))?;
    let differences = differences(&committed, &actual);
    if differences.is_empty() {
        Ok(committed)
    } else {
        Err(differences.join("\n"))
    }
}

/// SHA-256 in lower-case hex, as sha256sum prints it.
pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .fold(String::with_capacity(64), |mut hex, byte| {
            let _ = write!(hex, "{byte:02x}");
            hex
        })
}

/// What changed between a committed fingerprint and the sources as they are.
fn differences(committed: &Fingerprint, actual: &Fingerprint) -> Vec<String> {
    let find = |entries: &[Entry], name: &str| {
        entries
            .iter()
            .find(|entry| entry.name == name)
            .map(|entry| entry.value.clone())
    };
    let mut found = Vec::new();
    for entry in &actual.entries {
        match find(&committed.entries, &entry.name) {
            None => found.push(format!("{} is new", entry.name)),
            Some(value) if value != entry.value => found.push(format!("{} changed", entry.name)),
            Some(_) => {}
        }
    }
    for entry in &committed.entries {
        if find(&actual.entries, &entry.name).is_none() {
            found.push(format!("{} is gone", entry.name));
        }
    }
    if committed.object != actual.object {
        found.push(format!("{OBJECT} is not the object of {FINGERPRINT}"));
    }
    found
}

fn source_entries(root: &Path) -> io::Result<Vec<Entry>> {
    let mut files = Vec::new();
    for source in SOURCES {
        collect_files(&root.join(source), &mut files)?;
    }
    files.sort();
    let lock = fs::read_to_string(root.join("Cargo.lock"))?;
    let mut entries = locked_crates(&lock);
    for file in files {
        let name = file.strip_prefix(root).unwrap_or(&file);
        entries.push(Entry {
            name: name.to_string_lossy().into_owned(),
            value: sha256(&fs::read(&file)?),
        });
    }
    Ok(entries)
}

fn collect_files(path: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        collect_files(&entry?.path(), files)?;
    }
    Ok(())
}

/// The versions of [`CRATES`] in a Cargo.lock. Cargo writes `name` and `version` as the first two
/// lines of each package, sorted, so a line reader is enough.
fn locked_crates(lock: &str) -> Vec<Entry> {
    let value = |line: &str, key: &str| {
        let rest = line.strip_prefix(key)?.strip_prefix(" = \"")?;
        Some(rest.strip_suffix('"')?.to_owned())
    };
    let mut entries = Vec::new();
    let mut name = None;
    for line in lock.lines() {
        if let Some(found) = value(line, "name") {
            name = CRATES.contains(&found.as_str()).then_some(found);
        } else if let (Some(version), Some(found)) = (value(line, "version"), &name) {
            entries.push(Entry {
                name: format!("crate {found}"),
                value: version,
            });
            name = None;
        }
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOCK: &str = "version = 4\n\n[[package]]\nname = \"aya-ebpf\"\nversion = \"0.2.1\"\n\n\
                        [[package]]\nname = \"aya-obj\"\nversion = \"0.3.0\"\n";

    fn checkout(name: &str) -> PathBuf {
        let root = std::env::temp_dir().join(format!("xtask-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        for source in ["gate-ebpf/src/main.rs", "gate-common/src/lib.rs", OBJECT] {
            let path = root.join(source);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, source).unwrap();
        }
        for toml in ["gate-ebpf/Cargo.toml", "gate-common/Cargo.toml"] {
            fs::write(root.join(toml), toml).unwrap();
        }
        fs::write(root.join("Cargo.lock"), LOCK).unwrap();
        let made = Fingerprint::of(&root, OBJECT.as_bytes(), "rustc 1, linker 2").unwrap();
        fs::write(root.join(FINGERPRINT), made.render()).unwrap();
        root
    }

    #[test]
    fn text_form_round_trips() {
        let root = checkout("round-trip");
        let made = Fingerprint::of(&root, b"object", "rustc 1, linker 2").unwrap();
        assert_eq!(Fingerprint::parse(&made.render()), made);
        assert_eq!(made.entries.len(), 5, "four files and one crate");
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn every_kind_of_change_is_named() {
        let root = checkout("changes");
        assert!(verify(&root).is_ok());
        fs::write(root.join("gate-ebpf/src/main.rs"), "other").unwrap();
        fs::write(root.join("gate-ebpf/src/extra.rs"), "new").unwrap();
        fs::remove_file(root.join("gate-common/src/lib.rs")).unwrap();
        fs::write(root.join("Cargo.lock"), LOCK.replace("0.2.1", "0.2.2")).unwrap();
        fs::write(root.join(OBJECT), "another object").unwrap();
        let error = verify(&root).unwrap_err();
        let lines: Vec<_> = error.lines().collect();
        assert_eq!(
            lines,
            [
                "crate aya-ebpf changed",
                "gate-ebpf/src/extra.rs is new",
                "gate-ebpf/src/main.rs changed",
                "gate-common/src/lib.rs is gone",
                "gate-ebpf/prebuilt/gate.bpf.o is not the object of gate-ebpf/prebuilt/fingerprint",
            ]
        );
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_missing_object_is_an_error() {
        let root = checkout("missing");
        fs::remove_file(root.join(OBJECT)).unwrap();
        assert!(verify(&root).unwrap_err().contains("cannot read"));
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn digest_is_that_of_sha256sum() {
        assert_eq!(
            sha256(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
