//! What a figure is worth nothing without.

use std::fs;

use serde::{Deserialize, Serialize};

/// The machine, as far as it bears on a figure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Facts {
    /// `uname -r`.
    pub kernel: String,
    /// CPUs that this process may use.
    pub cpus: usize,
    /// The first CPU's name.
    pub cpu_model: String,
    /// Congestion control that every socket starts with.
    pub congestion_control: String,
}

impl Facts {
    /// This machine.
    #[must_use]
    pub fn of_this_machine() -> Self {
        Self {
            kernel: file("/proc/sys/kernel/osrelease"),
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            cpu_model: cpu_model(&file("/proc/cpuinfo")),
            congestion_control: file("/proc/sys/net/ipv4/tcp_congestion_control"),
        }
    }

    /// One line for people.
    #[must_use]
    pub fn line(&self) -> String {
        format!(
            "Linux {}, {} x {}, congestion control {}",
            self.kernel, self.cpus, self.cpu_model, self.congestion_control
        )
    }
}

fn file(path: &str) -> String {
    match fs::read_to_string(path) {
        Ok(text) => text.trim().to_owned(),
        Err(error) => format!("{path}: {error}"),
    }
}

fn cpu_model(cpuinfo: &str) -> String {
    let name = cpuinfo.lines().find(|line| line.starts_with("model name"));
    let name = name.and_then(|line| line.split_once(':'));
    name.map_or("unknown CPU", |(_, name)| name.trim())
        .to_owned()
}
