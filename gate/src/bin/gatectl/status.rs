//! `gatectl status`: one screen.

use std::time::Duration;

use gate::control::api::{AcceptQueue, BackendHealth, Process, Status, WorkerLoad};

use crate::connections::listener_table;
use crate::output::{Output, Table, limit};
use crate::target::{Failure, Target, UNREACHABLE};

/// More workers than these are summed up in a line.
const WORKERS_SHOWN: usize = 8;

/// As many addresses of backends.
const ADDRESSES_SHOWN: usize = 4;

pub fn run(target: &Target, output: Output) -> Result<(), Failure> {
    output.print(&target.status()?, text)
}

pub fn text(status: &Status) -> String {
    let connections = &status.connections;
    let total = &connections.total;
    let mut lines = vec![
        ("instance", status.instance.clone()),
        ("state", state(status)),
        ("kernel plane", kernel(status)),
        (
            "sessions",
            format!("{} of {}", total.active, limit(total.limit.get())),
        ),
        (
            "pending",
            format!("{} of {}", total.pending, limit(status.pending_limit.get())),
        ),
        ("limited now", limited(status)),
    ];
    if let Some(process) = &status.process {
        if let Some(lowered) = process.lowered_to {
            let note = format!("max_connections to {lowered}: RLIMIT_NOFILE allows no more");
            lines.push(("lowered", note));
        }
        if let Some(waiting) = waiting(process) {
            lines.push(("waiting", waiting));
        }
        let refused: Vec<String> = process
            .rejected
            .iter()
            .map(|(reason, count)| format!("{reason} {count}"))
            .collect();
        let refused = if refused.is_empty() {
            "nobody".to_owned()
        } else {
            refused.join(", ")
        };
        lines.push(("refused", refused));
        if let (Some(open), Some(max)) = (process.open_fds, process.max_fds) {
            lines.push(("descriptors", format!("{open} of {max}")));
        }
        for queue in &process.accept_queues {
            let AcceptQueue {
                listener,
                length,
                limit,
            } = queue;
            lines.push(("accept queue", format!("{length} of {limit} at {listener}")));
        }
    }
    if status.runtime_limits > 0 {
        let until = match connections.kernel.state.as_str() {
            "active" => "a reboot loses it",
            _ => "the end of gate loses it",
        };
        lines.push((
            "set at runtime",
            format!(
                "{}; `gatectl limits export` makes it configuration; {until}",
                status.runtime_limits
            ),
        ));
    }
    let mut text = String::new();
    for (name, value) in lines {
        text += &format!("{name:<15} {value}\n");
    }
    let listeners = listener_table(&connections.kernel.listeners);
    if !listeners.is_empty() {
        text += &format!("\n{}", listeners.render());
    }
    if let Some(process) = &status.process {
        text += &backends(&process.backends);
        text += &workers(&process.worker_loads);
    }
    text
}

/// As a table; those that are up are summed up if there are many.
fn backends(backends: &[BackendHealth]) -> String {
    let addresses = || backends.iter().flat_map(|backend| &backend.addresses);
    let up = addresses().filter(|address| address.up).count();
    let all = addresses().count();
    let few = all <= ADDRESSES_SHOWN;
    let mut table = Table::new(["BACKEND", "ADDRESS", "STATE", "FOR", "CONNECTED", "FAILED"]);
    let mut text = String::new();
    if !few {
        text = format!("\n{up} of {all} backend addresses are up\n");
    }
    for backend in backends {
        for address in backend
            .addresses
            .iter()
            .filter(|address| few || !address.up)
        {
            let state = if address.up { "up" } else { "down" };
            let lasted = Duration::from_secs(address.for_seconds);
            table.row([
                backend.backend.clone(),
                address.address.clone(),
                state.to_owned(),
                humantime::format_duration(lasted).to_string(),
                address.connected.to_string(),
                address.failed.to_string(),
            ]);
        }
    }
    if !table.is_empty() {
        text += &format!("\n{}", table.render());
    }
    text
}

/// As a table, if it leaves the status one screen.
fn workers(loads: &[WorkerLoad]) -> String {
    // The map of queues is there to be read.
    let is_mapped = loads.iter().any(|load| !load.queue.is_empty());
    if loads.len() > WORKERS_SHOWN && !is_mapped {
        let connections = || loads.iter().map(|load| load.connections);
        let (least, most) = (connections().min(), connections().max());
        return format!(
            "\na worker has {} to {} connections; each one's are in `gatectl --json status`\n",
            least.unwrap_or(0),
            most.unwrap_or(0)
        );
    }
    let mut table = Table::new(["WORKER", "CPU", "QUEUE", "IRQ", "ACCEPTED", "CONNECTIONS"]);
    for load in loads {
        table.row([
            load.worker.to_string(),
            load.cpu.map_or("-".to_owned(), |cpu| cpu.to_string()),
            numbers(&load.queue),
            numbers(&load.irq),
            load.accepted.to_string(),
            load.connections.to_string(),
        ]);
    }
    if table.is_empty() {
        return String::new();
    }
    format!("\n{}", table.render())
}

fn numbers(numbers: &[u32]) -> String {
    if numbers.is_empty() {
        return "-".to_owned();
    }
    let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
    numbers.join(",")
}

fn state(status: &Status) -> String {
    match &status.process {
        None if status.state == UNREACHABLE => {
            "unreachable: a gate runs, but not at this control socket; name its own with --control"
                .to_owned()
        }
        None => format!("{}; the kernel's counts and limits stand", status.state),
        Some(process) => {
            let uptime = humantime::format_duration(Duration::from_secs(process.uptime_seconds));
            format!(
                "{}, gate {}, process {}, {} workers, up {uptime}",
                status.state, process.version, process.pid, process.workers
            )
        }
    }
}

fn kernel(status: &Status) -> String {
    let kernel = &status.connections.kernel;
    match (&kernel.reason, kernel.state.as_str()) {
        (Some(reason), state) => {
            format!("{state}: {reason}; ceilings are not enforced")
        }
        (None, "off") => "off; ceilings are not enforced".to_owned(),
        (None, state) => state.to_owned(),
    }
}

/// Nothing if nobody waits or ever waited: most limits refuse at once.
fn waiting(process: &Process) -> Option<String> {
    if process.waiting == 0 && process.waited.is_empty() {
        return None;
    }
    let before = process.waited.iter();
    let before: Vec<String> = before
        .map(|(outcome, count)| format!("{outcome} {count}"))
        .collect();
    let since = if before.is_empty() {
        String::new()
    } else {
        format!("; before: {}", before.join(", "))
    };
    Some(format!("{} now{since}", process.waiting))
}

fn limited(status: &Status) -> String {
    let limited = status
        .limited
        .iter()
        .map(|limited| match limited.names.as_slice() {
            [] => limited.scope.clone(),
            names => format!("{} ({})", limited.scope, names.join(", ")),
        });
    let limited: Vec<String> = limited.collect();
    if limited.is_empty() {
        "nothing".to_owned()
    } else {
        limited.join(", ")
    }
}
