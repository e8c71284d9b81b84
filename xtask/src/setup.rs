//! `cargo xtask setup`: what a Debian machine needs besides cargo, and why.

use std::env;
use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::{bpf, host};

/// The version of bpf-linker that the committed object is built with.
pub const BPF_LINKER: &str = "0.13.0";

/// Where Debian's llvm-22-dev puts LLVM.
const LLVM_PREFIX: &str = "/usr/lib/llvm-22";

/// Read by the install script of Debian's postgresql-15: no cluster of the system's own.
const CREATECLUSTER_DIR: &str = "/etc/postgresql-common/createcluster.d";
const NO_CLUSTER_CONF: &str = "/etc/postgresql-common/createcluster.d/gate-setup.conf";

/// Asked by Debian's install scripts before they start a service; 101 is no.
const POLICY: &str = "/usr/sbin/policy-rc.d";

#[derive(clap::Args)]
#[command(
    after_help = "Installs by apt-get and cargo what is missing, and says what and why.\n\
Without root it asks sudo; without sudo it prints the commands to run.\n\n  \
tests: a PostgreSQL server with psql and pgbench; no cluster is created or started\n  \
ebpf:  rustc-web, rust-web-src, rust-web-clippy, llvm-22-dev and bpf-linker, to build and\n         \
lint the kernel object. Only needed by those who change it: a build embeds the committed one\n  \
bench: HAProxy, PgBouncer and nginx, which gate is compared to, valgrind and perf; of those\n         \
that this installs, no service is started, now or at boot"
)]
pub struct Args {
    /// What to prepare for
    #[arg(long, value_enum, default_value_t = What::All)]
    pub what: What,
}

/// Packages of the bench with a service of their name.
const SERVICES: [&str; 3] = ["haproxy", "pgbouncer", "nginx"];

/// What a machine is prepared for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum What {
    /// A PostgreSQL to test against
    Tests,
    /// The tool chain of the kernel object
    Ebpf,
    /// The peers and the tools of the bench
    Bench,
    /// All of them
    All,
}

/// Runs the task.
pub fn main(args: &Args) -> Result<ExitCode> {
    install(args.what)?;
    Ok(ExitCode::SUCCESS)
}

/// Installs what is missing. What is there already costs no network and no rights.
pub fn install(what: What) -> Result<()> {
    if matches!(what, What::Tests | What::All) {
        install_postgresql()?;
    }
    if matches!(what, What::Ebpf | What::All) {
        install_bpf_packages()?;
        install_bpf_linker()?;
    }
    if matches!(what, What::Bench | What::All) {
        install_bench_packages()?;
    }
    Ok(())
}

/// The folder of a PostgreSQL server's programs: the newest of Debian's layout, else PATH.
pub fn postgresql_bin() -> Option<PathBuf> {
    let complete = |folder: &Path| {
        ["initdb", "postgres", "psql"]
            .iter()
            .all(|program| host::is_executable(&folder.join(program)))
    };
    let mut versions: Vec<(u32, PathBuf)> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let version = entry.file_name().to_str()?.parse().ok()?;
            Some((version, entry.path().join("bin")))
        })
        .filter(|(_, folder)| complete(folder))
        .collect();
    versions.sort();
    let path = env::var_os("PATH").unwrap_or_default();
    versions
        .pop()
        .map(|(_, folder)| folder)
        .or_else(|| env::split_paths(&path).find(|folder| complete(folder)))
}

fn install_postgresql() -> Result<()> {
    if let Some(folder) = postgresql_bin() {
        eprintln!("setup: PostgreSQL is in {}", folder.display());
        return Ok(());
    }
    eprintln!("setup: postgresql-15, because the tests run gate in front of a real server");
    let mut root = AsRoot::new();
    // Gone again after the installation, so that the machine's own habits stay as they are.
    root.push(format!(
        "trap 'rm -f {NO_CLUSTER_CONF}; rmdir --ignore-fail-on-non-empty {CREATECLUSTER_DIR}' EXIT"
    ));
    root.push(format!("mkdir -p {CREATECLUSTER_DIR}"));
    root.push(format!(
        "echo 'create_main_cluster = false' > {NO_CLUSTER_CONF}"
    ));
    root.apt_install(&["postgresql-15"]);
    root.run()
}

fn install_bpf_packages() -> Result<()> {
    if let Some(toolchain) = bpf::Toolchain::find_compiler() {
        eprintln!(
            "setup: the kernel object can be built by {}",
            toolchain.version
        );
        return Ok(());
    }
    let packages = [
        (
            "rustc-web",
            "/usr/bin/rustc",
            "a rustc whose core sources Debian ships",
        ),
        (
            "rust-web-src",
            bpf::DEBIAN_CORE,
            "core, built for the BPF target",
        ),
        (
            "rust-web-clippy",
            "/usr/bin/clippy-driver",
            "lints of the kernel programs",
        ),
        (
            "llvm-22-dev",
            "/usr/lib/llvm-22/bin/llvm-config",
            "the LLVM that bpf-linker links with",
        ),
    ];
    let mut root = AsRoot::new();
    root.apt_install(&missing(&packages));
    root.run()
}

fn install_bench_packages() -> Result<()> {
    let packages = [
        ("haproxy", "/usr/sbin/haproxy", "a peer of the bench"),
        ("pgbouncer", "/usr/sbin/pgbouncer", "a peer of the bench"),
        ("nginx", "/usr/sbin/nginx", "a peer of the bench"),
        (
            "libnginx-mod-stream",
            "/usr/lib/nginx/modules/ngx_stream_module.so",
            "nginx's TCP proxy",
        ),
        (
            "valgrind",
            "/usr/bin/valgrind",
            "counts instructions of the hot functions",
        ),
        ("linux-perf", "/usr/bin/perf", "flame graphs"),
    ];
    let missing = missing(&packages);
    if missing.is_empty() {
        eprintln!("setup: the bench's peers and tools are there");
        return Ok(());
    }
    let mut root = AsRoot::new();
    for line in no_service_lines(POLICY) {
        root.push(line);
    }
    root.apt_install(&missing);
    let services = services_of(&missing);
    if !services.is_empty() {
        eprintln!("setup: no service is started, now or at boot: {services}");
        root.push(not_at_boot(&services));
    }
    root.run()
}

/// Services that these packages bring along, by blanks.
fn services_of(packages: &[&str]) -> String {
    let services = packages.iter().filter(|name| SERVICES.contains(name));
    services.copied().collect::<Vec<_>>().join(" ")
}

/// Debian enables what it installs, whatever [`POLICY`] says of starting it. What is installed is
/// of use even if this fails.
fn not_at_boot(services: &str) -> String {
    format!(
        "! command -v systemctl > /dev/null || systemctl disable {services} \
         || echo 'setup: at boot these may start: {services}' >&2"
    )
}

/// Those packages whose file is not there; says why each is needed.
fn missing<'a>(packages: &[(&'a str, &str, &str)]) -> Vec<&'a str> {
    let mut names = Vec::new();
    for (package, file, why) in packages {
        if !Path::new(file).exists() {
            eprintln!("setup: {package}: {why}");
            names.push(*package);
        }
    }
    names
}

fn install_bpf_linker() -> Result<()> {
    let found = host::find_program("bpf-linker")
        .and_then(|linker| host::output(Command::new(linker).arg("--version")).ok());
    if let Some(version) = found.filter(|version| version.contains(BPF_LINKER)) {
        eprintln!("setup: {} is there", version.trim());
        return Ok(());
    }
    eprintln!("setup: bpf-linker {BPF_LINKER}: links the kernel programs into one BPF object");
    host::run(
        host::cargo()
            .env("LLVM_PREFIX", LLVM_PREFIX)
            .args(["install", "bpf-linker", "--locked", "--version", BPF_LINKER])
            .args(["--no-default-features", "--features", "llvm-22", "--force"]),
    )
    .context("the kernel object cannot be built without bpf-linker")
}

/// Until these lines and those behind them are through, no installation starts a
/// service: a PgBouncer of the system would take port 6432, gate's by default.
fn no_service_lines(policy: &str) -> [String; 6] {
    [
        // Ours, from a run that was cut off.
        format!("! grep -qs gate-setup {policy} || rm {policy}"),
        format!("[ ! -e {policy} ] || mv {policy} {policy}.gate-setup"),
        format!(
            "trap 'rm -f {policy}; [ ! -e {policy}.gate-setup ] || mv {policy}.gate-setup {policy}' EXIT"
        ),
        // dash does not heed the line above when a signal ends it.
        "trap 'exit 130' INT TERM HUP".to_owned(),
        format!("printf '#!/bin/sh\\n# gate-setup\\nexit 101\\n' > {policy}"),
        format!("chmod 755 {policy}"),
    ]
}

/// Shell lines that need root, run together so that sudo asks once.
struct AsRoot {
    lines: Vec<String>,
}

impl AsRoot {
    fn new() -> Self {
        Self { lines: Vec::new() }
    }

    fn push(&mut self, line: String) {
        self.lines.push(line);
    }

    /// Fresh machines have no package lists, so they are fetched before anything is installed.
    fn apt_install(&mut self, packages: &[&str]) {
        self.push("apt-get update".to_owned());
        self.push(format!(
            "DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends {}",
            packages.join(" ")
        ));
    }

    fn run(&self) -> Result<()> {
        let by_hand = format!("run this as root:\n\n  {}\n", self.lines.join("\n  "));
        ensure!(
            host::find_program("apt-get").is_some(),
            "this machine has no apt-get; do what amounts to this on Debian: {by_hand}"
        );
        let mut command = if host::is_root() {
            Command::new("sh")
        } else {
            let Some(mut sudo) = sudo() else {
                bail!("setup needs root, and there is no sudo that would help; {by_hand}");
            };
            sudo.arg("sh");
            sudo
        };
        for line in &self.lines {
            eprintln!("+ {line}");
        }
        let status = command
            .args(["-e", "-c", &self.lines.join("\n")])
            .stdin(Stdio::null())
            .status()
            .with_context(|| format!("cannot start the installation; {by_hand}"))?;
        ensure!(
            status.success(),
            "the installation failed ({status}); {by_hand}"
        );
        Ok(())
    }
}

/// sudo, if it is there and either needs no password or can ask for one.
pub fn sudo() -> Option<Command> {
    let sudo = host::find_program("sudo")?;
    let silent = || {
        Command::new(&sudo)
            .args(["-n", "true"])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    let asked = || {
        std::io::stdin().is_terminal()
            && Command::new(&sudo)
                .arg("-v")
                .status()
                .is_ok_and(|status| status.success())
    };
    (silent() || asked()).then(|| Command::new(&sudo))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// What the policy file is while the lines are in force, and afterwards.
    fn policy(before: Option<&str>, then: &str) -> (String, Option<String>) {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("policy-rc.d");
        if let Some(before) = before {
            fs::write(&file, before).unwrap();
        }
        let mut lines = no_service_lines(file.to_str().unwrap()).to_vec();
        lines.push(format!("{} || echo $?", file.display()));
        lines.push(then.to_owned());
        let script = lines.join("\n");
        let output = Command::new("sh").args(["-e", "-c", &script]).output();
        let output = output.unwrap();
        let answer = String::from_utf8(output.stdout).unwrap();
        let others = fs::read_dir(folder.path()).unwrap().flatten();
        let others = others.filter(|entry| entry.path() != file).count();
        assert_eq!(others, 0, "a copy is left");
        (answer, fs::read_to_string(&file).ok())
    }

    #[test]
    fn only_services_just_installed_are_kept_from_boot() {
        assert_eq!(
            services_of(&["haproxy", "valgrind", "nginx"]),
            "haproxy nginx"
        );
        assert_eq!(services_of(&["libnginx-mod-stream", "linux-perf"]), "");

        let folder = tempfile::tempdir().unwrap();
        let run = || {
            let mut sh = Command::new("/bin/sh");
            sh.args(["-e", "-c", &not_at_boot("haproxy nginx")]);
            sh.env("PATH", folder.path()).output().unwrap()
        };
        assert!(run().status.success(), "there is no systemctl");
        let systemctl = folder.path().join("systemctl");
        for (code, complaint) in [
            (0, ""),
            (1, "setup: at boot these may start: haproxy nginx\n"),
        ] {
            fs::write(&systemctl, format!("#!/bin/sh\necho \"$*\"; exit {code}")).unwrap();
            fs::set_permissions(&systemctl, fs::Permissions::from_mode(0o755)).unwrap();
            let output = run();
            assert_eq!(output.stdout, b"disable haproxy nginx\n");
            assert_eq!(String::from_utf8(output.stderr).unwrap(), complaint);
            assert!(output.status.success(), "{}", output.status);
        }
    }

    #[test]
    fn services_are_forbidden_and_the_old_policy_comes_back() {
        let theirs = "#!/bin/sh\nexit 0\n";
        let ours = "#!/bin/sh\n# gate-setup\nexit 101\n";
        for then in ["true", "false", "kill -TERM $$; sleep 9"] {
            for (before, after) in [
                (None, None),
                (Some(theirs), Some(theirs)),
                (Some(ours), None),
            ] {
                let (answer, left) = policy(before, then);
                assert_eq!(answer, "101\n", "{before:?}, {then}");
                assert_eq!(left.as_deref(), after, "{before:?}, {then}");
            }
        }
    }
}
