//! Where each worker runs, decided once at the start.
#![forbid(unsafe_code)]

use std::fmt;
use std::path::Path;

use crate::config::{Pin, Workers};
use crate::host::{self, NicError, Queue};

/// The place of one worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The CPU that it is pinned to.
    pub cpu: Option<usize>,
    /// The receive queues that this CPU handles, with `pin = "nic:..."`.
    pub queues: Vec<Queue>,
}

impl Place {
    /// The numbers of its queues.
    #[must_use]
    pub fn queue_numbers(&self) -> Vec<u32> {
        self.queues.iter().map(|queue| queue.queue).collect()
    }

    /// The interrupts of its queues.
    #[must_use]
    pub fn irqs(&self) -> Vec<u32> {
        self.queues.iter().filter_map(|queue| queue.irq).collect()
    }
}

/// Why the workers cannot be where the configuration wants them.
#[derive(Debug, thiserror::Error)]
pub enum PlacementError {
    /// The device's queues cannot be followed.
    #[error("workers.pin: {0}")]
    Nic(#[from] NicError),
    /// This process may not run where packets come in.
    #[error(
        "workers.pin: {device} has queues on CPUs {missing}, and gate may run on {allowed} only; let \
         it run there (CPUAffinity=, AllowedCPUs=, taskset), or move the queues' interrupts"
    )]
    NotAllowed {
        /// The device.
        device: String,
        /// CPUs of queues.
        missing: Numbers,
        /// CPUs of this process.
        allowed: Numbers,
    },
    /// The configured number does not fit.
    #[error(
        "workers.count is {count}, but {cpus} CPUs handle the queues of {device}: leave it at \"auto\""
    )]
    Count {
        /// As configured.
        count: usize,
        /// CPUs of queues.
        cpus: usize,
        /// The device.
        device: String,
    },
}

/// The places of all workers, by their number: at least one.
///
/// # Errors
/// See [`PlacementError`].
pub fn places(workers: &Workers) -> Result<Vec<Place>, PlacementError> {
    let allowed = host::allowed_cpus().unwrap_or_default();
    let queues = match &workers.pin {
        Pin::Nic(device) => host::read_queues(Path::new("/"), device)?,
        _ => Vec::new(),
    };
    choose(workers, &allowed, queues)
}

fn choose(
    workers: &Workers,
    allowed: &[usize],
    queues: Vec<Queue>,
) -> Result<Vec<Place>, PlacementError> {
    let count = workers.count.unwrap_or(1);
    let place = |cpu| Place {
        cpu,
        queues: Vec::new(),
    };
    Ok(match &workers.pin {
        Pin::None => vec![place(None); count],
        Pin::Cpus if allowed.is_empty() => vec![place(None); count],
        Pin::Cpus => {
            let cpus = allowed.iter().cycle().take(count);
            cpus.map(|cpu| place(Some(*cpu))).collect()
        }
        Pin::List(cpus) => cpus.iter().map(|cpu| place(Some(*cpu))).collect(),
        Pin::Nic(device) => {
            let places = by_cpu(queues);
            check(device, workers.count, allowed, &places)?;
            places
        }
    })
}

/// One place for each CPU, in the order of the queues.
fn by_cpu(queues: Vec<Queue>) -> Vec<Place> {
    let mut places: Vec<Place> = Vec::new();
    for queue in queues {
        match places.iter_mut().find(|place| place.cpu == Some(queue.cpu)) {
            Some(place) => place.queues.push(queue),
            None => places.push(Place {
                cpu: Some(queue.cpu),
                queues: vec![queue],
            }),
        }
    }
    places
}

fn check(
    device: &str,
    count: Option<usize>,
    allowed: &[usize],
    places: &[Place],
) -> Result<(), PlacementError> {
    let cpus = places.iter().filter_map(|place| place.cpu);
    let missing: Vec<usize> = cpus.filter(|cpu| !allowed.contains(cpu)).collect();
    if !missing.is_empty() {
        return Err(PlacementError::NotAllowed {
            device: device.to_owned(),
            missing: Numbers(missing),
            allowed: Numbers(allowed.to_vec()),
        });
    }
    match count {
        Some(count) if count != places.len() => Err(PlacementError::Count {
            count,
            cpus: places.len(),
            device: device.to_owned(),
        }),
        _ => Ok(()),
    }
}

/// Tells the log which worker serves which queues.
pub fn log(pin: &Pin, places: &[Place]) {
    let Pin::Nic(device) = pin else { return };
    for (worker, place) in places.iter().enumerate() {
        let (cpu, queues) = (place.cpu.unwrap_or_default(), place.queue_numbers());
        tracing::info!(worker, cpu, device, ?queues, irqs = ?place.irqs(), "queues of the worker");
        if queues.len() > 1 {
            tracing::warn!(
                cpu,
                device,
                ?queues,
                "one CPU handles several queues: one worker serves them; spread their interrupts to \
                 have more"
            );
        }
    }
}

/// Numbers as people list them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbers(pub Vec<usize>);

impl fmt::Display for Numbers {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(usize::to_string).collect();
        out.write_str(&numbers.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(queue: u32, cpu: usize) -> Queue {
        Queue {
            queue,
            irq: Some(100 + queue),
            cpu,
        }
    }

    fn nic(count: Option<usize>) -> Workers {
        Workers {
            count,
            pin: Pin::Nic("eth0".into()),
        }
    }

    fn cpus(pin: Pin, count: usize, allowed: &[usize]) -> Vec<Option<usize>> {
        let count = Some(count);
        let places = choose(&Workers { count, pin }, allowed, Vec::new()).unwrap();
        places.into_iter().map(|place| place.cpu).collect()
    }

    #[test]
    fn without_a_device_the_configuration_says_where() {
        assert_eq!(cpus(Pin::None, 2, &[0]), [None, None]);
        assert_eq!(cpus(Pin::Cpus, 3, &[4, 6]), [Some(4), Some(6), Some(4)]);
        assert_eq!(cpus(Pin::Cpus, 1, &[]), [None]);
        assert_eq!(cpus(Pin::List(vec![3, 1]), 2, &[0]), [Some(3), Some(1)]);
    }

    #[test]
    fn each_cpu_of_a_queue_gets_a_worker() {
        let queues = vec![queue(0, 2), queue(1, 5), queue(2, 2)];
        let places = choose(&nic(None), &[1, 2, 5], queues).unwrap();
        assert_eq!(places.len(), 2);
        assert_eq!((places[0].cpu, places[1].cpu), (Some(2), Some(5)));
        assert_eq!(places[0].queue_numbers(), [0, 2]);
        assert_eq!(places[0].irqs(), [100, 102]);
        assert_eq!(places[1].queue_numbers(), [1]);
    }

    #[test]
    fn a_count_or_an_affinity_that_does_not_fit_is_told_with_the_numbers() {
        let queues = || vec![queue(0, 2), queue(1, 5)];
        assert!(choose(&nic(Some(2)), &[2, 5], queues()).is_ok());
        let error = choose(&nic(Some(3)), &[2, 5], queues()).unwrap_err();
        assert!(error.to_string().contains("is 3, but 2 CPUs"), "{error}");
        let error = choose(&nic(None), &[0, 2], queues()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("CPUs 5, and gate may run on 0, 2"), "{text}");
    }
}
