//! The threads of a load, and what they are told.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use anyhow::{Result, anyhow, bail};
use rustix::thread::{CpuSet, sched_setaffinity, set_current_timer_slack};

use super::tally::Tally;

/// Where a load's threads live.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// One thread for each; empty: as many as there are CPUs, not bound.
    pub cpus: Vec<usize>,
}

impl Place {
    /// How many threads there are.
    #[must_use]
    pub fn threads(&self) -> usize {
        match self.cpus.len() {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            bound => bound,
        }
    }
}

/// What the threads of a load are to do.
#[derive(Debug, Default)]
pub struct Phase(AtomicU8);

const MEASURED: u8 = 1;
const OVER: u8 = 2;

impl Phase {
    /// From now on what is done counts.
    pub fn measure(&self) {
        self.0.store(MEASURED, Ordering::Relaxed);
    }

    /// The load ends.
    pub fn end(&self) {
        self.0.store(OVER, Ordering::Relaxed);
    }

    /// Whether what is done counts.
    #[must_use]
    pub fn is_measured(&self) -> bool {
        self.0.load(Ordering::Relaxed) == MEASURED
    }

    /// Whether the load ends.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.0.load(Ordering::Relaxed) == OVER
    }
}

/// The threads of a load; told to end when dropped.
pub struct Crew {
    phase: Arc<Phase>,
    threads: Vec<JoinHandle<Result<Tally>>>,
}

/// One thread out of a crew.
pub struct Member {
    /// From 0.
    pub index: usize,
    /// Of all.
    pub of: usize,
    /// What to do.
    pub phase: Arc<Phase>,
}

impl Member {
    /// This member's share of so many things.
    #[must_use]
    pub fn share(&self, of_all: usize) -> usize {
        of_all / self.of + usize::from(self.index < of_all % self.of)
    }
}

impl Crew {
    /// Starts a thread `load-N` for each CPU, but not more than there are `shares` of
    /// the work: a thread without one would end at once, or do nothing of a schedule.
    ///
    /// # Errors
    /// No threads are left.
    pub fn start<Work>(place: &Place, shares: usize, work: Work) -> Result<Self>
    where
        Work: Fn(Member) -> Result<Tally> + Clone + Send + 'static,
    {
        let phase = Arc::new(Phase::default());
        let of = place.threads().min(shares).max(1);
        let mut crew = Self {
            phase: Arc::clone(&phase),
            threads: Vec::new(),
        };
        for index in 0..of {
            let member = Member {
                index,
                of,
                phase: Arc::clone(&phase),
            };
            let (work, cpu) = (work.clone(), place.cpus.get(index).copied());
            let thread = std::thread::Builder::new().name(format!("load-{index}"));
            crew.threads.push(thread.spawn(move || {
                bind(cpu)?;
                work(member)
            })?);
        }
        Ok(crew)
    }

    /// The same, with a share of some things for each thread.
    ///
    /// # Errors
    /// No threads are left.
    pub fn start_sharing<Thing, Work>(place: &Place, things: Vec<Thing>, work: Work) -> Result<Self>
    where
        Thing: Send + 'static,
        Work: Fn(Member, Vec<Thing>) -> Result<Tally> + Clone + Send + 'static,
    {
        let count = things.len();
        let things = Arc::new(Mutex::new(things));
        Self::start(place, count, move |member| {
            let mut left = things
                .lock()
                .map_err(|_| anyhow!("a thread of the load panicked, see above"))?;
            let from = left.len() - member.share(count);
            let mine = left.split_off(from);
            drop(left);
            work(member, mine)
        })
    }

    /// What the threads are told.
    #[must_use]
    pub fn phase(&self) -> &Phase {
        &self.phase
    }

    /// Whether a thread has ended before it was told to.
    #[must_use]
    pub fn has_lost_one(&self) -> bool {
        self.threads.iter().any(JoinHandle::is_finished)
    }

    /// Ends the load.
    ///
    /// # Errors
    /// A thread failed.
    pub fn end(mut self) -> Result<Tally> {
        self.phase.end();
        let mut all = Tally::new();
        for thread in self.threads.drain(..) {
            match thread.join() {
                Ok(tally) => all.add(tally?)?,
                Err(_) => bail!("a thread of the load panicked, see above"),
            }
        }
        Ok(all)
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.phase.end();
        for thread in self.threads.drain(..) {
            // Its error is not the first one here.
            let _ = thread.join();
        }
    }
}

/// Binds the calling thread to a CPU, and has its timeouts end on time.
///
/// # Errors
/// There is no such CPU for us.
pub fn bind(cpu: Option<usize>) -> Result<()> {
    // The default is 50 us late, as much as a whole request takes.
    set_current_timer_slack(NonZeroU64::new(1))?;
    if let Some(cpu) = cpu {
        let mut set = CpuSet::new();
        set.set(cpu);
        sched_setaffinity(None, &set)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_has_a_share() {
        // Not bound: this machine may have fewer CPUs.
        let shares = 2;
        let threads = Place::default().threads() + shares;
        for (asked, expected) in [(1, 1), (threads, Place::default().threads())] {
            let things: Vec<usize> = (0..asked).collect();
            let crew = Crew::start_sharing(&Place::default(), things, |_, mine| {
                assert!(!mine.is_empty());
                let mut tally = Tally::new();
                tally.bytes = mine.len() as u64;
                Ok(tally)
            });
            let crew = crew.unwrap();
            assert_eq!(crew.threads.len(), expected);
            assert_eq!(crew.end().unwrap().bytes, asked as u64);
        }
    }
}
