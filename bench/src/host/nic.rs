//! The receive queues of a network device, and the CPU that handles each.
//!
//! All of it is read from sysfs and procfs, without rights. A queue's CPU is
//! that of its interrupt; where there is none (veth and other virtual devices)
//! it is the one CPU of its RPS mask; else packets are handled wherever the
//! sender runs, and the queue has no CPU.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// Where the kernel tells of devices and interrupts.
#[derive(Clone, Debug)]
pub struct Sources {
    /// `/sys/class/net`.
    pub devices: PathBuf,
    /// `/proc`.
    pub proc: PathBuf,
}

impl Default for Sources {
    fn default() -> Self {
        Self {
            devices: "/sys/class/net".into(),
            proc: "/proc".into(),
        }
    }
}

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// Its driver; empty if it has none, as virtual devices.
    pub driver: String,
    /// Its receive queues, by their number.
    pub queues: Vec<Queue>,
}

/// A receive queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Queue {
    /// Its number.
    pub queue: u32,
    /// Its interrupt.
    pub irq: Option<u32>,
    /// The one CPU that handles its packets.
    pub cpu: Option<usize>,
}

impl Device {
    /// The device of this name in the network namespace that sysfs shows.
    ///
    /// # Errors
    /// There is no such device, or it has no receive queue.
    pub fn read(sources: &Sources, name: &str) -> Result<Self> {
        let directory = sources.devices.join(name);
        if name.contains('/') || !directory.is_dir() {
            bail!(
                "there is no network device `{name}`; there are: {}",
                names(&sources.devices)?.join(", ")
            );
        }
        let mut numbers: Vec<u32> = names(&directory.join("queues"))?
            .iter()
            .filter_map(|queue| queue.strip_prefix("rx-")?.parse().ok())
            .collect();
        numbers.sort_unstable();
        if numbers.is_empty() {
            bail!("{name} has no receive queue: choose a device that packets come in at");
        }
        let interrupts = fs::read_to_string(sources.proc.join("interrupts"))
            .context("/proc/interrupts cannot be read")?;
        let of_queues = queue_interrupts(&interrupts, name, &Owner::of(&directory));
        let queue = |queue: u32| {
            let irq = of_queues.get(&queue).copied();
            let cpu = match irq {
                Some(irq) => interrupt_cpu(&sources.proc, irq),
                None => rps_cpu(&directory, queue),
            };
            Queue { queue, irq, cpu }
        };
        Ok(Self {
            name: name.to_owned(),
            driver: driver(&directory),
            queues: numbers.into_iter().map(queue).collect(),
        })
    }
}

/// What tells a device's interrupts from those of others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// Its interrupts, if the bus tells.
    irqs: Option<Vec<u32>>,
    /// Its name on the bus, such as `virtio2`.
    bus_name: Option<String>,
}

impl Owner {
    fn of(directory: &Path) -> Self {
        let Ok(device) = fs::canonicalize(directory.join("device")) else {
            return Self::default();
        };
        let listed = |at: &Path| names(&at.join("msi_irqs")).ok();
        // A virtio device has them at the PCI device that it is on.
        let irqs = listed(&device).or_else(|| listed(device.parent()?));
        Self {
            irqs: irqs.map(|irqs| irqs.iter().filter_map(|irq| irq.parse().ok()).collect()),
            bus_name: device
                .file_name()
                .map(|name| name.to_string_lossy().into_owned()),
        }
    }

    fn has(&self, irq: u32, action: &str, device: &str) -> bool {
        match &self.irqs {
            Some(irqs) => irqs.contains(&irq),
            None => {
                let mut words = action.split(['-', '@', ':', '.', ' ']);
                words.any(|word| word == device || Some(word) == self.bus_name.as_deref())
            }
        }
    }
}

/// The interrupt of each receive queue of a device, from the text of
/// `/proc/interrupts`.
#[must_use]
pub fn queue_interrupts(interrupts: &str, device: &str, owner: &Owner) -> BTreeMap<u32, u32> {
    let mut of_queues = BTreeMap::new();
    for line in interrupts.lines() {
        let Some((irq, rest)) = line.split_once(':') else {
            continue;
        };
        let Ok(irq) = irq.trim().parse() else {
            continue;
        };
        // Counts, chip, number on the chip, and then who handles it.
        let Some(action) = rest.split_whitespace().next_back() else {
            continue;
        };
        if owner.has(irq, action, device)
            && let Some(queue) = queue_of_action(action)
        {
            of_queues.entry(queue).or_insert(irq);
        }
    }
    of_queues
}

/// The receive queue that an interrupt's name tells of: `virtio0-input.0`,
/// `eth0-rx-0`, `i40e-eth0-TxRx-0`, `eth0-Tx-Rx-0`, `mlx5_comp0@pci:...`.
fn queue_of_action(action: &str) -> Option<u32> {
    let name = action.split('@').next()?.to_ascii_lowercase();
    let kind = name.trim_end_matches(|digit: char| digit.is_ascii_digit());
    // Flow director: filters of Intel's cards, no queue of the device.
    let receives = ["rx", "input", "comp"].iter().any(|word| {
        kind.trim_end_matches(['-', '.', '_'])
            .split(['-', '.', '_'])
            .any(|part| part == *word || part == "txrx" || part == "rxtx")
    });
    if !receives || kind.contains("fdir") {
        return None;
    }
    name[kind.len()..].parse().ok()
}

/// The one CPU that an interrupt goes to.
fn interrupt_cpu(proc: &Path, irq: u32) -> Option<usize> {
    let directory = proc.join("irq").join(irq.to_string());
    let read = |file: &str| {
        let text = fs::read_to_string(directory.join(file)).ok()?;
        cpus_of_list(&text).filter(|cpus| !cpus.is_empty())
    };
    only(read("effective_affinity_list").or_else(|| read("smp_affinity_list"))?)
}

/// The one CPU that packets of a queue are steered to by software.
fn rps_cpu(directory: &Path, queue: u32) -> Option<usize> {
    let file = directory.join(format!("queues/rx-{queue}/rps_cpus"));
    only(cpus_of_mask(&fs::read_to_string(file).ok()?)?)
}

fn only(cpus: Vec<usize>) -> Option<usize> {
    match cpus.as_slice() {
        [cpu] => Some(*cpu),
        _ => None,
    }
}

/// The CPUs of this machine that run.
///
/// # Errors
/// They cannot be read.
pub fn online_cpus() -> Result<Vec<usize>> {
    let path = "/sys/devices/system/cpu/online";
    let text = fs::read_to_string(path).with_context(|| format!("{path} cannot be read"))?;
    cpus_of_list(&text).with_context(|| format!("{path} says `{}`", text.trim()))
}

/// `0-2,5` as the kernel writes it.
fn cpus_of_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

/// `00000001,00000003`: 32 CPUs a group, the highest group first.
pub fn cpus_of_mask(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for (group, bits) in text.trim().rsplit(',').enumerate() {
        let bits = u32::from_str_radix(bits, 16).ok()?;
        cpus.extend(
            (0..32)
                .filter(|bit| bits >> bit & 1 == 1)
                .map(|bit| group * 32 + bit),
        );
    }
    Some(cpus)
}

/// The mask of CPUs as the kernel reads it.
#[must_use]
pub fn mask_of_cpus(cpus: &[usize]) -> String {
    let groups = cpus.iter().max().map_or(1, |highest| highest / 32 + 1);
    let mut bits = vec![0_u32; groups];
    for cpu in cpus {
        bits[cpu / 32] |= 1 << (cpu % 32);
    }
    let groups: Vec<String> = bits
        .iter()
        .rev()
        .map(|bits| format!("{bits:08x}"))
        .collect();
    groups.join(",")
}

/// Packets that each queue of a device received, as its driver counts them.
/// Empty if it does not, or if `ethtool` is not installed.
#[must_use]
pub fn driver_packets(device: &str) -> BTreeMap<u32, u64> {
    let output = Command::new("ethtool")
        .args(["-S", device])
        .stdin(Stdio::null())
        .output();
    output.map_or_else(
        |_| BTreeMap::new(),
        |output| packets_of_statistics(&String::from_utf8_lossy(&output.stdout)),
    )
}

/// The names that drivers give to the packets of receive queue `#`.
const PACKET_COUNTERS: [&str; 7] = [
    // igb, ixgbe, hv_netvsc
    "rx_queue_#_packets",
    // virtio_net, mlx5
    "rx#_packets",
    // i40e, iavf
    "rx-#.packets",
    "rx_#_packets",
    // ena
    "queue_#_rx_cnt",
    // gve
    "rx_packets[#]",
    // bnxt
    "[#]: rx_ucast_packets",
];

/// By queue, from the text of `ethtool -S`.
fn packets_of_statistics(text: &str) -> BTreeMap<u32, u64> {
    let mut packets = BTreeMap::new();
    for line in text.lines() {
        let Some((name, count)) = line.trim().rsplit_once(':') else {
            continue;
        };
        let digits = |character: char| character.is_ascii_digit();
        let Some(start) = name.find(digits) else {
            continue;
        };
        let length = name[start..].find(|end| !digits(end));
        let end = length.map_or(name.len(), |length| start + length);
        let kind = format!("{}#{}", &name[..start], &name[end..]);
        if PACKET_COUNTERS.contains(&kind.as_str())
            && let (Ok(queue), Ok(count)) = (name[start..end].parse(), count.trim().parse())
        {
            packets.insert(queue, count);
        }
    }
    packets
}

/// Packets that each CPU took from devices' queues, whatever the device.
///
/// # Errors
/// It cannot be read.
pub fn cpu_packets(sources: &Sources) -> Result<BTreeMap<usize, u64>> {
    let text = fs::read_to_string(sources.proc.join("net/softnet_stat"))
        .context("/proc/net/softnet_stat cannot be read")?;
    Ok(packets_of_softnet(&text))
}

/// One line a CPU: column 0 counts the packets, column 12 is the CPU (since
/// Linux 5.10; before that the lines stand in the order of the CPUs online), see
/// softnet_seq_show in net/core/net-procfs.c.
fn packets_of_softnet(text: &str) -> BTreeMap<usize, u64> {
    let mut packets = BTreeMap::new();
    for (line_number, line) in text.lines().enumerate() {
        let words = line.split_whitespace();
        let numbers: Vec<Option<u64>> = words
            .map(|word| u64::from_str_radix(word, 16).ok())
            .collect();
        if let Some(Some(count)) = numbers.first() {
            let cpu = numbers.get(12).copied().flatten();
            packets.insert(cpu.map_or(line_number, |cpu| cpu as usize), *count);
        }
    }
    packets
}

fn driver(directory: &Path) -> String {
    let link = fs::read_link(directory.join("device/driver"));
    let name = link.ok().and_then(|link| {
        link.file_name()
            .map(|name| name.to_string_lossy().into_owned())
    });
    name.unwrap_or_default()
}

fn names(directory: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(directory)
        .with_context(|| format!("{} cannot be read", directory.display()))?;
    let mut names: Vec<String> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    Ok(names)
}

#[cfg(test)]
#[path = "nic_tests.rs"]
mod tests;
