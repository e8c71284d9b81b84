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

/// Who is bound to which: as asked for, else half of the CPUs to the proxies and
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
    let (first, second) = allowed.split_at(allowed.len() / 2);
    let others = |than: &CpuList| -> Vec<usize> {
        let free = allowed.iter().filter(|cpu| !than.0.contains(cpu));
        free.copied().collect()
    };
    Ok(match (gate, load) {
        (Some(gate), Some(load)) => Placement {
            gate_cpus: gate.0.clone(),
            load_cpus: load.0.clone(),
        },
        (Some(gate), None) if gate.0.is_empty() => Placement::default(),
        (None, Some(load)) if load.0.is_empty() => Placement::default(),
        (Some(gate), None) => Placement {
            gate_cpus: gate.0.clone(),
            load_cpus: others(gate),
        },
        (None, Some(load)) => Placement {
            gate_cpus: others(load),
            load_cpus: load.0.clone(),
        },
        (None, None) if first.is_empty() => Placement::default(),
        (None, None) => Placement {
            gate_cpus: first.to_vec(),
            load_cpus: second.to_vec(),
        },
    })
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
}
