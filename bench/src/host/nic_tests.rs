//! Devices as common drivers show them.

use std::os::unix::fs::symlink;

use super::*;

fn owned(irqs: &[u32]) -> Owner {
    Owner {
        irqs: Some(irqs.to_vec()),
        bus_name: None,
    }
}

#[test]
fn interrupts_of_common_drivers_are_told_apart() {
    let virtio = "           CPU0       CPU1       \n \
         33:     0     0 PCI-MSIX-0000:00:05.0   0-edge      virtio4-config\n \
         34:   193     0 PCI-MSIX-0000:00:05.0   1-edge      virtio4-input\n \
         37:     0     0 PCI-MSIX-0000:00:03.0   0-edge      virtio2-config\n \
         38:     0 22297 PCI-MSIX-0000:00:03.0   1-edge      virtio2-input.0\n \
         39: 17245     0 PCI-MSIX-0000:00:03.0   2-edge      virtio2-output.0\n \
         40:     0     7 PCI-MSIX-0000:00:03.0   3-edge      virtio2-input.1\n\
        LOC: 29833 29742   Local timer interrupts\nERR: 0\n";
    let of_virtio = queue_interrupts(virtio, "eth0", &owned(&[37, 38, 39, 40]));
    assert_eq!(of_virtio, BTreeMap::from([(0, 38), (1, 40)]));
    let by_name = Owner {
        irqs: None,
        bus_name: Some("virtio2".to_owned()),
    };
    assert_eq!(queue_interrupts(virtio, "eth0", &by_name), of_virtio);

    let table = [
        (" 50: 1 IR-PCI-MSI 524289-edge eth0-rx-3", Some(3)),
        (" 50: 1 IR-PCI-MSI 524289-edge eth0-tx-3", None),
        (" 50: 1 IR-PCI-MSI 1-edge eth0-TxRx-12", Some(12)),
        (" 50: 1 IR-PCI-MSI 1-edge i40e-eth0-TxRx-0", Some(0)),
        (
            " 50: 1 IR-PCI-MSI 1-edge i40e-0000:01:00.0:fdir-TxRx-0",
            None,
        ),
        (" 50: 1 IR-PCI-MSI 1-edge eth0-Tx-Rx-4", Some(4)),
        (" 50: 1 IR-PCI-MSI 1-edge eth0-rxtx-2", Some(2)),
        (" 50: 1 IR-PCI-MSI 1-edge ena-mgmnt@pci:0000:00:05.0", None),
        (
            " 50: 1 IR-PCI-MSIX 1-edge mlx5_comp7@pci:0000:01:00.0",
            Some(7),
        ),
        (
            " 50: 1 IR-PCI-MSIX 0-edge mlx5_async0@pci:0000:01:00.0",
            None,
        ),
        (" 50: 1 IR-PCI-MSI 1-edge eth0", None),
    ];
    for (line, queue) in table {
        let expected = queue.map(|queue| (queue, 50)).into_iter().collect();
        assert_eq!(
            queue_interrupts(line, "eth0", &owned(&[50])),
            expected,
            "{line}"
        );
        assert!(
            queue_interrupts(line, "eth0", &owned(&[51])).is_empty(),
            "{line}"
        );
    }
    let other = " 50: 1 PCI-MSI 1-edge eth01-rx-0\n 51: 1 PCI-MSI 1-edge eth0-rx-0";
    let by_device = queue_interrupts(other, "eth0", &Owner::default());
    assert_eq!(by_device, BTreeMap::from([(0, 51)]));
}

#[test]
fn sets_of_cpus_are_read_and_written_as_the_kernel_does() {
    assert_eq!(cpus_of_list("0-2,5\n"), Some(vec![0, 1, 2, 5]));
    assert_eq!(cpus_of_list("\n"), Some(vec![]));
    assert_eq!(cpus_of_list("x"), None);
    for (cpus, mask) in [
        (vec![], "00000000"),
        (vec![0, 1], "00000003"),
        (vec![31, 32, 65], "00000002,00000001,80000000"),
    ] {
        assert_eq!(mask_of_cpus(&cpus), mask);
        assert_eq!(cpus_of_mask(mask), Some(cpus));
    }
    assert_eq!(cpus_of_mask("3\n"), Some(vec![0, 1]));
    assert_eq!(cpus_of_mask("g"), None);
}

#[test]
fn packets_of_a_queue_have_many_names() {
    for counter in PACKET_COUNTERS {
        let text = format!(
            "NIC statistics:\n     rx_packets: 99\n     {}: 7\n     {}: 8\n",
            counter.replace('#', "0"),
            counter.replace('#', "11")
        );
        assert_eq!(
            packets_of_statistics(&text),
            BTreeMap::from([(0, 7), (11, 8)]),
            "{counter}"
        );
    }
    // Without an XDP program they stay 0, whatever comes in.
    let veth = "NIC statistics:\n     peer_ifindex: 5\n     rx_queue_0_xdp_packets: 0\n";
    assert!(packets_of_statistics(veth).is_empty());
    assert!(packets_of_statistics("     tx0_packets: 3\n     rx0_bytes: 9\n").is_empty());
}

#[test]
fn packets_of_a_cpu_are_in_softnet_stat() {
    let new = "020be68a 00000398 00000002 0 0 0 0 0 0 0 0 0 00000000 0 0\n\
               0000000a 00000569 00000002 0 0 0 0 0 0 0 0 0 00000003 0 0\n";
    assert_eq!(
        packets_of_softnet(new),
        BTreeMap::from([(0, 0x020b_e68a), (3, 10)])
    );
    let old = "00000005 0 0 0 0 0 0 0 0 0 0\n00000006 0 0 0 0 0 0 0 0 0 0\n";
    assert_eq!(packets_of_softnet(old), BTreeMap::from([(0, 5), (1, 6)]));
}

/// Folders in the place of sysfs and procfs.
struct Machine {
    directory: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a folder");
        let machine = Self { directory };
        machine.write("proc/interrupts", "CPU0 CPU1\n");
        machine.write("net/lo/queues/rx-0/rps_cpus", "0\n");
        machine
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.directory.path().join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(path, text).expect("written");
    }

    fn read(&self, device: &str) -> Result<Device> {
        let sources = Sources {
            devices: self.directory.path().join("net"),
            proc: self.directory.path().join("proc"),
        };
        Device::read(&sources, device)
    }
}

#[test]
fn a_queue_is_handled_where_its_interrupt_goes() {
    let machine = Machine::new();
    machine.write(
        "proc/interrupts",
        " 37: 0 0 PCI-MSIX 0-edge virtio2-config\n 38: 0 9 PCI-MSIX 1-edge virtio2-input.0\n \
         39: 0 9 PCI-MSIX 2-edge virtio2-input.1\n 40: 0 9 PCI-MSIX 3-edge virtio2-input.2\n",
    );
    for (irq, effective, wanted) in [
        (38, "1\n", "0-1\n"),
        (39, "\n", "0\n"),
        (40, "0-1\n", "0-1\n"),
    ] {
        machine.write(
            &format!("proc/irq/{irq}/effective_affinity_list"),
            effective,
        );
        machine.write(&format!("proc/irq/{irq}/smp_affinity_list"), wanted);
        machine.write(&format!("pci/0000:00:03.0/msi_irqs/{irq}"), "msix\n");
        // RPS of a queue with an interrupt hands on what that CPU received.
        machine.write(&format!("net/eth0/queues/rx-{}/rps_cpus", irq - 38), "2\n");
    }
    machine.write("net/eth0/queues/tx-0/xps_cpus", "0\n");
    machine.write("pci/0000:00:03.0/virtio2/modalias", "virtio\n");
    machine.write("drivers/virtio_net/bind", "");
    let at = |path: &str| machine.directory.path().join(path);
    symlink(at("pci/0000:00:03.0/virtio2"), at("net/eth0/device")).expect("linked");
    symlink(
        at("drivers/virtio_net"),
        at("pci/0000:00:03.0/virtio2/driver"),
    )
    .expect("linked");
    let device = machine.read("eth0").expect("read");
    assert_eq!(device.driver, "virtio_net");
    let row = |queue, irq, cpu| Queue { queue, irq, cpu };
    assert_eq!(
        device.queues,
        [
            row(0, Some(38), Some(1)),
            row(1, Some(39), Some(0)),
            row(2, Some(40), None)
        ]
    );
}

#[test]
fn a_queue_without_an_interrupt_is_handled_where_rps_says() {
    let machine = Machine::new();
    for (queue, mask) in [
        (0, "2\n"),
        (1, "00000000,00000001\n"),
        (2, "3\n"),
        (10, "0\n"),
    ] {
        machine.write(&format!("net/veth0/queues/rx-{queue}/rps_cpus"), mask);
    }
    let device = machine.read("veth0").expect("read");
    let cpus: Vec<_> = device
        .queues
        .iter()
        .map(|row| (row.queue, row.cpu))
        .collect();
    assert_eq!(cpus, [(0, Some(1)), (1, Some(0)), (2, None), (10, None)]);
    assert!(device.queues.iter().all(|row| row.irq.is_none()));
    assert_eq!(device.driver, "");
}

#[test]
fn a_device_that_is_none_is_told_of() {
    let machine = Machine::new();
    machine.write("net/sit0/queues/tx-0/xps_cpus", "0\n");
    let error = machine.read("eth7").expect_err("there is none").to_string();
    assert!(
        error.contains("`eth7`") && error.contains("lo, sit0"),
        "{error}"
    );
    assert!(machine.read("../net/lo").is_err());
    let error = machine.read("sit0").expect_err("no queue").to_string();
    assert!(error.contains("sit0 has no receive queue"), "{error}");
}
