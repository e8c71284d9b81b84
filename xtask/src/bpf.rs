//! `cargo xtask build-ebpf`: the kernel object from its sources, the same bytes everywhere.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail, ensure};

use crate::fingerprint::{self, Fingerprint};
use crate::{host, setup};

/// Debian's core sources for its rustc-web (package rust-web-src).
pub const DEBIAN_CORE: &str = "/usr/lib/rustlib/src/rust/library/core/src/lib.rs";

const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
const TARGET: &str = "bpfel-unknown-none";

/// The object's own profile, so that tuning the release profile of the data path does not
/// change it.
const PROFILE: [(&str, &str); 4] = [
    ("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3"),
    ("CARGO_PROFILE_RELEASE_LTO", "fat"),
    ("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1"),
    ("CARGO_PROFILE_RELEASE_DEBUG", "2"),
];

#[derive(clap::Args)]
#[command(
    after_help = "Builds gate-ebpf for bpfel-unknown-none and writes gate-ebpf/prebuilt/gate.bpf.o \
with\nthe fingerprint of its sources; commit both. The compiler is Debian's rustc-web with\n\
rust-web-src, else the rustup toolchain of the checkout with its rust-src component; the\n\
linker is bpf-linker. `cargo xtask setup --what ebpf` installs them.\n\n\
A gate built with GATE_BPF_OBJECT=PATH embeds the object at PATH instead of the committed one."
)]
pub struct Args {
    /// Write nothing into the checkout: fail if the committed object is stale, or if builds in
    /// two different folders give different bytes. What was built is left at the path printed
    #[arg(long)]
    check: bool,
}

/// Runs the task.
pub fn main(args: &Args) -> Result<ExitCode> {
    let root = host::root()?;
    let toolchain = Toolchain::find()?;
    if args.check {
        let built = check(&root, &toolchain)?;
        println!("{}", built.display());
    } else {
        renew(&root, &toolchain)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Builds the object and renews the committed one and its fingerprint.
fn renew(root: &Path, toolchain: &Toolchain) -> Result<()> {
    let built = build(root, &host::target_dir()?.join("bpf"), toolchain)?;
    let object = fs::read(&built).with_context(|| built.display().to_string())?;
    let print = Fingerprint::of(root, &object, &toolchain.version)?;
    write(&root.join(fingerprint::OBJECT), &object)?;
    write(
        &root.join(fingerprint::FINGERPRINT),
        print.render().as_bytes(),
    )?;
    eprintln!(
        "{}: {} bytes, built by {}",
        fingerprint::OBJECT,
        object.len(),
        toolchain.version
    );
    Ok(())
}

/// Proves that the committed object is fresh and the build reproducible; returns what was built.
///
/// The committed bytes are compared only with those of the same compiler and linker.
pub fn check(root: &Path, toolchain: &Toolchain) -> Result<PathBuf> {
    let committed = fingerprint::verify(root).map_err(|why| {
        anyhow::anyhow!("the committed kernel object is stale, run cargo xtask build-ebpf:\n{why}")
    })?;
    let target = host::target_dir()?;
    let built = build(root, &target.join("bpf"), toolchain)?;
    let digest = fingerprint::sha256(&fs::read(&built)?);

    let twin = target.join("bpf-twin/another/checkout");
    copy_checkout(root, &twin)?;
    let again = build(&twin, &target.join("bpf-twin/target"), toolchain)?;
    ensure!(
        digest == fingerprint::sha256(&fs::read(&again)?),
        "the build is not reproducible: {} and {} differ",
        built.display(),
        again.display()
    );
    if committed.built_by == toolchain.version {
        ensure!(
            digest == committed.object,
            "{} is not what {} makes of its sources; run cargo xtask build-ebpf",
            fingerprint::OBJECT,
            toolchain.version
        );
    } else {
        eprintln!(
            "the committed object was built by {}, here is {}: bytes not compared",
            committed.built_by, toolchain.version
        );
    }
    Ok(built)
}

/// A compiler with the sources of its core library, and the linker for the BPF target.
pub struct Toolchain {
    rustc: PathBuf,
    /// The folder that holds `library/`.
    sources: PathBuf,
    /// Compiler and linker as they name themselves.
    pub version: String,
}

impl Toolchain {
    /// Debian's, else that of the checkout; with the linker.
    pub fn find() -> Result<Self> {
        let install = "run `cargo xtask setup --what ebpf`";
        let mut found = Self::find_compiler()
            .with_context(|| format!("there is no rustc with its core sources: {install}"))?;
        let linker = host::find_program("bpf-linker")
            .with_context(|| format!("there is no bpf-linker: {install}"))?;
        let linker = host::output(Command::new(linker).arg("--version"))?;
        found.version = format!("{}, {}", found.version, linker.trim());
        ensure!(
            linker.contains(setup::BPF_LINKER),
            "{} is another version than {}: {install}",
            linker.trim(),
            setup::BPF_LINKER
        );
        Ok(found)
    }

    /// The compiler alone: `version` names no linker yet.
    pub fn find_compiler() -> Option<Self> {
        let active = host::output(Command::new("rustc").args(["--print", "sysroot"])).ok();
        let candidates = [
            Some(DEBIAN_RUSTC.into()),
            active.map(|s| PathBuf::from(s.trim()).join("bin/rustc")),
        ];
        candidates
            .into_iter()
            .flatten()
            .find_map(|rustc| Self::of(&rustc))
    }

    fn of(rustc: &Path) -> Option<Self> {
        let sysroot = host::output(Command::new(rustc).args(["--print", "sysroot"])).ok()?;
        let sources = Path::new(sysroot.trim()).join("lib/rustlib/src/rust");
        let version = host::output(Command::new(rustc).arg("--version")).ok()?;
        sources
            .join("library/core/src/lib.rs")
            .is_file()
            .then(|| Self {
                rustc: rustc.to_owned(),
                sources,
                version: version.trim().to_owned(),
            })
    }

    /// Cargo for the BPF target in `root`, with its own target folder.
    ///
    /// RUSTC_BOOTSTRAP: build-std and core_intrinsics are nightly features, used here with a
    /// compiler whose core sources are at hand.
    fn cargo(&self, root: &Path, subcommand: &str, target: &Path) -> Result<Command> {
        let mut command = host::cargo();
        command
            .current_dir(root)
            .arg(subcommand)
            .args(["--release", "--locked", "--package", "gate-ebpf"])
            .args(["-Z", "build-std=core", "--target", TARGET])
            .arg("--target-dir")
            .arg(target)
            .env("RUSTC", &self.rustc)
            .env("RUSTC_BOOTSTRAP", "1")
            .env_remove("RUSTFLAGS")
            .env(
                "CARGO_ENCODED_RUSTFLAGS",
                self.rustflags(root)?.join("\u{1f}"),
            )
            .envs(PROFILE);
        if let Some(home) = host::cargo_home() {
            let path = env::var_os("PATH").unwrap_or_default();
            let folders = env::split_paths(&path).chain([home.join("bin")]);
            command.env("PATH", env::join_paths(folders)?);
        }
        Ok(command)
    }

    /// Code generation, and a fixed name for each folder that differs between machines. The last
    /// matching prefix wins.
    fn rustflags(&self, root: &Path) -> Result<Vec<String>> {
        let mut flags: Vec<String> = ["-Ctarget-cpu=v3", "-Cdebuginfo=2", "-Clink-arg=--btf"]
            .map(String::from)
            .into();
        let mut remap = |from: &Path, to: &str| {
            flags.push(format!("--remap-path-prefix={}={to}", from.display()));
        };
        remap(root, ".");
        if let Some(home) = host::cargo_home() {
            remap(&home, "/cargo");
            // One folder per registry or mirror of it, with a hash in its name.
            for registry in fs::read_dir(home.join("registry/src"))
                .into_iter()
                .flatten()
            {
                remap(&registry?.path(), "/crates");
            }
        }
        remap(&self.sources, "/rust");
        remap(&self.sources.canonicalize()?, "/rust");
        Ok(flags)
    }
}

/// Lints the kernel programs with the clippy of the compiler that builds them.
pub fn clippy(root: &Path, toolchain: &Toolchain) -> Result<()> {
    let beside = |name: &str| toolchain.rustc.with_file_name(name);
    let driver = beside("clippy-driver");
    if !host::is_executable(&driver) {
        bail!(
            "there is no {}: run `cargo xtask setup --what ebpf`",
            driver.display()
        );
    }
    let target = host::target_dir()?.join("bpf");
    let mut command = toolchain.cargo(root, "check", &target)?;
    // What `cargo clippy -- -D warnings` does, with a driver of our choice.
    command
        .env("RUSTC_WORKSPACE_WRAPPER", driver)
        .env("CLIPPY_ARGS", "-Dwarnings__CLIPPY_HACKERY__");
    host::run(&mut command)
}

/// Builds the object of the checkout at `root`; returns its path.
fn build(root: &Path, target: &Path, toolchain: &Toolchain) -> Result<PathBuf> {
    host::run(&mut toolchain.cargo(root, "build", target)?)?;
    let object = target.join(TARGET).join("release/gate.bpf.o");
    fs::copy(object.with_file_name("gate-ebpf"), &object)
        .with_context(|| format!("cargo built no {}", object.display()))?;
    Ok(object)
}

/// Copies what git knows of the checkout, and keeps files that are the same already, so that a
/// repeated build finds its work done.
fn copy_checkout(root: &Path, twin: &Path) -> Result<()> {
    for file in host::checkout_files(root)? {
        let bytes = fs::read(root.join(&file))?;
        let to = twin.join(&file);
        if fs::read(&to).is_ok_and(|there| there == bytes) {
            continue;
        }
        write(&to, &bytes)?;
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}
