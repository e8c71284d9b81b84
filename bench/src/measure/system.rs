//! The whole machine's CPU time: what others took of it while a run went on.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

/// CPU time of the machine so far, over all CPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// Spent on anything but interrupts.
    pub busy: Duration,
    /// Spent on interrupts, packets that come in among them.
    pub interrupts: Duration,
    /// Taken away by the hypervisor.
    pub steal: Duration,
}

/// As of now.
///
/// # Errors
/// `/proc/stat` has another form than proc(5).
pub fn now() -> Result<Machine> {
    let text = fs::read_to_string("/proc/stat")?;
    machine(&text, rustix::param::clock_ticks_per_second() as f64)
        .context("/proc/stat has another form than proc(5)")
}

/// What disturbed a run: CPU time that went neither to its sides nor to us.
///
/// `ours` is what the run's sides and this process took in the `elapsed` time.
#[must_use]
pub fn disturbance(
    before: Machine,
    after: Machine,
    ours: Duration,
    elapsed: Duration,
    share_max: f64,
    over_device: bool,
) -> Option<String> {
    let share = |time: Duration| time.as_secs_f64() / elapsed.as_secs_f64();
    let busy = after.busy.saturating_sub(before.busy);
    let interrupts = after.interrupts.saturating_sub(before.interrupts);
    // Over a network device they are the run's own work, which no task is charged
    // for while its CPU is idle.
    let interrupts = if over_device {
        Duration::ZERO
    } else {
        interrupts
    };
    let others = share((busy + interrupts).saturating_sub(ours));
    let steal = share(after.steal.saturating_sub(before.steal));
    if others + steal <= share_max {
        return None;
    }
    Some(format!(
        "other programs took {:.0} % of a CPU, the hypervisor {:.0} %",
        others * 100.0,
        steal * 100.0
    ))
}

/// `cpu  user nice system idle iowait irq softirq steal ...`, in ticks.
fn machine(stat: &str, ticks_per_second: f64) -> Option<Machine> {
    let line = stat.lines().find(|line| line.starts_with("cpu "))?;
    let ticks: Option<Vec<u64>> = line
        .split_ascii_whitespace()
        .skip(1)
        .map(|word| word.parse().ok())
        .collect();
    let ticks = ticks?;
    let [user, nice, system, _idle, _iowait, irq, softirq, steal, ..] = ticks[..] else {
        return None;
    };
    let time = |ticks: u64| Duration::from_secs_f64(ticks as f64 / ticks_per_second);
    Some(Machine {
        busy: time(user + nice + system),
        interrupts: time(irq + softirq),
        steal: time(steal),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn idle_time_is_not_busy() {
        let stat = "cpu  100 10 200 9999 8888 5 85 50 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n";
        let found = machine(stat, 100.0).unwrap();
        assert_eq!(found.busy + found.interrupts, SECOND * 4);
        assert_eq!(found.steal, SECOND / 2);
        assert_eq!(machine("cpu  1 2", 100.0), None);
    }

    #[test]
    fn only_what_is_not_ours_disturbs() {
        let before = Machine::default();
        let after = Machine {
            busy: SECOND * 3,
            interrupts: SECOND,
            steal: SECOND / 4,
        };
        let told = |ours| disturbance(before, after, ours, SECOND * 2, 0.2, false);
        assert_eq!(told(SECOND * 4), None);
        let told = told(SECOND * 3).unwrap();
        assert_eq!(
            told,
            "other programs took 50 % of a CPU, the hypervisor 12 %"
        );
        // Ticks are sampled: ours may come out as more than all.
        assert_eq!(
            disturbance(before, before, SECOND, SECOND, 0.0, false),
            None
        );
        // Packets that come in from a device are ours.
        let told = disturbance(before, after, SECOND * 3, SECOND * 2, 0.2, true);
        assert_eq!(told, None);
    }
}
