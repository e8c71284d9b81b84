//! The receive queues of a network device, and the CPU that handles each.
//!
//! Read from sysfs and procfs, without rights. What a queue's software steering
//! (RPS) says wins, as it does in the kernel; without it the queue's packets are
//! handled where its interrupt goes. A virtual device has no interrupts.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A receive queue that one CPU handles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    /// Its number.
    pub queue: u32,
    /// Its interrupt, if it has one.
    pub irq: Option<u32>,
    /// The CPU.
    pub cpu: usize,
}

/// Why the queues of a device cannot be followed.
#[derive(Debug, thiserror::Error)]
pub enum NicError {
    /// No device of this name.
    #[error("there is no network device `{device}` here; there are: {known}")]
    NoDevice {
        /// The name.
        device: String,
        /// The devices.
        known: String,
    },
    /// The device has no receive queue.
    #[error("{device} has no receive queue: name a device that packets come in at")]
    NoQueue {
        /// The device.
        device: String,
    },
    /// An interrupt may go to several CPUs, or to none that is known.
    #[error(
        "queue {queue} of {device} has no CPU of its own: its interrupt {irq} goes to CPUs `{cpus}`; \
         bind it to one (echo CPU >/proc/irq/{irq}/smp_affinity_list, or the driver's \
         set_irq_affinity, with irqbalance stopped), or steer the queue by rps_cpus"
    )]
    SharedInterrupt {
        /// The device.
        device: String,
        /// The queue.
        queue: u32,
        /// Its interrupt.
        irq: u32,
        /// As procfs lists them.
        cpus: String,
    },
    /// Software steering spreads the queue, or there is neither it nor an
    /// interrupt.
    #[error(
        "queue {queue} of {device} has no CPU of its own: no interrupt of it is known, and its \
         rps_cpus is `{mask}`; write the mask of one CPU to \
         /sys/class/net/{device}/queues/rx-{queue}/rps_cpus"
    )]
    NotSteered {
        /// The device.
        device: String,
        /// The queue.
        queue: u32,
        /// As sysfs says it.
        mask: String,
    },
    /// sysfs or procfs cannot be read.
    #[error("{path} cannot be read: {error}; mount sysfs and procfs, or pin workers otherwise")]
    Unreadable {
        /// The file or directory.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}

/// The receive queues of a device in the network namespace that sysfs shows, in
/// their order. `root` is `/`, but for tests.
///
/// # Errors
/// See [`NicError`]; each queue must have one CPU.
pub fn read_queues(root: &Path, device: &str) -> Result<Vec<Queue>, NicError> {
    let devices = root.join("sys/class/net");
    let directory = devices.join(device);
    if device.is_empty() || device.contains('/') || !directory.join("queues").is_dir() {
        return Err(NicError::NoDevice {
            device: device.to_owned(),
            known: names(&devices)?.join(", "),
        });
    }
    let mut numbers: Vec<u32> = names(&directory.join("queues"))?
        .iter()
        .filter_map(|name| name.strip_prefix("rx-")?.parse().ok())
        .collect();
    numbers.sort_unstable();
    if numbers.is_empty() {
        let device = device.to_owned();
        return Err(NicError::NoQueue { device });
    }
    let interrupts = read(&root.join("proc/interrupts"))?;
    let owner = Owner::of(&directory, device);
    let resolve = |queue| {
        let irq = queue_irq(&interrupts, &owner, queue);
        let cpu = queue_cpu(root, device, queue, irq)?;
        Ok(Queue { queue, irq, cpu })
    };
    numbers.into_iter().map(resolve).collect()
}

fn queue_cpu(root: &Path, device: &str, queue: u32, irq: Option<u32>) -> Result<usize, NicError> {
    let rps = format!("sys/class/net/{device}/queues/rx-{queue}/rps_cpus");
    // Not there in a kernel without RPS.
    let mask = fs::read_to_string(root.join(rps)).unwrap_or_default();
    let mask = mask.trim();
    let steered_to = cpus_of_mask(mask).unwrap_or_default();
    match (steered_to.as_slice(), irq) {
        ([cpu], _) => Ok(*cpu),
        ([], Some(irq)) => irq_cpu(root, irq).map_err(|cpus| NicError::SharedInterrupt {
            device: device.to_owned(),
            queue,
            irq,
            cpus,
        }),
        _ => Err(NicError::NotSteered {
            device: device.to_owned(),
            queue,
            mask: mask.to_owned(),
        }),
    }
}

/// The one CPU of an interrupt; else what procfs says.
fn irq_cpu(root: &Path, irq: u32) -> Result<usize, String> {
    let directory = root.join("proc/irq").join(irq.to_string());
    let read = |file| fs::read_to_string(directory.join(file)).unwrap_or_default();
    // Where it goes; where it may go, if the kernel does not tell that.
    let mut cpus = read("effective_affinity_list");
    if cpus.trim().is_empty() {
        cpus = read("smp_affinity_list");
    }
    let cpus = cpus.trim();
    cpus.parse().map_err(|_| cpus.to_owned())
}

/// What tells a device's interrupts from those of others.
struct Owner<'a> {
    device: &'a str,
    /// Its interrupts, if the bus tells.
    irqs: Option<Vec<u32>>,
    /// Its name on the bus, such as `virtio2`.
    bus_name: Option<String>,
}

impl<'a> Owner<'a> {
    fn of(directory: &Path, device: &'a str) -> Self {
        let mut owner = Self {
            device,
            irqs: None,
            bus_name: None,
        };
        // A virtual device is on no bus.
        if let Ok(place) = fs::canonicalize(directory.join("device")) {
            let listed = |at: &Path| names(&at.join("msi_irqs")).ok();
            // A virtio device has them at the PCI device that it is on.
            let irqs = listed(&place).or_else(|| listed(place.parent()?));
            owner.irqs = irqs.map(|irqs| irqs.iter().filter_map(|irq| irq.parse().ok()).collect());
            let name = place.file_name();
            owner.bus_name = name.map(|name| name.to_string_lossy().into_owned());
        }
        owner
    }

    fn has(&self, irq: u32, action: &str) -> bool {
        if let Some(irqs) = &self.irqs {
            return irqs.contains(&irq);
        }
        let mut words = action.split(['-', '@', ':', '.']);
        words.any(|word| word == self.device || Some(word) == self.bus_name.as_deref())
    }
}

/// The interrupt of a receive queue, by the text of `/proc/interrupts`.
fn queue_irq(interrupts: &str, owner: &Owner<'_>, queue: u32) -> Option<u32> {
    interrupts.lines().find_map(|line| {
        let (irq, rest) = line.split_once(':')?;
        let irq = irq.trim().parse().ok()?;
        // Counts, chip, number on the chip, and then who handles it.
        let action = rest.split_whitespace().next_back()?;
        (owner.has(irq, action) && queue_of_action(action) == Some(queue)).then_some(irq)
    })
}

/// The receive queue that an interrupt's name tells of: `virtio0-input.0`,
/// `eth0-rx-0`, `i40e-eth0-TxRx-0`, `eth0-Tx-Rx-0`, `mlx5_comp0@pci:...`.
fn queue_of_action(action: &str) -> Option<u32> {
    let name = action.split('@').next()?.to_ascii_lowercase();
    let kind = name.trim_end_matches(|digit: char| digit.is_ascii_digit());
    let mut parts = kind.split(['-', '.', '_']);
    let receives = parts.any(|part| matches!(part, "rx" | "input" | "comp" | "txrx" | "rxtx"));
    // Flow director: filters of Intel's cards, no queue of the device.
    if !receives || kind.contains("fdir") {
        return None;
    }
    name[kind.len()..].parse().ok()
}

/// `00000001,00000003`: 32 CPUs a group, the highest group first.
fn cpus_of_mask(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for (group, bits) in text.rsplit(',').enumerate() {
        let bits = u32::from_str_radix(bits, 16).ok()?;
        let of_group = (0..32).filter(|bit| bits >> bit & 1 == 1);
        cpus.extend(of_group.map(|bit| group * 32 + bit));
    }
    Some(cpus)
}

fn read(path: &Path) -> Result<String, NicError> {
    fs::read_to_string(path).map_err(|error| NicError::Unreadable {
        path: path.to_owned(),
        error,
    })
}

fn names(directory: &Path) -> Result<Vec<String>, NicError> {
    let entries = fs::read_dir(directory).map_err(|error| NicError::Unreadable {
        path: directory.to_owned(),
        error,
    })?;
    let mut names: Vec<String> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine of files.
    struct Machine(tempfile::TempDir);

    impl Machine {
        /// With a device `eth0` of two queues and nothing else.
        fn new() -> Self {
            let machine = Self(tempfile::tempdir().unwrap());
            machine.write("sys/class/net/eth0/queues/rx-0/rps_cpus", "0\n");
            machine.write("sys/class/net/eth0/queues/rx-1/rps_cpus", "0\n");
            machine.write("sys/class/net/eth0/queues/tx-0/xps_cpus", "0\n");
            machine.write("proc/interrupts", "           CPU0       CPU1\n");
            machine
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn read(&self, device: &str) -> Result<Vec<(u32, Option<u32>, usize)>, String> {
            let queues = read_queues(self.0.path(), device).map_err(|error| error.to_string())?;
            let plain = |queue: Queue| (queue.queue, queue.irq, queue.cpu);
            Ok(queues.into_iter().map(plain).collect())
        }
    }

    const INTERRUPTS: &str = "           CPU0       CPU1
  1:          9          0   IO-APIC   1-edge      i8042
 24:       1200          0  PCI-MSIX-0000:00:02.0   0-edge      virtio1-config
 25:         10         20  PCI-MSIX-0000:00:02.0   1-edge      virtio1-input.0
 26:         30         40  PCI-MSIX-0000:00:02.0   2-edge      virtio1-output.0
 27:         50         60  PCI-MSIX-0000:00:02.0   3-edge      virtio1-input.1
 28:         50         60  PCI-MSIX-0000:00:03.0   1-edge      virtio2-input.0
NMI:          0          0   Non-maskable interrupts
";

    #[test]
    fn interrupts_of_a_card_lead_to_their_cpus() {
        let machine = Machine::new();
        machine.write("proc/interrupts", INTERRUPTS);
        machine.write("sys/devices/pci/0000:00:02.0/virtio1/driver", "");
        for irq in ["24", "25", "26", "27"] {
            machine.write(&format!("sys/devices/pci/0000:00:02.0/msi_irqs/{irq}"), "");
        }
        let root = machine.0.path();
        std::os::unix::fs::symlink(
            root.join("sys/devices/pci/0000:00:02.0/virtio1"),
            root.join("sys/class/net/eth0/device"),
        )
        .unwrap();
        machine.write("proc/irq/25/effective_affinity_list", "3\n");
        machine.write("proc/irq/25/smp_affinity_list", "0-7\n");
        machine.write("proc/irq/27/smp_affinity_list", "2\n");
        let found = machine.read("eth0");
        assert_eq!(found, Ok(vec![(0, Some(25), 3), (1, Some(27), 2)]));
        // RPS takes the packets elsewhere before TCP sees them.
        machine.write("sys/class/net/eth0/queues/rx-1/rps_cpus", "00000010\n");
        let found = machine.read("eth0");
        assert_eq!(found, Ok(vec![(0, Some(25), 3), (1, Some(27), 4)]));
        machine.write("proc/irq/25/effective_affinity_list", "0-1\n");
        let error = machine.read("eth0").unwrap_err();
        for part in ["queue 0 of eth0", "`0-1`", "/proc/irq/25/smp_affinity_list"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_virtual_device_has_the_cpus_of_its_steering() {
        let machine = Machine::new();
        machine.write(
            "sys/class/net/eth0/queues/rx-0/rps_cpus",
            "00000001,00000000\n",
        );
        machine.write("sys/class/net/eth0/queues/rx-1/rps_cpus", "2\n");
        assert_eq!(machine.read("eth0"), Ok(vec![(0, None, 32), (1, None, 1)]));
        for mask in ["0", "3", "x"] {
            machine.write("sys/class/net/eth0/queues/rx-1/rps_cpus", mask);
            let error = machine.read("eth0").unwrap_err();
            assert!(error.contains("queue 1 of eth0"), "{error}");
            assert!(error.contains("eth0/queues/rx-1/rps_cpus"), "{error}");
        }
    }

    #[test]
    fn a_missing_device_is_told_with_those_that_there_are() {
        let machine = Machine::new();
        for bad in ["eth1", "", "../net/eth0", "."] {
            let error = machine.read(bad).unwrap_err();
            assert!(error.contains("there are: eth0"), "{error}");
        }
        machine.write("sys/class/net/lo/queues/tx-0/xps_cpus", "0");
        let error = machine.read("lo").unwrap_err();
        assert!(error.contains("no receive queue"), "{error}");
    }

    #[test]
    fn queues_are_known_by_the_names_of_their_interrupts() {
        let table = [
            ("virtio0-input.3", Some(3)),
            ("eth0-rx-1", Some(1)),
            ("i40e-eth0-TxRx-12", Some(12)),
            ("eth0-Tx-Rx-0", Some(0)),
            ("mlx5_comp5@pci:0000:00:04.0", Some(5)),
            ("virtio0-output.3", None),
            ("eth0-tx-1", None),
            ("i40e-0000:02:00.0:fdir-TxRx-0", None),
            ("eth0", None),
        ];
        for (action, queue) in table {
            assert_eq!(queue_of_action(action), queue, "{action}");
        }
    }
}
