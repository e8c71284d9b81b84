//! CPU time and run-queue delay of processes and of our own threads.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::{AddAssign, Sub};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// What tasks have used so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// On a CPU, user and system. Work that the kernel does in interrupts while
    /// a task runs counts as the task's (no `IRQ_TIME_ACCOUNTING`).
    pub cpu: Duration,
    /// Ready to run, but without a CPU.
    pub delay: Duration,
}

impl AddAssign for Used {
    fn add_assign(&mut self, other: Self) {
        self.cpu += other.cpu;
        self.delay += other.delay;
    }
}

impl Sub for Used {
    type Output = Self;

    /// A thread that ended takes its delay with it, hence the zero at least.
    fn sub(self, earlier: Self) -> Self {
        Self {
            cpu: self.cpu.saturating_sub(earlier.cpu),
            delay: self.delay.saturating_sub(earlier.delay),
        }
    }
}

/// Of a process and all its descendants. Of those that ended, CPU time counts
/// once their parent, if that is the process itself, has waited for them; of
/// threads that ended, CPU time counts and delay does not.
///
/// # Errors
/// The process is gone, or `/proc` has another form than proc(5).
pub fn of_tree(root: u32) -> Result<Used> {
    let mut used = Used {
        cpu: of_waited_for_children(root)?,
        delay: Duration::ZERO,
    };
    for pid in tree(root)? {
        match of_process(pid) {
            Ok(one) => used += one,
            Err(error) if pid == root => return Err(error),
            // It ended since it was listed.
            Err(_) => {}
        }
    }
    Ok(used)
}

/// Of our own threads whose name begins with `prefix`.
///
/// # Errors
/// `/proc` is not readable.
pub fn of_own_threads(prefix: &str) -> Result<Used> {
    let mut used = Used::default();
    for task in fs::read_dir("/proc/self/task")? {
        let task = task?.path();
        let Ok(name) = fs::read_to_string(task.join("comm")) else {
            continue;
        };
        if name.starts_with(prefix)
            && let Ok(text) = fs::read_to_string(task.join("schedstat"))
        {
            used += schedstat(&text).context("schedstat has another form than expected")?;
        }
    }
    Ok(used)
}

/// Of every process whose name begins with `prefix`.
///
/// # Errors
/// `/proc` is not readable.
pub fn of_named(prefix: &str) -> Result<Used> {
    let mut used = Used::default();
    for entry in fs::read_dir("/proc")? {
        let process = entry?.path();
        let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
        if name.starts_with(prefix)
            && let Ok(text) = fs::read_to_string(process.join("schedstat"))
        {
            used += schedstat(&text).context("schedstat has another form than expected")?;
        }
    }
    Ok(used)
}

/// The process and its descendants.
///
/// # Errors
/// `/proc` is not readable.
pub fn tree(root: u32) -> Result<BTreeSet<u32>> {
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for entry in fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        if let Some(parent) = stat_field(pid, PARENT) {
            children
                .entry(u32::try_from(parent)?)
                .or_default()
                .push(pid);
        }
    }
    let mut found = BTreeSet::new();
    let mut next = vec![root];
    while let Some(pid) = next.pop() {
        if found.insert(pid) {
            next.extend(children.get(&pid).into_iter().flatten());
        }
    }
    Ok(found)
}

fn of_process(pid: u32) -> Result<Used> {
    let mut used = Used {
        cpu: cpu_clock(pid)?,
        delay: Duration::ZERO,
    };
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let Ok(text) = fs::read_to_string(task?.path().join("schedstat")) else {
            continue;
        };
        used.delay += schedstat(&text).map_or(Duration::ZERO, |used| used.delay);
    }
    Ok(used)
}

/// CPU time of a process, its ended threads too, exact to the nanosecond.
fn cpu_clock(pid: u32) -> Result<Duration> {
    let mut clock: libc::clockid_t = 0;
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let pid_of_c = libc::pid_t::try_from(pid)?;
    // SAFETY: both write into the variable of ours that they are given, nothing else.
    let failed = unsafe {
        libc::clock_getcpuclockid(pid_of_c, &raw mut clock) != 0
            || libc::clock_gettime(clock, &raw mut time) != 0
    };
    if failed {
        bail!("process {pid} is gone");
    }
    Ok(Duration::new(
        u64::try_from(time.tv_sec)?,
        u32::try_from(time.tv_nsec)?,
    ))
}

/// Fields of `/proc/PID/stat` after the name, from 0: proc(5) counts from 1 and
/// has two before.
const PARENT: usize = 1;
const CHILDREN_USER: usize = 13;
const CHILDREN_SYSTEM: usize = 14;

/// CPU time of children that a process has waited for, exact to 10 ms.
///
/// # Errors
/// The process is gone.
pub fn of_waited_for_children(pid: u32) -> Result<Duration> {
    let gone = || format!("process {pid} is gone");
    let user = stat_field(pid, CHILDREN_USER).with_context(gone)?;
    let system = stat_field(pid, CHILDREN_SYSTEM).with_context(gone)?;
    let per_second = rustix::param::clock_ticks_per_second();
    Ok(Duration::from_secs_f64(
        (user + system) as f64 / per_second as f64,
    ))
}

fn stat_field(pid: u32, field: usize) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    after_name(&stat)?.nth(field)?.parse().ok()
}

/// The command's name may itself hold blanks and brackets.
fn after_name(stat: &str) -> Option<impl Iterator<Item = &str>> {
    let (_, fields) = stat.rsplit_once(')')?;
    Some(fields.split_ascii_whitespace())
}

/// `<on a CPU, ns> <waiting for one, ns> <slices>`, Documentation/scheduler/sched-stats.rst.
fn schedstat(text: &str) -> Option<Used> {
    let mut numbers = text.split_ascii_whitespace().map(str::parse);
    Some(Used {
        cpu: Duration::from_nanos(numbers.next()?.ok()?),
        delay: Duration::from_nanos(numbers.next()?.ok()?),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn the_name_may_look_like_fields() {
        let stat = "42 (a) S 9 (b) R 7 2 3 4 5 6 7 8 9 10 70 8 30 40 20";
        let field = |field| after_name(stat).unwrap().nth(field).unwrap();
        assert_eq!(field(PARENT), "7");
        assert_eq!(field(CHILDREN_USER), "30");
        assert_eq!(field(CHILDREN_SYSTEM), "40");
    }

    #[test]
    fn a_thread_has_used_what_it_burned() {
        let burned = Duration::from_millis(30);
        let thread = std::thread::Builder::new().name("burner-7".into());
        let thread = thread.spawn(move || {
            while of_own_threads("burner-").unwrap().cpu < burned {
                std::hint::spin_loop();
            }
            of_own_threads("burner-").unwrap()
        });
        let used = thread.unwrap().join().unwrap();
        assert!(used.cpu >= burned && used.cpu < burned * 20, "{used:?}");
        // A thread is listed for a moment longer than its end is waited for.
        let begin = Instant::now();
        while of_own_threads("burner-").unwrap() != Used::default() {
            assert!(
                begin.elapsed() < Duration::from_secs(1),
                "it is still there"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_tree_has_the_children_in_it() {
        let us = std::process::id();
        let before = of_tree(us).unwrap();
        let child = std::process::Command::new("sh")
            .args([
                "-c",
                "i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done; read stop",
            ])
            .stdin(std::process::Stdio::piped())
            .spawn();
        let mut child = child.unwrap();
        let burned = Duration::from_millis(5);
        while (of_process(child.id()).unwrap()).cpu < burned {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(tree(us).unwrap().contains(&child.id()));
        assert!((of_tree(us).unwrap() - before).cpu >= burned);
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(of_tree(child.id()).is_err());
    }
}
