//! The network between load and gate under `--nic`.
//!
//! | command line | gate's end | load's and backend's end |
//! |---|---|---|
//! | no `--nic` | loopback | loopback |
//! | `--nic veth` | a veth device in a namespace of its own | its other end in another one |
//! | `--nic DEV --peer-namespace NAME` | the device DEV, here | whatever has an address of DEV's network in the namespace NAME |
//!
//! The last one is how a real card is measured with one machine: two of its
//! ports (or two cards) are cabled or on one switch, and one of them is moved:
//!
//! ```text
//! ip netns add load
//! ip link set eth1 netns load
//! ip -n load address add 192.0.2.2/24 dev eth1
//! ip -n load link set eth1 up
//! gate-bench run --nic eth0 --peer-namespace load
//! ```
//!
//! Without a namespace the kernel would pass what one local address sends to
//! another one over loopback, and the card would see none of it. Load from another
//! machine is not supported.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd as _, BorrowedFd};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::namespace::{Namespace, inside, ip};
use super::nic::{Device, Queue, Sources, online_cpus};
use super::veth::{self, Pair};

/// What `--nic` calls the pair that the bench makes.
pub const VETH: &str = "veth";
const CONGESTION_CONTROL: &str = "/proc/sys/net/ipv4/tcp_congestion_control";

/// A way from load to gate that is not loopback. What the bench made of it is
/// gone when it is dropped; gate and load must have ended before.
#[derive(Debug)]
pub struct Network {
    /// Where gate and its peers listen.
    pub gate_address: IpAddr,
    /// Where the backend listens and clients come from.
    pub load_address: IpAddr,
    /// Gate's end: its queues, and the CPU of each.
    pub device: Device,
    /// How the two ends are apart, in one line.
    pub about: String,
    ends: Ends,
}

#[derive(Debug)]
enum Ends {
    Made(Pair),
    Found { load: Namespace },
}

impl Network {
    /// Makes or finds what `--nic` and `--peer-namespace` ask for. CPUs of which
    /// there are none given are all of the machine's.
    ///
    /// # Errors
    /// What is missing, and what to do.
    pub fn open(
        nic: &str,
        peer_namespace: Option<&str>,
        gate_cpus: &[usize],
        load_cpus: &[usize],
    ) -> Result<Self> {
        match (nic, peer_namespace) {
            (VETH, Some(_)) => bail!(
                "--nic veth makes its own namespaces: leave out --peer-namespace, or name a device"
            ),
            (VETH, None) => Self::make(gate_cpus, load_cpus),
            (device, Some(namespace)) => Self::find(device, namespace),
            (device, None) => {
                Device::read(&Sources::default(), device)?;
                bail!(
                    "--nic {device} needs --peer-namespace NAME, a network namespace with the other \
                     end of the wire: what this machine sends to its own address goes over loopback, \
                     not through {device}. `--nic veth` makes a virtual device with both ends"
                )
            }
        }
    }

    fn make(gate_cpus: &[usize], load_cpus: &[usize]) -> Result<Self> {
        let all = online_cpus()?;
        let or_all = |cpus: &[usize]| {
            if cpus.is_empty() {
                all.clone()
            } else {
                cpus.to_vec()
            }
        };
        for cpu in gate_cpus.iter().chain(load_cpus) {
            if !all.contains(cpu) {
                bail!("CPU {cpu} does not run; there are: {all:?}");
            }
        }
        let pair = Pair::make(&or_all(gate_cpus), &or_all(load_cpus))?;
        Ok(Self {
            gate_address: Ipv4Addr::from(veth::GATE_ADDRESS).into(),
            load_address: Ipv4Addr::from(veth::LOAD_ADDRESS).into(),
            device: Device {
                name: veth::DEVICE.to_owned(),
                driver: VETH.to_owned(),
                queues: pair.queues.clone(),
            },
            about: format!(
                "a veth pair between the namespaces {} and {}",
                pair.gate.name(),
                pair.load.name()
            ),
            ends: Ends::Made(pair),
        })
    }

    fn find(device: &str, namespace: &str) -> Result<Self> {
        let device = Device::read(&Sources::default(), device)?;
        let name = &device.name;
        let load = Namespace::open(namespace)?;
        let ours = ip(None, &["-json", "address", "show", "dev", name])?;
        let theirs = ip(Some(namespace), &["-json", "address", "show"])?;
        let ours = addresses(&ours)?;
        let theirs = addresses(&theirs)?;
        let Some((gate_address, load_address)) = on_one_network(&ours, &theirs) else {
            bail!(
                "no address of {name} here is on one network with an address in the namespace \
                 {namespace}: add them with `ip address add`"
            );
        };
        for (place, to, expected) in [
            (None, load_address, Some(name)),
            (Some(namespace), gate_address, None),
        ] {
            let route = ip(place, &["-json", "route", "get", &to.to_string()])?;
            let by = route_device(&route)?;
            if by == "lo" || expected.is_some_and(|name| *name != by) {
                bail!("packets to {to} would go through {by}, not through {name}: see `ip route`");
            }
        }
        // Load and backend would send by other rules than the proxies.
        let (here, there) = (
            congestion_control(),
            inside(Some(load.as_fd()), congestion_control)?,
        );
        let (here, there) = (here?, there?);
        ensure!(
            here == there,
            "congestion control is {here} here and {there} in the namespace {namespace}: `ip netns \
             exec {namespace} sysctl -w net.ipv4.tcp_congestion_control={here}`"
        );
        Ok(Self {
            gate_address,
            load_address,
            about: format!("{name} here, {load_address} in the namespace {namespace}"),
            device,
            ends: Ends::Found { load },
        })
    }

    /// The namespace that gate and its peers run in, if it is not this one.
    #[must_use]
    pub fn gate_namespace(&self) -> Option<BorrowedFd<'_>> {
        match &self.ends {
            Ends::Made(pair) => Some(pair.gate.as_fd()),
            Ends::Found { .. } => None,
        }
    }

    /// The namespace that load and backend run in.
    #[must_use]
    pub fn load_namespace(&self) -> BorrowedFd<'_> {
        match &self.ends {
            Ends::Made(pair) => pair.load.as_fd(),
            Ends::Found { load } => load.as_fd(),
        }
    }

    /// The CPUs that gate's workers and its peers are to be bound to: those of the
    /// queues, in the queues' order.
    ///
    /// # Errors
    /// No queue has a CPU of its own.
    pub fn worker_cpus(&self) -> Result<Vec<usize>> {
        let cpus = distinct_cpus(&self.device.queues);
        if cpus.is_empty() {
            let name = &self.device.name;
            bail!(
                "no queue of {name} has a CPU of its own. Bind each interrupt of it to one CPU \
                 (/proc/irq/N/smp_affinity_list); without interrupts, steer each queue to one CPU \
                 (/sys/class/net/{name}/queues/rx-N/rps_cpus)"
            );
        }
        Ok(cpus)
    }

    /// What to know before the figures are believed.
    #[must_use]
    pub fn notes(&self, load_cpus: &[usize]) -> Vec<String> {
        notes(&self.device, load_cpus)
    }
}

/// Of sockets that are made in this thread's network namespace.
fn congestion_control() -> std::io::Result<String> {
    let name = fs::read_to_string(CONGESTION_CONTROL)?;
    Ok(name.trim().to_owned())
}

fn notes(device: &Device, load_cpus: &[usize]) -> Vec<String> {
    let name = &device.name;
    let mut notes = vec![format!(
        "packets of {name} are handled in interrupts: what of it is done while a CPU is idle is in \
         nobody's CPU time"
    )];
    let homeless: Vec<String> = device
        .queues
        .iter()
        .filter(|row| row.cpu.is_none())
        .map(|row| row.queue.to_string())
        .collect();
    if !homeless.is_empty() {
        let queues = homeless.join(", ");
        notes.push(format!("{name}: no CPU of its own for queue {queues}"));
    }
    let cpus = distinct_cpus(&device.queues);
    if cpus.len() + homeless.len() < device.queues.len() {
        notes.push(format!(
            "{name}: {} queues on {} CPUs",
            device.queues.len(),
            cpus.len()
        ));
    }
    for cpu in cpus.iter().filter(|cpu| load_cpus.contains(cpu)) {
        notes.push(format!(
            "CPU {cpu} has a queue of {name} and the load: they share it"
        ));
    }
    notes
}

fn distinct_cpus(queues: &[Queue]) -> Vec<usize> {
    let mut cpus = Vec::new();
    for cpu in queues.iter().filter_map(|queue| queue.cpu) {
        if !cpus.contains(&cpu) {
            cpus.push(cpu);
        }
    }
    cpus
}

/// Addresses with the length of their network's prefix, from `ip -json address`.
fn addresses(json: &str) -> Result<Vec<(IpAddr, u8)>> {
    let devices: Vec<Value> = serde_json::from_str(json).context("`ip` printed no JSON")?;
    let all = devices
        .iter()
        .filter_map(|device| device["addr_info"].as_array());
    let address = |info: &Value| {
        let address = info["local"].as_str()?.parse().ok()?;
        Some((address, u8::try_from(info["prefixlen"].as_u64()?).ok()?))
    };
    // Those of one link would need its name at every use.
    let usable = |(address, _): &(IpAddr, u8)| match address {
        IpAddr::V4(address) => !address.is_loopback() && !address.is_link_local(),
        IpAddr::V6(address) => !address.is_loopback() && !address.is_unicast_link_local(),
    };
    Ok(all.flatten().filter_map(address).filter(usable).collect())
}

/// The first pair of addresses that reach each other without a router.
fn on_one_network(ours: &[(IpAddr, u8)], theirs: &[(IpAddr, u8)]) -> Option<(IpAddr, IpAddr)> {
    ours.iter().find_map(|(our, length)| {
        let near = theirs.iter().find(|(their, their_length)| {
            their != our
                && their_length == length
                && network_of(*their, *length) == network_of(*our, *length)
        });
        near.map(|(their, _)| (*our, *their))
    })
}

fn network_of(address: IpAddr, length: u8) -> (bool, u128) {
    let (bits, width) = match address {
        IpAddr::V4(address) => (u128::from(address.to_bits()), 32_u32),
        IpAddr::V6(address) => (address.to_bits(), 128),
    };
    let host = width.saturating_sub(u32::from(length));
    (address.is_ipv4(), bits.checked_shr(host).unwrap_or(0))
}

/// The device of the route that `ip -json route get` found.
fn route_device(json: &str) -> Result<String> {
    let routes: Vec<Value> = serde_json::from_str(json).context("`ip` printed no JSON")?;
    let device = routes.first().and_then(|route| route["dev"].as_str());
    Ok(device.context("`ip route get` names no device")?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_ends_are_found_by_their_network() {
        let ours = r#"[{"ifname":"eth0","addr_info":[
            {"family":"inet","local":"10.0.0.1","prefixlen":24},
            {"family":"inet6","local":"fe80::1","prefixlen":64},
            {"family":"inet6","local":"2001:db8::1","prefixlen":64}]}]"#;
        let ours = addresses(ours).expect("read");
        assert_eq!(ours.len(), 2, "{ours:?}");
        let find = |theirs: &[(&str, u8)]| {
            let theirs: Vec<(IpAddr, u8)> = theirs
                .iter()
                .map(|(address, length)| (address.parse().expect("an address"), *length))
                .collect();
            on_one_network(&ours, &theirs).map(|(_, their)| their.to_string())
        };
        assert_eq!(
            find(&[("10.0.1.2", 24), ("10.0.0.2", 24)]).as_deref(),
            Some("10.0.0.2")
        );
        assert_eq!(find(&[("2001:db8::2", 64)]).as_deref(), Some("2001:db8::2"));
        assert_eq!(find(&[("10.0.0.1", 24)]), None, "the very address");
        assert_eq!(find(&[("10.0.0.2", 16)]), None, "another mask");
        assert_eq!(find(&[("10.1.0.2", 24), ("2001:db8:0:1::2", 64)]), None);
    }

    #[test]
    fn the_route_tells_whether_the_device_is_used() {
        let route = r#"[{"dst":"10.0.0.2","dev":"eth0","prefsrc":"10.0.0.1","flags":[]}]"#;
        assert_eq!(route_device(route).expect("read"), "eth0");
        assert!(route_device("[{}]").is_err() && route_device("").is_err());
    }

    #[test]
    fn what_cannot_be_measured_is_refused_with_the_way_out() {
        let refused = |nic, namespace| {
            let error = Network::open(nic, namespace, &[], &[]).expect_err("refused");
            error.to_string()
        };
        assert!(refused("lo", None).contains("--peer-namespace NAME"));
        assert!(refused("veth", Some("x")).contains("leave out --peer-namespace"));
        assert!(refused("lo", Some("gate-bench-none")).contains("`gate-bench-none`"));
        assert!(refused("no-such-device", None).contains("there are: "));
        let error = Network::open(VETH, None, &[0], &[1_000_000]).expect_err("no such CPU");
        assert!(
            error.to_string().contains("CPU 1000000 does not run"),
            "{error}"
        );
    }

    #[test]
    fn workers_are_pinned_where_queues_are_handled() {
        let row = |queue, cpu| Queue {
            queue,
            irq: None,
            cpu,
        };
        let device = Device {
            name: "eth0".to_owned(),
            driver: String::new(),
            queues: vec![
                row(0, Some(3)),
                row(1, Some(1)),
                row(2, Some(3)),
                row(3, None),
            ],
        };
        assert_eq!(distinct_cpus(&device.queues), [3, 1]);
        assert_eq!(
            notes(&device, &[1, 2])[1..],
            [
                "eth0: no CPU of its own for queue 3",
                "eth0: 4 queues on 2 CPUs",
                "CPU 1 has a queue of eth0 and the load: they share it",
            ]
        );
        let queues = device.queues[..2].to_vec();
        assert_eq!(notes(&Device { queues, ..device }, &[]).len(), 1);
    }
}
