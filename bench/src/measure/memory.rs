//! Memory of a proxy, and of the kernel on its behalf.

use std::fs;

use anyhow::{Context, Result};

use super::processes;

/// Memory in KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Memory {
    /// Private, written pages of the proxy's processes.
    pub user_kib: f64,
    /// Slab, stacks, page tables, per-CPU memory, vmalloc and socket buffers of the whole
    /// machine: only differences mean anything, and others' changes are in them.
    pub kernel_kib: f64,
}

/// As it is now; without a process only the kernel's.
///
/// # Errors
/// The process is gone, or `/proc` has another form than proc(5).
pub fn now(proxy: Option<u32>) -> Result<Memory> {
    let mut memory = Memory::default();
    for pid in proxy
        .map(processes::tree)
        .transpose()?
        .into_iter()
        .flatten()
    {
        let path = format!("/proc/{pid}/smaps_rollup");
        let text = fs::read_to_string(&path).with_context(|| path.clone())?;
        memory.user_kib += field(&text, "Private_Dirty:").with_context(|| path)?;
    }
    let meminfo = fs::read_to_string("/proc/meminfo")?;
    for name in [
        "Slab:",
        "KernelStack:",
        "PageTables:",
        "Percpu:",
        "VmallocUsed:",
    ] {
        memory.kernel_kib += field(&meminfo, name).with_context(|| format!("meminfo: {name}"))?;
    }
    let sockstat = fs::read_to_string("/proc/net/sockstat")?;
    let pages = tcp_pages(&sockstat).context("sockstat has no TCP: mem")?;
    memory.kernel_kib += pages * rustix::param::page_size() as f64 / 1024.0;
    Ok(memory)
}

fn field(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// `TCP: inuse 27 orphan 0 tw 4 alloc 30 mem 3`, the last one in pages.
fn tcp_pages(sockstat: &str) -> Option<f64> {
    let line = sockstat.lines().find(|line| line.starts_with("TCP:"))?;
    let mut words = line.split_ascii_whitespace();
    words.find(|word| *word == "mem")?;
    words.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_tcp_are_found() {
        let text =
            "sockets: used 99\nTCP: inuse 27 orphan 0 tw 4 alloc 30 mem 3\nUDP: inuse 2 mem 9\n";
        assert_eq!(tcp_pages(text), Some(3.0));
        assert_eq!(tcp_pages("TCP: inuse 27"), None);
    }

    #[test]
    fn what_we_fill_is_our_memory() {
        let us = Some(std::process::id());
        let before = now(us).unwrap();
        let filled = vec![1_u8; 32 << 20];
        let grown = now(us).unwrap().user_kib - before.user_kib;
        assert!(grown > 24.0 * 1024.0, "{grown} KiB");
        assert_eq!(filled.iter().filter(|byte| **byte == 1).count(), 32 << 20);
    }
}
