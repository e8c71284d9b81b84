//! A pair of virtual devices with several queues, between two network namespaces
//! of its own.
//!
//! Three settings make it behave as a network card with a queue for each of
//! gate's CPUs (seen on Linux 6.18):
//! - A packet comes in at the queue that it was sent by. veth does not record
//!   which that was, and the kernel takes the sending queue's number for that of
//!   the receiving one plus one (skb_rx_queue_recorded): senders use the queues
//!   from 1 on.
//! - Which of them a connection uses is decided by its hash: XPS gives all of
//!   them to every CPU.
//! - Packets are handled on the sender's CPU unless RPS says otherwise: queue N of
//!   gate's end goes to gate's Nth CPU, and all of the other end to the load's
//!   CPUs, so that neither does the other's work.
//!
//! Receive offload (GRO) and threads of the device stay as the kernel has them:
//! off.

use std::fs;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::namespace::{NAMES, Namespace, inside, ip, run};
use super::nic::{Queue, cpus_of_mask, mask_of_cpus, online_cpus};

/// What all of them are called first.
const PREFIX: &str = "gate-bench-";
/// Both devices, each in its namespace.
pub const DEVICE: &str = "bench0";
/// RFC 2544 gives these to benchmarks: no network has them.
pub const GATE_ADDRESS: [u8; 4] = [198, 18, 0, 1];
/// The other end.
pub const LOAD_ADDRESS: [u8; 4] = [198, 18, 0, 2];

/// Settings of a network namespace that a new one does not take over.
const SETTINGS: [&str; 10] = [
    "core/somaxconn",
    "ipv4/ip_local_port_range",
    "ipv4/tcp_congestion_control",
    "ipv4/tcp_fin_timeout",
    "ipv4/tcp_max_syn_backlog",
    "ipv4/tcp_max_tw_buckets",
    "ipv4/tcp_rmem",
    "ipv4/tcp_syncookies",
    "ipv4/tcp_tw_reuse",
    "ipv4/tcp_wmem",
];

/// Removed when dropped; what a killed run left is removed by the next one.
#[derive(Debug)]
pub struct Pair {
    /// Where gate and its peers run.
    pub gate: Namespace,
    /// Where load and backend run.
    pub load: Namespace,
    /// Of gate's end.
    pub queues: Vec<Queue>,
    _names: Names,
}

impl Pair {
    /// Makes it. Queue N of gate's end is handled by the Nth of gate's CPUs.
    ///
    /// # Errors
    /// A right or a tool is missing; nothing is left behind then.
    pub fn make(gate_cpus: &[usize], load_cpus: &[usize]) -> Result<Self> {
        remove_leftovers();
        let names = Names::of(std::process::id());
        ip(None, &["netns", "add", &names.gate])?;
        ip(None, &["netns", "add", &names.load])?;
        let gate = Namespace::open(&names.gate)?;
        let load = Namespace::open(&names.load)?;
        for namespace in [&gate, &load] {
            take_over_settings(namespace)?;
        }
        let receiving = gate_cpus.len().to_string();
        let sending = (gate_cpus.len() + 1).to_string();
        let end = ["numrxqueues", &receiving, "numtxqueues", &sending, "netns"];
        let mut add = vec!["link", "add", "name", DEVICE];
        add.extend(end);
        add.extend([&*names.gate, "type", "veth", "peer", "name", DEVICE]);
        add.extend(end);
        add.push(&names.load);
        ip(None, &add)?;
        for (name, [a, b, c, d]) in [(&names.gate, GATE_ADDRESS), (&names.load, LOAD_ADDRESS)] {
            let address = format!("{a}.{b}.{c}.{d}/30");
            ip(Some(name), &["address", "add", &address, "dev", DEVICE])?;
            ip(Some(name), &["link", "set", "lo", "up"])?;
            ip(Some(name), &["link", "set", DEVICE, "up"])?;
        }
        let steering: Vec<&[usize]> = gate_cpus.chunks(1).collect();
        let masks = set_queues(&names.gate, &steering)?;
        set_queues(&names.load, &vec![load_cpus; gate_cpus.len()])?;
        let queue = |(queue, mask): (usize, &str)| Queue {
            queue: queue as u32,
            irq: None,
            cpu: cpus_of_mask(mask).and_then(|cpus| cpus.first().copied()),
        };
        Ok(Self {
            gate,
            load,
            queues: masks.lines().enumerate().map(queue).collect(),
            _names: names,
        })
    }
}

/// The names of a process's namespaces; they are gone when it is dropped.
#[derive(Debug)]
struct Names {
    gate: String,
    load: String,
}

impl Names {
    fn of(process: u32) -> Self {
        Self {
            gate: format!("{PREFIX}{process}-gate"),
            load: format!("{PREFIX}{process}-load"),
        }
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        // At once: a namespace itself ends some time after its last user, and a
        // device has no end of its own before that.
        let _ = ip(Some(&self.gate), &["link", "delete", DEVICE]);
        for name in [&self.gate, &self.load] {
            if Path::new(NAMES).join(name).exists()
                && let Err(error) = ip(None, &["netns", "delete", name])
            {
                eprintln!("the namespace {name} stays: {error:#}");
            }
        }
    }
}

/// Removes namespaces of runs whose process is gone, and of an earlier one with our number.
pub fn remove_leftovers() {
    let names = fs::read_dir(NAMES).into_iter().flatten().flatten();
    for name in names {
        let name = name.file_name().to_string_lossy().into_owned();
        if let Some(process) = maker(&name)
            && (process == std::process::id() || !Path::new(&format!("/proc/{process}")).exists())
        {
            drop(Names::of(process));
        }
    }
}

/// The process that made a namespace of this name.
fn maker(name: &str) -> Option<u32> {
    let rest = name.strip_prefix(PREFIX)?;
    let process = rest.strip_suffix("-gate").or(rest.strip_suffix("-load"))?;
    process.parse().ok()
}

/// What holds here, tuned for the run or not, holds in there.
fn take_over_settings(namespace: &Namespace) -> Result<()> {
    let path = |setting: &str| format!("/proc/sys/net/{setting}");
    let here: Vec<(String, String)> = SETTINGS
        .iter()
        .filter_map(|setting| Some((path(setting), fs::read_to_string(path(setting)).ok()?)))
        .collect();
    inside(Some(namespace.as_fd()), || {
        for (path, value) in &here {
            let there = fs::read_to_string(path).unwrap_or_default();
            if there != *value {
                fs::write(path, value)
                    .with_context(|| format!("{path} cannot be set to {}", value.trim()))?;
            }
        }
        Ok(())
    })?
}

/// Says which CPUs handle what comes in at each queue of a namespace's end, and
/// sends by all queues but the first. Gives the masks as the kernel has them.
fn set_queues(namespace: &str, cpus_of_queues: &[&[usize]]) -> Result<String> {
    let script = script(cpus_of_queues, &online_cpus()?);
    // sysfs shows the devices of the namespace that it was mounted in, and `exec`
    // mounts one.
    let mut command = Command::new("ip");
    run(command.args(["netns", "exec", namespace, "sh", "-c", &script]))
}

fn script(cpus_of_queues: &[&[usize]], all_cpus: &[usize]) -> String {
    let all = mask_of_cpus(all_cpus);
    let mut script = format!("set -e; cd /sys/class/net/{DEVICE}/queues; echo 0 >tx-0/xps_cpus");
    for (queue, cpus) in cpus_of_queues.iter().enumerate() {
        let (mask, sender) = (mask_of_cpus(cpus), queue + 1);
        script += &format!("; echo {mask} >rx-{queue}/rps_cpus; echo {all} >tx-{sender}/xps_cpus");
    }
    for queue in 0..cpus_of_queues.len() {
        script += &format!("; cat rx-{queue}/rps_cpus");
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_the_bench_are_its_own() {
        assert_eq!(maker("gate-bench-17-gate"), Some(17));
        assert_eq!(maker("gate-bench-17-load"), Some(17));
        for other in [
            "gate-bench-17",
            "gate-bench-x-gate",
            "gate-test-17-gate",
            "bench",
        ] {
            assert_eq!(maker(other), None, "{other}");
        }
        let own = Names::of(std::process::id());
        assert_eq!(maker(&own.gate), Some(std::process::id()));
    }

    #[test]
    fn no_connection_is_sent_by_the_first_queue() {
        assert_eq!(
            script(&[&[1], &[2, 3]], &[0, 1, 2, 3]),
            "set -e; cd /sys/class/net/bench0/queues; echo 0 >tx-0/xps_cpus\
             ; echo 00000002 >rx-0/rps_cpus; echo 0000000f >tx-1/xps_cpus\
             ; echo 0000000c >rx-1/rps_cpus; echo 0000000f >tx-2/xps_cpus\
             ; cat rx-0/rps_cpus; cat rx-1/rps_cpus"
        );
    }
}
