//! The program `gate-bench`, started in a folder of its own.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use gate_tests::suite::Stage;
use gate_tests::{binaries, host};
use serde_json::Value;
use tempfile::TempDir;

/// A run that shows nothing but that it works. A disturbed run is not repeated.
pub const QUICK: [&str; 8] = [
    "--rounds",
    "2",
    "--seconds",
    "0.2",
    "--warm-up",
    "0.1",
    "--repeats",
    "0",
];
/// What the report is told to call the commit.
pub const COMMIT: &str = "c0ffee-under-test";
/// Where the bench notes what it has changed on the machine.
const JOURNAL: &str = "/run/gate-bench.json";
/// What the bench says if another one is running.
pub const ANOTHER: &str = "another bench is running as process";
/// No run of these tests takes longer.
const RUN_TIME_MAX: Duration = Duration::from_secs(180);
/// Someone else's bench is over by then.
const OTHERS_END_WITHIN: Duration = Duration::from_secs(120);

/// A folder for reports, and one for what the bench keeps on disk meanwhile.
pub struct Bench {
    folder: TempDir,
}

/// A bench that runs.
pub struct Running {
    child: Child,
    log: PathBuf,
}

/// A bench that has ended.
#[derive(Debug)]
pub struct Ended {
    /// `None`: it was killed.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
    /// The process that it was.
    pub pid: u32,
}

impl Bench {
    pub fn new() -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("gate-tests-").tempdir()?;
        let bench = Self { folder };
        fs::create_dir(bench.scratch())?;
        // PgBouncer reads its files there, and is not root.
        for path in [bench.folder.path(), &bench.scratch()] {
            fs::set_permissions(path, Permissions::from_mode(0o755))?;
        }
        Ok(bench)
    }

    /// A file of the test's own.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Where reports come to.
    pub fn out(&self) -> PathBuf {
        self.path("out")
    }

    fn scratch(&self) -> PathBuf {
        self.path("scratch")
    }

    /// `gate-bench` with these words.
    pub fn command<Word: AsRef<str>>(&self, words: &[Word]) -> Result<Command> {
        let mut command = Command::new(binaries::gate_bench()?);
        command.args(words.iter().map(AsRef::as_ref));
        self.adopt(&mut command);
        Ok(command)
    }

    /// Has what a program keeps on disk come into this folder.
    pub fn adopt(&self, command: &mut Command) {
        command
            .env("TMPDIR", self.scratch())
            .current_dir(self.folder.path())
            .stdin(Stdio::null());
    }

    /// The words of a run of the gate under test.
    pub fn words(&self, words: &[&str]) -> Result<Vec<String>> {
        let gate = binaries::gate()?.display().to_string();
        let more = ["--gate-bin", &gate].map(str::to_owned);
        Ok(self
            .words_without_gate(words)
            .into_iter()
            .chain(more)
            .collect())
    }

    /// The words of a run of some other gate.
    pub fn words_without_gate(&self, words: &[&str]) -> Vec<String> {
        let out = self.out().display().to_string();
        let first = ["run"].iter().chain(words);
        let last = ["--commit", COMMIT, "--out", &out];
        first.chain(&last).map(|word| (*word).to_owned()).collect()
    }

    /// Starts it; nobody else's bench is running then.
    pub fn start<Word: AsRef<str>>(&self, words: &[Word]) -> Result<Running> {
        if words.first().is_some_and(|word| word.as_ref() == "run") {
            wait_for_others()?;
        }
        self.start_at_once(words)
    }

    /// Starts it, whoever else runs.
    pub fn start_at_once<Word: AsRef<str>>(&self, words: &[Word]) -> Result<Running> {
        self.spawn(&mut self.command(words)?)
    }

    /// Starts a program that is a bench in the end.
    pub fn spawn(&self, command: &mut Command) -> Result<Running> {
        let log = self.path("stderr");
        let child = command
            .stdout(File::create(self.path("stdout"))?)
            .stderr(File::create(&log)?)
            .spawn()?;
        Ok(Running { child, log })
    }

    /// Runs it to its end, after whoever else's is over.
    pub fn run<Word: AsRef<str>>(&self, words: &[Word]) -> Result<Ended> {
        let begin = Instant::now();
        loop {
            let ended = self.end(self.start(words)?)?;
            let met = ended.stderr.contains(ANOTHER);
            if !met || begin.elapsed() > OTHERS_END_WITHIN {
                return Ok(ended);
            }
        }
    }

    /// Runs it to its end, which must be a good one that leaves nothing behind.
    pub fn run_well<Word: AsRef<str>>(&self, words: &[Word]) -> Result<Ended> {
        let ended = self.run(words)?;
        ended.expect(0)?;
        self.expect_nothing_left(&[ended.pid])?;
        Ok(ended)
    }

    /// Waits for its end.
    pub fn end(&self, mut running: Running) -> Result<Ended> {
        let status = host::wait_for_exit(&mut running.child, RUN_TIME_MAX)?;
        let read = |name: &str| -> Result<String> {
            let bytes = fs::read(self.path(name))?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        let (stdout, stderr) = (read("stdout")?, read("stderr")?);
        let Some(status) = status else {
            bail!("the bench does not end; it said:\n{stderr}");
        };
        Ok(Ended {
            code: status.code(),
            stdout,
            stderr,
            pid: running.pid(),
        })
    }

    /// report.json.
    pub fn report(&self) -> Result<Value> {
        read_json(&self.out().join("report.json"))
    }

    /// report.txt, with single blanks between words: how it is wrapped is its affair.
    pub fn text(&self) -> Result<String> {
        let text = fs::read_to_string(self.out().join("report.txt"))?;
        Ok(one_line(&text))
    }

    /// Folders, pins, processes and network namespaces are gone.
    pub fn expect_nothing_left(&self, pids: &[u32]) -> Result<()> {
        // A process that was ended is there until the kernel is through with it.
        host::eventually(Duration::from_secs(10), "nothing is left", || {
            let left = self.left(pids)?;
            ensure!(left.is_empty(), "{left:?}");
            Ok(Some(()))
        })
    }

    fn left(&self, pids: &[u32]) -> Result<Vec<String>> {
        let mut left = names_in(&self.scratch());
        left.extend(self.processes()?);
        let of_these = |name: &String| {
            let mut numbers = name.split(|letter: char| !letter.is_ascii_digit());
            name.contains("bench")
                && numbers.any(|number| number.parse().is_ok_and(|number| pids.contains(&number)))
        };
        let pins = host::bpffs_mount().map(|mount| mount.join("gate"));
        for place in pins
            .iter()
            .map(PathBuf::as_path)
            .chain([Path::new("/run/netns")])
        {
            left.extend(names_in(place).into_iter().filter(of_these));
        }
        Ok(left)
    }

    /// Processes that were started for this folder.
    fn processes(&self) -> Result<Vec<String>> {
        let scratch = self.scratch();
        let scratch = scratch.to_str().context("a name of ASCII")?;
        let numbers = names_in(Path::new("/proc"));
        let numbers = numbers.iter().filter(|name| name.parse::<u32>().is_ok());
        let found = numbers.filter_map(|number| {
            let read = |file: &str| {
                let bytes = fs::read(format!("/proc/{number}/{file}")).unwrap_or_default();
                String::from_utf8_lossy(&bytes).replace('\0', " ")
            };
            let line = read("cmdline");
            let of_ours = line.contains(scratch) || read("environ").contains(scratch);
            of_ours.then(|| format!("process {number}: {line}"))
        });
        Ok(found.collect())
    }
}

impl Running {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, number: i32) -> Result<()> {
        Ok(host::signal(self.pid(), number)?)
    }

    /// Waits until it has said so on stderr.
    pub fn wait_for(&mut self, text: &str) -> Result<()> {
        let (log, child) = (&self.log, &mut self.child);
        let begin = Instant::now();
        loop {
            let said = fs::read_to_string(log)?;
            if said.contains(text) {
                return Ok(());
            }
            let ended = child.try_wait()?.is_some();
            ensure!(
                !ended && begin.elapsed() < RUN_TIME_MAX,
                "the bench never said {text:?}:\n{said}"
            );
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            // In order, or the machine's settings stay changed.
            let _ = host::signal(self.child.id(), libc::SIGTERM);
            let _ = host::wait_for_exit(&mut self.child, Duration::from_secs(20));
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Ended {
    /// Its exit code was this one.
    pub fn expect(&self, code: i32) -> Result<()> {
        ensure!(
            self.code == Some(code),
            "exit code {:?} in place of {code}:\n{}",
            self.code,
            self.stderr
        );
        Ok(())
    }

    /// It failed with this code, and said this.
    pub fn expect_complaint(&self, code: i32, fragment: &str) -> Result<()> {
        self.expect(code)?;
        ensure!(
            one_line(&self.stderr).contains(fragment),
            "it did not say {fragment:?}, but:\n{}",
            self.stderr
        );
        Ok(())
    }
}

/// Where PostgreSQL is, for the bench.
pub fn postgres_words(stage: &Stage) -> Result<[String; 6]> {
    let pid = stage.postgres.pid().context("PostgreSQL runs")?;
    let port = stage.postgres.address().port();
    let sockets = stage.postgres.socket_directory();
    let socket = sockets.join(format!(".s.PGSQL.{port}"));
    Ok([
        "--postgres".to_owned(),
        stage.postgres.address().to_string(),
        "--postgres-pid".to_owned(),
        pid.to_string(),
        "--postgres-socket".to_owned(),
        socket.display().to_string(),
    ])
}

/// Until nobody else's bench has changed the machine.
pub fn wait_for_others() -> Result<()> {
    host::eventually_true(OTHERS_END_WITHIN, "no other bench is running", || {
        let Ok(noted) = read_json(Path::new(JOURNAL)) else {
            return Ok(true);
        };
        let name = fs::read_to_string(format!("/proc/{}/comm", noted["pid"]));
        Ok(!name.is_ok_and(|name| name.trim() == "gate-bench"))
    })
}

/// Every run of blanks and line ends as one blank.
pub fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

pub fn read_json(path: &Path) -> Result<Value> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}

/// The elements of a JSON array; none of anything else.
pub fn items(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// Every point of a report.
pub fn points(report: &Value) -> impl Iterator<Item = &Value> {
    items(&report["scenarios"]).flat_map(|scenario| items(&scenario["points"]))
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}
