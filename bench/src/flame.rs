//! Where the cycles go: perf(1) on a proxy, drawn as a flame graph.

use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use inferno::collapse::Collapse as _;
use inferno::collapse::perf::{Folder, Options as FolderOptions};
use inferno::flamegraph::{self, Options};
use rustix::process::{Pid, Signal, kill_process};

/// Samples per second: not a divisor of the timer's ticks, so as not to keep step
/// with them.
const SAMPLES_PER_SECOND: &str = "997";

/// perf on a process; it ends, and what it wrote is gone, when this is dropped.
pub struct Recording {
    perf: Child,
    folder: PathBuf,
}

/// What perf says of its version.
///
/// # Errors
/// It is not installed.
pub fn perf_version() -> Result<String> {
    let output = Command::new("perf").arg("--version").output();
    let output = output.context("a flame graph needs perf: apt-get install linux-perf")?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

impl Recording {
    /// Begins. Samples are taken by a timer: a virtual machine has no counters.
    ///
    /// # Errors
    /// perf is not installed.
    pub fn begin(pid: u32) -> Result<Self> {
        let folder = std::env::temp_dir().join(format!("gate-bench-{}-0-perf", std::process::id()));
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let perf = Command::new("perf")
            .args(["record", "--quiet", "--event", "cpu-clock"])
            .args(["--freq", SAMPLES_PER_SECOND, "--call-graph", "dwarf,8192"])
            .args(["--pid", &pid.to_string(), "--output"])
            .arg(folder.join("perf.data"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(folder.join("perf.log"))?)
            .spawn()
            .context("a flame graph needs perf: apt-get install linux-perf")?;
        Ok(Self { perf, folder })
    }

    /// Ends, and draws what was seen.
    ///
    /// # Errors
    /// perf failed, with what it said, or saw nothing.
    pub fn draw(mut self, title: &str, svg: &Path) -> Result<()> {
        // perf writes its data when it is interrupted.
        kill_process(Pid::from_child(&self.perf), Signal::INT)?;
        self.perf.wait()?;
        let script = self.folder.join("perf.script");
        let ended = Command::new("perf")
            .args(["script", "--no-inline", "--input"])
            .arg(self.folder.join("perf.data"))
            .stdin(Stdio::null())
            .stdout(File::create(&script)?)
            .stderr(Stdio::null())
            .status()?;
        ensure!(
            ended.success(),
            "perf: {}",
            fs::read_to_string(self.folder.join("perf.log")).unwrap_or_default()
        );
        let mut folded = Vec::new();
        Folder::from(FolderOptions::default())
            .collapse(BufReader::new(File::open(&script)?), &mut folded)?;
        let folded = String::from_utf8_lossy(&folded);
        let lines: Vec<&str> = folded.lines().collect();
        if lines.is_empty() {
            bail!("perf saw nothing of it");
        }
        let mut options = Options::default();
        options.title = title.to_owned();
        options.hash = true;
        flamegraph::from_lines(&mut options, lines, File::create(svg)?)?;
        Ok(())
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // After draw() it has ended, and this does nothing.
        if matches!(self.perf.try_wait(), Ok(None)) {
            let _ = self.perf.kill();
            let _ = self.perf.wait();
        }
        if let Err(error) = fs::remove_dir_all(&self.folder) {
            eprintln!(
                "gate-bench: {} is left behind: {error}",
                self.folder.display()
            );
        }
    }
}
