//! The measured time of a run: who took how much of the CPUs, who waited.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::processes::{self, Used};
use super::system::{self, Machine};
use crate::report::model::Side;

/// Whose tasks make up a side of a run.
#[derive(Clone, Copy, Debug)]
pub enum Who {
    /// Our own threads whose name begins so.
    Threads(&'static str),
    /// A process of ours and its descendants.
    Tree(u32),
    /// The same, but not a descendant of this process.
    TreeApart(u32),
    /// Children of ours that have ended and were waited for.
    EndedChildren,
    /// The kernel's threads for network work that no task's time was enough for.
    Ksoftirqd,
}

/// Reads what the sides of a run use.
#[derive(Clone, Debug)]
pub struct Watch {
    sides: Vec<(&'static str, Who)>,
    disturbed_above: f64,
    over_device: bool,
}

/// What was used until a moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    at: Instant,
    machine: Machine,
    sides: Vec<Used>,
    ours: Duration,
}

/// What was used between two moments.
#[derive(Clone, Debug)]
pub struct Window {
    /// Its length.
    pub elapsed: Duration,
    /// Every side, in the order of the watch.
    pub sides: Vec<(&'static str, Used)>,
    /// Sides whose delay is not known.
    ended: Vec<&'static str>,
    /// What disturbed the run.
    pub disturbed: Option<String>,
}

impl Watch {
    /// A run is disturbed if others take more than `disturbed_above` of one CPU;
    /// interrupts are the run's own if it goes over a network device.
    #[must_use]
    pub fn new(sides: Vec<(&'static str, Who)>, disturbed_above: f64, over_device: bool) -> Self {
        Self {
            sides,
            disturbed_above,
            over_device,
        }
    }

    /// As of now.
    ///
    /// # Errors
    /// A side is gone, or `/proc` is not readable.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let mut ours = processes::of_tree(std::process::id())?.cpu;
        let mut sides = Vec::new();
        for (_, who) in &self.sides {
            let used = match who {
                Who::Threads(prefix) => processes::of_own_threads(prefix)?,
                Who::Tree(pid) => processes::of_tree(*pid)?,
                Who::Ksoftirqd => {
                    let used = processes::of_named("ksoftirqd/")?;
                    ours += used.cpu;
                    used
                }
                Who::EndedChildren => Used {
                    cpu: processes::of_waited_for_children(std::process::id())?,
                    delay: Duration::ZERO,
                },
                Who::TreeApart(pid) => {
                    let used = processes::of_tree(*pid)?;
                    ours += used.cpu;
                    used
                }
            };
            sides.push(used);
        }
        Ok(Snapshot {
            at: Instant::now(),
            machine: system::now()?,
            sides,
            ours,
        })
    }

    /// What was used between two snapshots of this watch.
    #[must_use]
    pub fn window(&self, before: &Snapshot, after: &Snapshot) -> Window {
        let elapsed = after.at - before.at;
        let used = after.sides.iter().zip(&before.sides);
        let names = self.sides.iter().map(|(name, _)| *name);
        Window {
            elapsed,
            sides: names.zip(used.map(|(now, then)| *now - *then)).collect(),
            ended: self
                .sides
                .iter()
                .filter(|(_, who)| matches!(who, Who::EndedChildren))
                .map(|(name, _)| *name)
                .collect(),
            disturbed: system::disturbance(
                before.machine,
                after.machine,
                after.ours.saturating_sub(before.ours),
                elapsed,
                self.disturbed_above,
                self.over_device,
            ),
        }
    }
}

impl Window {
    /// Of a run that nothing disturbed.
    #[cfg(test)]
    #[must_use]
    pub fn of(elapsed: Duration, sides: Vec<(&'static str, Used)>) -> Self {
        Self {
            elapsed,
            sides,
            ended: Vec::new(),
            disturbed: None,
        }
    }

    /// CPU time of a side, if there is such a side.
    #[must_use]
    pub fn cpu(&self, name: &str) -> Option<Duration> {
        let side = self.sides.iter().find(|(side, _)| *side == name);
        side.map(|(_, used)| used.cpu)
    }

    /// As the report has it.
    #[must_use]
    pub fn report(&self) -> Vec<Side> {
        let share = |time: Duration| time.as_secs_f64() / self.elapsed.as_secs_f64();
        let side = |(name, used): &(&'static str, Used)| Side {
            name: (*name).to_owned(),
            cpus: share(used.cpu),
            delay: (!self.ended.contains(name)).then(|| share(used.delay)),
        };
        self.sides.iter().map(side).collect()
    }
}
