//! The head of a report: what a figure is worth nothing without.

use std::fmt::Write as _;

use super::figures::paragraph;
use super::model::{PeerInfo, Placement, Report};

/// What was measured, on what, with what.
#[must_use]
pub fn text(report: &Report) -> String {
    let mut text = format!("gate-bench of {}\n\n", report.started);
    for (name, value) in [
        ("command", report.command.clone()),
        ("commit", report.commit.clone()),
        ("host", report.host.line()),
        ("CPUs", placement(&report.placement)),
        ("rounds", rounds(report)),
        (
            "segments",
            "of 1460 bytes at most, as over Ethernet, with segmentation offload".to_owned(),
        ),
    ] {
        text.push_str(&paragraph(&format!("{name:<9}"), &value));
    }
    if let Some(postgres) = &report.postgres {
        text.push_str(&paragraph("server   ", postgres));
    }
    for note in &report.placement.notes {
        text.push_str(&paragraph("note     ", note));
    }
    text.push_str("\nChanged on the host for the time of the run, and put back:\n");
    if report.host_changes.is_empty() {
        text.push_str("  nothing\n");
    }
    let changes = &report.host_changes;
    let name_width = width(changes.iter().map(|change| change.setting.as_str()));
    for change in changes {
        let (name, before, during) = (&change.setting, &change.before, &change.during);
        let _ = writeln!(text, "  {name:<name_width$}   {before} -> {during}");
    }
    text.push_str("\nPeers:\n");
    let name_width = width(report.peers.iter().map(|peer| peer.name.as_str()));
    for peer in &report.peers {
        text.push_str(&one_peer(peer, name_width));
    }
    text
}

/// Whose work was bound to which CPUs.
#[must_use]
pub fn placement(placement: &Placement) -> String {
    let cpus = |cpus: &[usize]| match cpus {
        [] => "not bound".to_owned(),
        cpus => cpu_list(cpus),
    };
    let gate = cpus(&placement.gate_cpus);
    let load = cpus(&placement.load_cpus);
    format!("gate and its peers: {gate}; load and backend: {load}")
}

fn rounds(report: &Report) -> String {
    format!(
        "{} of every point, interleaved, each measured for {} s",
        report.rounds, report.seconds
    )
}

fn one_peer(peer: &PeerInfo, name_width: usize) -> String {
    let head = format!("  {:<name_width$}   ", peer.name);
    let below = " ".repeat(head.len());
    if let Some(why) = &peer.absent {
        return paragraph(&head, &format!("absent: {why}"));
    }
    let version = peer.version.as_deref().unwrap_or("no version of its own");
    let mut text = paragraph(&head, version);
    if let Some(note) = &peer.note {
        text.push_str(&paragraph(&below, note));
    }
    for command in &peer.commands {
        // Not broken, so that it can be copied.
        let _ = writeln!(text, "{below}$ {command}");
    }
    text
}

/// CPUs as `0-3,6`.
fn cpu_list(cpus: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &cpu in cpus {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => ranges.push((cpu, cpu)),
        }
    }
    let range = |(first, last): &(usize, usize)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    };
    ranges.iter().map(range).collect::<Vec<_>>().join(",")
}

fn width<'a>(names: impl Iterator<Item = &'a str>) -> usize {
    names.map(|name| name.chars().count()).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_printed_as_ranges() {
        assert_eq!(cpu_list(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
    }
}
