//! Where the reports lie: one folder for each run under `target/bench`, `latest` leading to the
//! newest, and a lock, because two measurements at once measure each other.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};

use crate::host;

/// The folder of one run. Empty ones are removed.
#[derive(Debug)]
pub struct Output {
    /// Its path.
    pub folder: PathBuf,
    alone: File,
}

impl Output {
    /// Makes the folder of a run that begins now.
    pub fn new() -> Result<Self> {
        Self::within(&base()?, SystemTime::now())
    }

    fn within(base: &Path, now: SystemTime) -> Result<Self> {
        fs::create_dir_all(base).with_context(|| format!("cannot make {}", base.display()))?;
        let alone = lock(base)?;
        let folder = new_folder(base, &name(now))?;
        Ok(Self { folder, alone })
    }

    /// Has `latest` lead here, if there is anything to be seen.
    pub fn keep(&self) -> Result<()> {
        if self.folder.read_dir()?.next().is_none() {
            return Ok(());
        }
        let (Some(base), Some(name)) = (self.folder.parent(), self.folder.file_name()) else {
            return Ok(());
        };
        if fs::read_link(base.join("latest")).is_ok_and(|kept| kept == Path::new(name)) {
            return Ok(());
        }
        // A rename replaces the old link in one step.
        let new = base.join("latest.new");
        match fs::remove_file(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
        symlink(name, &new)?;
        fs::rename(&new, base.join("latest")).context("cannot renew target/bench/latest")?;
        eprintln!("bench: the reports are in {}", host::shown(&self.folder));
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // Fails on purpose if there is anything in it.
        let _ = fs::remove_dir(&self.folder);
        // Said, not left to closing: a child that another thread forks at this moment has the
        // file open, too, until it becomes another program, and would hold the lock (flock(2)).
        let _ = self.alone.unlock();
    }
}

/// `target/bench`.
pub fn base() -> Result<PathBuf> {
    Ok(host::target_dir()?.join("bench"))
}

fn lock(base: &Path) -> Result<File> {
    let path = base.join("lock");
    let file = File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!(
            "another `cargo xtask bench` runs in this target folder, and two would measure each \
             other: wait for its end"
        ),
        Err(TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("cannot lock {}", path.display()))
        }
    }
}

/// Two runs may begin in one second; each has a folder of its own.
fn new_folder(base: &Path, name: &str) -> Result<PathBuf> {
    let mut folder = base.join(name);
    for number in 2.. {
        match fs::create_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                folder = base.join(format!("{name}-{number}"));
            }
            result => {
                result.with_context(|| format!("cannot make {}", folder.display()))?;
                break;
            }
        }
    }
    Ok(folder)
}

/// UTC, without the colons that some file systems and shells dislike: `2026-11-30T141530Z`.
fn name(now: SystemTime) -> String {
    let time = humantime::format_rfc3339_seconds(now).to_string();
    time.replace(':', "")
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::scratch::Scratch;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn folders_are_named_by_utc_time() {
        assert_eq!(name(at(1_796_048_130)), "2026-11-30T141530Z");
    }

    #[test]
    fn latest_leads_to_the_newest_run_with_content_and_runs_are_alone() {
        let scratch = Scratch::new("test-output").unwrap();
        let base = &scratch.path;
        let first = Output::within(base, at(0)).unwrap();
        fs::write(first.folder.join("report.txt"), "x").unwrap();
        first.keep().unwrap();
        let refused = Output::within(base, at(1)).unwrap_err();
        assert!(refused.to_string().contains("another"), "{refused:#}");
        drop(first);
        assert!(base.join("latest/report.txt").is_file());

        let empty = Output::within(base, at(2)).unwrap();
        empty.keep().unwrap();
        let folder = empty.folder.clone();
        drop(empty);
        assert!(!folder.exists(), "empty folders go");
        assert!(base.join("latest/report.txt").is_file());

        let second = Output::within(base, at(0)).unwrap();
        assert!(second.folder.ends_with("1970-01-01T000000Z-2"));
        fs::write(second.folder.join("other.txt"), "x").unwrap();
        second.keep().unwrap();
        assert!(base.join("latest/other.txt").is_file());
    }
}
