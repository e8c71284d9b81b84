//! What to make of a run: who held its rate down, and whether it counts.

use anyhow::{Result, ensure};

use crate::load::pace::Pace;
use crate::measure::window::Window;
use crate::peer::Peer;
use crate::report::model::Placement;
use crate::scenario::Measured;

/// A CPU that is busier than this holds the rate down.
const BUSY: f64 = 0.9;
/// Of what is done: more failures are a failure of the run.
const FAILED_MAX: f64 = 0.01;

/// Who held the rate down; without a placement nobody is bound to CPUs, and the proxy
/// has so many `workers`.
#[must_use]
pub fn bottleneck(
    peer: &Peer,
    pace: Pace,
    window: &Window,
    placement: Option<&Placement>,
    workers: usize,
) -> &'static str {
    let elapsed = window.elapsed.as_secs_f64();
    let cpus = |name: &str| window.cpu(name).unwrap_or_default().as_secs_f64() / elapsed;
    let (ends, proxy) = (cpus("load") + cpus("backend"), cpus("proxy"));
    let bound = placement.map(|placed| (placed.gate_cpus.len(), placed.load_cpus.len()));
    let Some((gate @ 1.., load @ 1..)) = bound else {
        let all = std::thread::available_parallelism().map_or(1, usize::from);
        let proxy_busy = proxy > peer.cpus_usable(workers) as f64 * BUSY;
        let all_busy = ends + proxy > all as f64 * BUSY;
        return match (all_busy, proxy_busy) {
            (true, _) => "all CPUs",
            (false, true) => "proxy",
            (false, false) => "nobody",
        };
    };
    if ends > load as f64 * BUSY {
        "load"
    } else if proxy > peer.cpus_usable(gate) as f64 * BUSY {
        "proxy"
    } else if pace != Pace::Closed {
        "schedule"
    } else {
        "nobody"
    }
}

/// A way that fails some of its clients is not compared by the others.
///
/// # Errors
/// Too many failed, with an example.
pub fn ensure_few_failed(measured: &Measured) -> Result<()> {
    let rate = measured.values.iter().find(|(key, _)| key == "rate");
    let Some((_, rate)) = rate else { return Ok(()) };
    let done = rate * measured.window.elapsed.as_secs_f64();
    let share = measured.failed as f64 / done.max(1.0);
    ensure!(
        share <= FAILED_MAX,
        "{} failed beside {done:.0} that did not, such as: {}",
        measured.failed,
        measured.failure.as_deref().unwrap_or_default()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::measure::processes::Used;
    use crate::peer::Kind;

    fn window(proxy: f64, load: f64) -> Window {
        let used = |cpus: f64| Used {
            cpu: Duration::from_secs_f64(cpus * 2.0),
            delay: Duration::ZERO,
        };
        Window::of(
            Duration::from_secs(2),
            vec![("proxy", used(proxy)), ("load", used(load))],
        )
    }

    #[test]
    fn the_busiest_side_holds_the_rate_down() {
        let peer = |kind| Peer {
            name: String::new(),
            kind,
            by_unix: false,
        };
        let placed = |gate: usize, load: usize| Placement {
            gate_cpus: (0..gate).collect(),
            load_cpus: (gate..gate + load).collect(),
            notes: Vec::new(),
        };
        let open = Pace::Open { per_second: 1.0 };
        let told = |kind, pace, proxy, load, placement: &Placement| {
            bottleneck(&peer(kind), pace, &window(proxy, load), Some(placement), 1)
        };
        let one = placed(1, 1);
        assert_eq!(told(Kind::Haproxy, Pace::Closed, 0.95, 0.5, &one), "proxy");
        assert_eq!(told(Kind::Haproxy, open, 0.95, 0.5, &one), "proxy");
        assert_eq!(told(Kind::Haproxy, open, 0.3, 0.5, &one), "schedule");
        assert_eq!(told(Kind::Haproxy, Pace::Closed, 0.3, 0.99, &one), "load");
        assert_eq!(told(Kind::Haproxy, Pace::Closed, 0.3, 0.5, &one), "nobody");
        let two = placed(2, 1);
        assert_eq!(told(Kind::Haproxy, Pace::Closed, 0.95, 0.5, &two), "nobody");
        assert_eq!(
            told(Kind::Pgbouncer, Pace::Closed, 0.95, 0.5, &two),
            "proxy"
        );
        // A side that is not bound is not full of its CPUs.
        assert_ne!(
            told(Kind::Haproxy, Pace::Closed, 0.1, 0.1, &placed(2, 0)),
            "load"
        );
    }

    #[test]
    fn failures_fail_the_run() {
        let measured = |failed| Measured {
            values: vec![("rate".to_owned(), 500.0)],
            window: window(1.0, 1.0),
            latency: None,
            failed,
            failure: Some("reset".to_owned()),
            unfinished: 0,
        };
        assert!(ensure_few_failed(&measured(10)).is_ok());
        let error = ensure_few_failed(&measured(11)).unwrap_err().to_string();
        assert!(error.contains("11 failed beside 1000"), "{error}");
    }
}
