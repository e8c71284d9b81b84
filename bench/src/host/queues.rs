//! Which queue got how many packets, and which worker how many connections.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;

use super::namespace::run;
use super::network::Network;
use super::nic::{Queue, Sources, cpu_packets, driver_packets};
use crate::report::model::{NicReport, NicRun, QueueRow};

/// A gate that can be asked.
#[derive(Clone, Debug)]
pub struct GateControl {
    /// The program `gatectl`.
    pub gatectl: PathBuf,
    /// Gate's control socket.
    pub socket: PathBuf,
}

/// What one of gate's workers has, as `gatectl --json status` says it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct WorkerLoad {
    /// Its number.
    pub worker: usize,
    /// The CPU that it is pinned to.
    pub cpu: Option<usize>,
    /// Connections accepted since its start.
    pub accepted: u64,
}

impl GateControl {
    /// Its workers.
    ///
    /// # Errors
    /// It does not answer, or is a gate that does not tell.
    pub fn workers(&self) -> Result<Vec<WorkerLoad>> {
        let mut command = Command::new(&self.gatectl);
        command.arg("--control").arg(&self.socket);
        worker_loads(&run(command.args(["--json", "status"]))?)
    }
}

fn worker_loads(status: &str) -> Result<Vec<WorkerLoad>> {
    let mut status: serde_json::Value =
        serde_json::from_str(status).context("`gatectl --json status` printed no JSON")?;
    serde_json::from_value(status["process"]["worker_loads"].take())
        .context("this gate does not tell what each worker has: it is too old for --nic")
}

/// Counts at one moment.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    by_queue: BTreeMap<u32, u64>,
    by_cpu: BTreeMap<usize, u64>,
    workers: Option<Vec<WorkerLoad>>,
}

impl Counts {
    /// Now; `gate` is `None` for peers that do not tell of workers.
    ///
    /// # Errors
    /// The kernel or gate does not tell.
    pub fn read(network: &Network, gate: Option<&GateControl>) -> Result<Self> {
        // The driver is asked here, where the bench's own pair is not.
        let by_queue = match network.gate_namespace() {
            None => driver_packets(&network.device.name),
            Some(_) => BTreeMap::new(),
        };
        Ok(Self {
            by_queue,
            by_cpu: cpu_packets(&Sources::default())?,
            workers: gate.and_then(|gate| match gate.workers() {
                Ok(workers) => Some(workers),
                Err(error) => {
                    eprintln!("gate-bench: no workers in the table of queues: {error:#}");
                    None
                }
            }),
        })
    }

    /// What went through the queues from `self` to `after`.
    #[must_use]
    pub fn until(&self, after: &Self, queues: &[Queue], name: &str, peer: &str) -> NicRun {
        let by_driver = queues
            .iter()
            .all(|queue| after.by_queue.contains_key(&queue.queue));
        let packets = |queue: &Queue| {
            if by_driver {
                return difference(&self.by_queue, &after.by_queue, &queue.queue);
            }
            // A CPU's packets can be told of one queue only.
            let of_cpu = |other: &&Queue| other.cpu == queue.cpu;
            let alone = queues.iter().filter(of_cpu).count() == 1;
            let cpu = queue.cpu.filter(|_| alone)?;
            difference(&self.by_cpu, &after.by_cpu, &cpu)
        };
        let mut loads = self.accepted_until(after);
        let row = |queue: &Queue| {
            // The first queue of a CPU shows the worker, so that it is summed once.
            let load = loads.as_mut().and_then(|loads| {
                let at = loads
                    .iter()
                    .position(|load| load.cpu.is_some() && load.cpu == queue.cpu)?;
                Some(loads.remove(at))
            });
            QueueRow {
                queue: queue.queue,
                irq: queue.irq,
                cpu: queue.cpu,
                worker: load.as_ref().map(|load| load.worker),
                packets: packets(queue),
                connections: load.map(|load| load.accepted),
            }
        };
        let rows = queues.iter().map(row).collect();
        let elsewhere = loads.map(|loads| loads.iter().map(|load| load.accepted).sum());
        NicRun {
            name: name.to_owned(),
            peer: peer.to_owned(),
            packets_of: if by_driver {
                "the queue, as the driver counts them".to_owned()
            } else {
                "the queue's CPU, those of other devices included".to_owned()
            },
            rows,
            elsewhere,
        }
    }

    /// Workers with what they accepted meanwhile.
    fn accepted_until(&self, after: &Self) -> Option<Vec<WorkerLoad>> {
        let before = self.workers.as_ref()?;
        let mut loads = after.workers.clone()?;
        for load in &mut loads {
            let earlier = before.iter().find(|earlier| earlier.worker == load.worker);
            let accepted = earlier.map_or(0, |earlier| earlier.accepted);
            load.accepted = load.accepted.saturating_sub(accepted);
        }
        Some(loads)
    }
}

/// Counters of the kernel may wrap at 32 bits: then there is no answer.
fn difference<K: Ord>(before: &BTreeMap<K, u64>, after: &BTreeMap<K, u64>, key: &K) -> Option<u64> {
    after.get(key)?.checked_sub(*before.get(key)?)
}

/// The device and its queues, for people.
#[must_use]
pub fn table(nic: &NicReport) -> String {
    let driver = if nic.driver.is_empty() {
        String::new()
    } else {
        format!(" ({})", nic.driver)
    };
    let mut text = format!("{}{driver}: {}\n", nic.device, nic.about);
    for note in &nic.notes {
        let _ = writeln!(text, "note: {note}");
    }
    for run in &nic.runs {
        let _ = writeln!(
            text,
            "\n{}, {}; packets are those of {}",
            run.name, run.peer, run.packets_of
        );
        let _ = writeln!(
            text,
            "{:>5}  {:>4}  {:>4}  {:>6}  {:>12}  {:>12}",
            "QUEUE", "IRQ", "CPU", "WORKER", "PACKETS", "CONNECTIONS"
        );
        for row in &run.rows {
            let _ = writeln!(
                text,
                "{:>5}  {:>4}  {:>4}  {:>6}  {:>12}  {:>12}",
                row.queue,
                cell(row.irq),
                cell(row.cpu),
                cell(row.worker),
                cell(row.packets),
                cell(row.connections),
            );
        }
        if let Some(elsewhere) = run.elsewhere.filter(|elsewhere| *elsewhere > 0) {
            let _ = writeln!(
                text,
                "{elsewhere} connections went to workers on CPUs without a queue"
            );
        }
    }
    text
}

fn cell<T: ToString>(value: Option<T>) -> String {
    value.map_or("-".to_owned(), |value| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(worker: usize, cpu: Option<usize>, accepted: u64) -> WorkerLoad {
        WorkerLoad {
            worker,
            cpu,
            accepted,
        }
    }

    fn queues(cpus: &[Option<usize>]) -> Vec<Queue> {
        let queue = |(queue, cpu): (usize, &Option<usize>)| Queue {
            queue: queue as u32,
            irq: Some(40 + queue as u32),
            cpu: *cpu,
        };
        cpus.iter().enumerate().map(queue).collect()
    }

    #[test]
    fn a_queue_is_told_with_the_worker_on_its_cpu() {
        let before = Counts {
            by_cpu: BTreeMap::from([(0, 100), (1, 200), (2, 300)]),
            workers: Some(vec![
                load(0, Some(1), 5),
                load(1, Some(0), 5),
                load(2, None, 0),
            ]),
            ..Counts::default()
        };
        let after = Counts {
            by_cpu: BTreeMap::from([(0, 110), (1, 220), (2, 290)]),
            workers: Some(vec![
                load(0, Some(1), 12),
                load(1, Some(0), 9),
                load(2, None, 3),
            ]),
            ..Counts::default()
        };
        let cpus = [Some(0), Some(1), Some(2), None];
        let run = before.until(&after, &queues(&cpus), "relay", "gate");
        let cells: Vec<_> = run
            .rows
            .iter()
            .map(|row| (row.worker, row.packets, row.connections))
            .collect();
        assert_eq!(
            cells,
            [
                (Some(1), Some(10), Some(4)),
                (Some(0), Some(20), Some(7)),
                (None, None, None),
                (None, None, None),
            ]
        );
        assert_eq!(run.elsewhere, Some(3));
        // Two queues on one CPU: its packets are neither's, its worker is shown once.
        let run = before.until(&after, &queues(&[Some(0), Some(0)]), "relay", "gate");
        assert!(run.rows.iter().all(|row| row.packets.is_none()));
        assert_eq!((run.rows[0].worker, run.rows[1].worker), (Some(1), None));
        assert_eq!(run.elsewhere, Some(10));
    }

    #[test]
    fn the_drivers_count_is_better_than_the_cpus() {
        let count = |packets: [u64; 2]| Counts {
            by_queue: BTreeMap::from([(0, packets[0]), (1, packets[1])]),
            by_cpu: BTreeMap::from([(0, 0)]),
            workers: None,
        };
        let run = count([1, 2]).until(
            &count([11, 32]),
            &queues(&[Some(0), None]),
            "storm",
            "nginx",
        );
        let packets: Vec<_> = run.rows.iter().map(|row| row.packets).collect();
        assert_eq!(packets, [Some(10), Some(30)]);
        assert!(run.packets_of.contains("driver"));
        assert_eq!(run.elsewhere, None);
        // A driver that tells of some queues only is not believed.
        let run = count([1, 2]).until(&count([11, 32]), &queues(&[None; 3]), "storm", "nginx");
        assert!(run.packets_of.contains("CPU"));
    }

    #[test]
    fn the_status_of_a_gate_tells_of_its_workers() {
        let status = r#"{"process": {"worker_loads": [
            {"worker": 0, "cpu": 3, "accepted": 7, "connections": 2},
            {"worker": 1, "cpu": null, "accepted": 0, "connections": 0}]}}"#;
        let loads = worker_loads(status).expect("read");
        assert_eq!(loads, [load(0, Some(3), 7), load(1, None, 0)]);
        for other in ["{}", r#"{"process": {"workers": 2}}"#] {
            let error = worker_loads(other).expect_err("too old").to_string();
            assert!(error.contains("too old"), "{error}");
        }
    }

    #[test]
    fn the_table_says_whose_packets_it_shows() {
        let mut nic = NicReport {
            device: "bench0".to_owned(),
            driver: "veth".to_owned(),
            about: "a pair".to_owned(),
            notes: vec!["CPU 1 is shared".to_owned()],
            runs: Vec::new(),
        };
        nic.runs.push(NicRun {
            name: "storm".to_owned(),
            peer: "gate".to_owned(),
            packets_of: "the queue".to_owned(),
            rows: vec![QueueRow {
                queue: 0,
                irq: None,
                cpu: Some(1),
                worker: Some(0),
                packets: Some(123_456),
                connections: Some(512),
            }],
            elsewhere: Some(2),
        });
        assert_eq!(
            table(&nic),
            "bench0 (veth): a pair\nnote: CPU 1 is shared\n\n\
             storm, gate; packets are those of the queue\n\
             QUEUE   IRQ   CPU  WORKER       PACKETS   CONNECTIONS\n\
             \u{20}   0     -     1       0        123456           512\n\
             2 connections went to workers on CPUs without a queue\n"
        );
    }
}
