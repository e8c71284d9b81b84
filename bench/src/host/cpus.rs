//! CPUs, and who is bound to which.

use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use rustix::thread::{CpuSet, sched_getaffinity};

use crate::report::model::Placement;

/// A list of CPUs: `0,2-3`; `all` binds to none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList(pub Vec<usize>);

impl FromStr for CpuList {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        if text == "all" {
            return Ok(Self(Vec::new()));
        }
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let number = |text: &str| -> Result<usize> {
                let number = text.trim().parse();
                let number = number
                    .with_context(|| format!("`{part}` is no CPU; a list is `0,2-3` or `all`"))?;
                ensure!(number < CpuSet::MAX_CPU, "there is no CPU {number}");
                Ok(number)
            };
            match part.split_once('-') {
                None => cpus.push(number(part)?),
                Some((from, to)) => {
                    let (from, to) = (number(from)?, number(to)?);
                    ensure!(from <= to, "`{part}` is empty");
                    cpus.extend(from..=to);
                }
            }
        }
        cpus.sort_unstable();
        ensure!(
            cpus.windows(2).all(|pair| pair[0] != pair[1]),
            "`{text}` lists a CPU twice"
        );
        Ok(Self(cpus))
    }
}

/// The CPUs that this process may use.
///
/// # Errors
/// Never, as things are.
pub fn allowed() -> Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|cpu| set.is_set(*cpu))
        .collect())
}

/// Who is bound to which: as asked for, else half of the cores to the proxies and
/// half to load and backend. With one CPU nobody is bound.
///
/// # Errors
/// A CPU is not ours to use.
pub fn place(gate: Option<&CpuList>, load: Option<&CpuList>) -> Result<Placement> {
    let allowed = allowed()?;
    for cpu in [gate, load].into_iter().flatten().flat_map(|list| &list.0) {
        if !allowed.contains(cpu) {
            bail!("CPU {cpu} is not one of those that this process may use: {allowed:?}");
        }
    }
    let cores = cores(&allowed, &siblings);
    let others = |than: &CpuList| -> Vec<usize> {
        // Nobody is bound where the other side is bound to nothing.
        let free = allowed.iter().filter(|cpu| !than.0.contains(cpu));
        free.copied().filter(|_| !than.0.is_empty()).collect()
    };
    let (gate_cpus, load_cpus) = match (gate, load) {
        (Some(gate), Some(load)) => (gate.0.clone(), load.0.clone()),
        (Some(gate), None) => (gate.0.clone(), others(gate)),
        (None, Some(load)) => (others(load), load.0.clone()),
        (None, None) => halves(&allowed, &cores),
    };
    Ok(Placement {
        notes: notes_of(&gate_cpus, &load_cpus, &cores),
        gate_cpus,
        load_cpus,
    })
}

/// Whole cores to each side, if there are two of them.
fn halves(allowed: &[usize], cores: &[Vec<usize>]) -> (Vec<usize>, Vec<usize>) {
    let sorted = |cores: &[Vec<usize>]| {
        let mut cpus = cores.concat();
        cpus.sort_unstable();
        cpus
    };
    match (allowed.len(), cores.len()) {
        (0 | 1, _) => (Vec::new(), Vec::new()),
        (_, 1) => {
            let (first, second) = allowed.split_at(allowed.len() / 2);
            (first.to_vec(), second.to_vec())
        }
        (_, count) => {
            let (first, second) = cores.split_at(count / 2);
            (sorted(first), sorted(second))
        }
    }
}

/// What to know of a placement.
///
/// # Errors
/// Never, as things are.
pub fn notes(gate: &[usize], load: &[usize]) -> Result<Vec<String>> {
    Ok(notes_of(gate, load, &cores(&allowed()?, &siblings)))
}

/// CPUs that share what a core has are slowed down by each other.
fn notes_of(gate: &[usize], load: &[usize], cores: &[Vec<usize>]) -> Vec<String> {
    let mut notes = Vec::new();
    for cpu in gate.iter().filter(|cpu| load.contains(cpu)) {
        notes.push(format!("CPU {cpu} has proxies and load: they share it"));
    }
    for core in cores {
        let of = |side: &[usize]| side.iter().any(|cpu| core.contains(cpu));
        if core.len() > 1 && of(gate) && of(load) {
            notes.push(format!(
                "CPUs {core:?} are threads of one core, which proxies and load share"
            ));
        }
    }
    notes
}

/// CPUs by core, each core where its first CPU is.
fn cores(allowed: &[usize], siblings: &dyn Fn(usize) -> Vec<usize>) -> Vec<Vec<usize>> {
    let mut cores: Vec<Vec<usize>> = Vec::new();
    for cpu in allowed {
        if cores.iter().any(|core| core.contains(cpu)) {
            continue;
        }
        let all = siblings(*cpu).into_iter().chain([*cpu]);
        let mut core: Vec<usize> = all.filter(|cpu| allowed.contains(cpu)).collect();
        core.sort_unstable();
        core.dedup();
        cores.push(core);
    }
    cores
}

/// The threads of a CPU's core; none where the kernel does not tell.
fn siblings(cpu: usize) -> Vec<usize> {
    let file = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    let list = std::fs::read_to_string(file).unwrap_or_default();
    let list = list.trim().parse::<CpuList>();
    list.map(|list| list.0).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read() {
        let list = |text: &str| text.parse::<CpuList>().map(|list| list.0).ok();
        assert_eq!(list("0,2-4"), Some(vec![0, 2, 3, 4]));
        assert_eq!(list("all"), Some(vec![]));
        for wrong in ["", "x", "3-1", "1,1", "0-2,1", "-1", "99999"] {
            assert_eq!(list(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_one_side_does_not_take_is_the_others() {
        let allowed = allowed().unwrap();
        let first = CpuList(vec![allowed[0]]);
        let placed = place(Some(&first), None).unwrap();
        assert_eq!(placed.gate_cpus, first.0);
        assert_eq!(placed.load_cpus, allowed[1..]);
        assert!(place(Some(&CpuList(vec![CpuSet::MAX_CPU - 1])), None).is_err());
        let free = place(Some(&CpuList(vec![])), None).unwrap();
        assert!(free.gate_cpus.is_empty() && free.load_cpus.is_empty());
    }

    #[test]
    fn threads_of_a_core_stay_together() {
        let allowed = [0, 1, 2, 3];
        let pairs = cores(&allowed, &|cpu| vec![cpu % 2, cpu % 2 + 2]);
        assert_eq!(pairs, [[0, 2], [1, 3]]);
        assert_eq!(halves(&allowed, &pairs), (vec![0, 2], vec![1, 3]));
        assert!(notes_of(&[0, 2], &[1, 3], &pairs).is_empty());
        assert_eq!(notes_of(&[0, 1], &[2, 3], &pairs).len(), 2);
        let one = cores(&allowed[..2], &|_| vec![0, 1]);
        assert_eq!(halves(&allowed[..2], &one), (vec![0], vec![1]));
        assert_eq!(notes_of(&[0], &[0, 1], &one).len(), 2);
        assert_eq!(halves(&[7], &[vec![7]]), (vec![], vec![]));
    }
}
