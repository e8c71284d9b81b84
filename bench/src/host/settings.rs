//! Settings of the machine that are other ones during a run, said and put back.
//!
//! What was changed is noted in a file before it is changed, so that even a bench
//! that was killed has its changes put back, by the next one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::report::model::HostChange;

/// Where changes are noted; gone after a reboot, as the changes are.
const JOURNAL: &str = "/run/gate-bench.json";

/// A setting, and what it is to be during the run.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The file that it is read from and written to.
    pub file: PathBuf,
    /// What it is to be.
    pub value: String,
    /// More than that is as good.
    at_least: bool,
    /// Without it there is no run.
    needed: bool,
}

impl Wanted {
    fn new(file: PathBuf, value: &str) -> Self {
        Self {
            file,
            value: value.to_owned(),
            at_least: false,
            needed: false,
        }
    }

    fn sysctl(name: &str, value: &str) -> Self {
        let file = Path::new("/proc/sys").join(name.replace('.', "/"));
        Self::new(file, value)
    }

    fn or_more(self) -> Self {
        Self {
            at_least: true,
            ..self
        }
    }

    fn is_met_by(&self, value: &str) -> bool {
        let number = |text: &str| text.parse::<u64>().ok();
        let more = number(value).zip(number(&self.value));
        value == self.value || (self.at_least && more.is_some_and(|(is, wanted)| is >= wanted))
    }
}

/// What every run wants: as many ports and waiting connections as storms need,
/// and CPUs that do not change their speed.
#[must_use]
pub fn of_every_run(congestion_control: Option<&str>) -> Vec<Wanted> {
    let mut wanted = vec![
        // A port of the client is used for a minute after its connection.
        Wanted::sysctl("net.ipv4.ip_local_port_range", "10000 65535"),
        Wanted::sysctl("net.ipv4.tcp_tw_reuse", "1"),
        // Or closing becomes cheaper once a minute's connections fill the table.
        Wanted::sysctl("net.ipv4.tcp_max_tw_buckets", "1048576").or_more(),
        Wanted::sysctl("net.core.somaxconn", "8192").or_more(),
        Wanted::sysctl("net.ipv4.tcp_max_syn_backlog", "8192").or_more(),
    ];
    if let Some(name) = congestion_control {
        wanted.push(Wanted {
            needed: true,
            ..Wanted::sysctl("net.ipv4.tcp_congestion_control", name)
        });
    }
    let governors = (0..).map(|cpu| {
        PathBuf::from(format!(
            "/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor"
        ))
    });
    wanted.extend(
        governors
            .take_while(|file| file.exists())
            .map(|file| Wanted::new(file, "performance")),
    );
    wanted
}

/// Settings that were changed; put back when dropped.
pub struct Changed {
    journal: PathBuf,
    notes: Vec<Note>,
}

/// One change, as it is noted.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Note {
    file: PathBuf,
    before: String,
    during: String,
}

/// What is noted of a run.
#[derive(Debug, Serialize, Deserialize)]
struct Journal {
    pid: u32,
    notes: Vec<Note>,
}

impl Changed {
    /// Changes what is not as wanted yet, and says so on stderr. Without the
    /// rights to, everything stays as it is, and that is said.
    ///
    /// # Errors
    /// Another bench is running, or a value is not accepted.
    pub fn make(wanted: Vec<Wanted>) -> Result<Self> {
        Self::make_noting(wanted, Path::new(JOURNAL))
    }

    fn make_noting(wanted: Vec<Wanted>, journal: &Path) -> Result<Self> {
        put_back_of_the_dead(journal)?;
        let mut notes = Vec::new();
        for wanted in &wanted {
            let file = wanted.file.clone();
            let before = read(&file).with_context(|| file.display().to_string())?;
            if !wanted.is_met_by(&before) {
                let during = wanted.value.clone();
                let note = Note {
                    file,
                    before,
                    during,
                };
                notes.push((note, wanted.needed));
            }
        }
        // Also of no changes: a second bench is to find the first one.
        let noted = Journal {
            pid: std::process::id(),
            notes: notes.iter().map(|(note, _)| note.clone()).collect(),
        };
        let written = write_new(journal, &serde_json::to_vec(&noted)?);
        let may_not = written.as_ref().err().map(io::Error::kind);
        if may_not != Some(io::ErrorKind::PermissionDenied) {
            written.with_context(|| format!("cannot write {}", journal.display()))?;
        }
        // From here on the journal, if there is one, is ours to remove.
        let mut changed = Self {
            journal: journal.to_owned(),
            notes: Vec::new(),
        };
        for (note, needed) in notes {
            // Never without a note of it.
            let done = match may_not {
                None => fs::write(&note.file, &note.during),
                Some(kind) => Err(kind.into()),
            };
            match done {
                Ok(()) => {
                    eprintln!("host: {} (put back at the end)", note.line());
                    changed.notes.push(note);
                }
                Err(error) if needed => {
                    return Err(error).with_context(|| {
                        format!("{} cannot be set: as root, to what there is", note.line())
                    });
                }
                Err(error) => eprintln!("host: {} stays as it is: {error}", note.line()),
            }
        }
        Ok(changed)
    }

    /// As the report has it.
    #[must_use]
    pub fn report(&self) -> Vec<HostChange> {
        let change = |note: &Note| HostChange {
            setting: note.name(),
            before: note.before.clone(),
            during: note.during.clone(),
        };
        self.notes.iter().map(change).collect()
    }
}

impl Drop for Changed {
    fn drop(&mut self) {
        let notes = std::mem::take(&mut self.notes);
        if !notes.is_empty() {
            put_back(&notes);
            eprintln!("host: {} settings are as before again", notes.len());
        }
        remove(&self.journal);
    }
}

fn put_back_of_the_dead(journal: &Path) -> Result<()> {
    let text = match fs::read(journal) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).context(journal.display().to_string()),
    };
    // Killed while writing it: then nothing was changed yet.
    let Ok(noted) = serde_json::from_slice::<Journal>(&text) else {
        remove(journal);
        return Ok(());
    };
    let name = fs::read_to_string(format!("/proc/{}/comm", noted.pid));
    let ours = fs::read_to_string("/proc/self/comm")?;
    anyhow::ensure!(
        name.ok() != Some(ours),
        "another bench is running as process {}: two at once would measure each other",
        noted.pid
    );
    eprintln!("host: putting back what a bench that was killed has changed");
    put_back(&noted.notes);
    remove(journal);
    anyhow::ensure!(
        !journal.exists(),
        "a bench that was killed has left changes: run one as root to put them back"
    );
    Ok(())
}

/// Two benches that begin at the same moment must not both go on.
fn write_new(file: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::io::Write as _;
    fs::File::create_new(file)?.write_all(bytes)
}

/// What somebody else has changed since is theirs.
fn put_back(notes: &[Note]) {
    for note in notes.iter().rev() {
        match read(&note.file) {
            Ok(now) if now == note.during => {
                if let Err(error) = fs::write(&note.file, &note.before) {
                    eprintln!("host: {} stays {}: {error}", note.name(), note.during);
                }
            }
            Ok(now) => eprintln!("host: {} is {now} by now and stays so", note.name()),
            Err(error) => eprintln!("host: {}: {error}", note.name()),
        }
    }
}

fn remove(journal: &Path) {
    if let Err(error) = fs::remove_file(journal)
        && error.kind() != io::ErrorKind::NotFound
    {
        eprintln!("host: {} is left behind: {error}", journal.display());
    }
}

/// Words are separated by tabs in some of them.
fn read(file: &Path) -> io::Result<String> {
    let text = fs::read_to_string(file)?;
    Ok(text.split_ascii_whitespace().collect::<Vec<_>>().join(" "))
}

impl Note {
    fn name(&self) -> String {
        match self.file.strip_prefix("/proc/sys") {
            Ok(name) => name.to_string_lossy().replace('/', "."),
            Err(_) => self.file.display().to_string(),
        }
    }

    fn line(&self) -> String {
        format!("{}: {} -> {}", self.name(), self.before, self.during)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new() -> Self {
            let machine = Self(tempfile::tempdir().unwrap());
            fs::write(machine.file(), "32768\t60999\n").unwrap();
            machine
        }

        fn file(&self) -> PathBuf {
            self.0.path().join("ports")
        }

        fn journal(&self) -> PathBuf {
            self.0.path().join("journal")
        }

        fn change(&self) -> Result<Changed> {
            let wanted = Wanted::new(self.file(), "1 2");
            Changed::make_noting(vec![wanted], &self.journal())
        }

        fn now(&self) -> String {
            read(&self.file()).unwrap()
        }
    }

    #[test]
    fn a_change_is_reported_and_put_back() {
        let machine = Machine::new();
        let changed = machine.change().unwrap();
        assert_eq!(machine.now(), "1 2");
        assert_eq!(changed.report()[0].before, "32768 60999");
        drop(changed);
        assert_eq!(machine.now(), "32768 60999");
        assert!(!machine.journal().exists());
    }

    #[test]
    fn a_killed_run_is_put_back_by_the_next() {
        let machine = Machine::new();
        std::mem::forget(machine.change().unwrap());
        assert!(machine.change().is_err(), "the first one is alive");
        let journal = fs::read_to_string(machine.journal()).unwrap();
        // No process has this number (`PID_MAX_LIMIT`, include/linux/threads.h).
        let dead = journal.replace(&std::process::id().to_string(), "4194305");
        fs::write(machine.journal(), dead).unwrap();
        let again = machine.change().unwrap();
        assert_eq!(again.report()[0].before, "32768 60999");
        drop(again);
        assert_eq!(machine.now(), "32768 60999");
    }

    #[test]
    fn a_second_bench_is_refused_where_nothing_is_changed() {
        let machine = Machine::new();
        fs::write(machine.file(), "1 2").unwrap();
        let first = machine.change().unwrap();
        assert!(first.report().is_empty());
        assert!(machine.change().is_err(), "the first one is alive");
        drop(first);
        assert!(machine.change().is_ok());
        assert!(!machine.journal().exists());
    }

    #[test]
    fn what_others_changed_since_stays() {
        let machine = Machine::new();
        let changed = machine.change().unwrap();
        fs::write(machine.file(), "7 8").unwrap();
        drop(changed);
        assert_eq!(machine.now(), "7 8");
    }

    #[test]
    fn more_than_wanted_is_left_alone() {
        let wanted = Wanted::new(PathBuf::new(), "8192").or_more();
        assert!(wanted.is_met_by("8192") && wanted.is_met_by("65535"));
        assert!(!wanted.is_met_by("4096") && !wanted.is_met_by("x"));
        assert!(!Wanted::new(PathBuf::new(), "1").is_met_by("2"));
    }

    #[test]
    fn what_cannot_be_set_stays_unless_it_was_asked_for() {
        let machine = Machine::new();
        let missing = |needed| Wanted {
            needed,
            // A value that the kernel refuses.
            ..Wanted::sysctl("net.ipv4.tcp_congestion_control", "no-such")
        };
        let make = |needed| Changed::make_noting(vec![missing(needed)], &machine.journal());
        let changed = make(false).unwrap();
        assert!(changed.report().is_empty());
        drop(changed);
        let error = make(true).map(drop).unwrap_err();
        assert!(format!("{error:#}").contains("cannot be set"), "{error:#}");
        assert!(!machine.journal().exists());
    }
}
