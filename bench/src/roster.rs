//! The ways to the server that a run was asked for.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Result, bail, ensure};

use crate::options::Options;
use crate::peer::{Kind, Peer};
use crate::report::goals;
use crate::report::model::PeerInfo;

/// A way that was asked for.
pub struct Asked {
    /// What it is.
    pub peer: Peer,
    /// What it says of its version, or why it is absent.
    pub version: Result<String>,
}

/// Every way that was asked for, and its version, or why it is not there.
///
/// # Errors
/// There is no such way, or no such gate.
pub fn asked(options: &Options) -> Result<Vec<Asked>> {
    // A refusal is to be counted where gate counts by itself.
    let is_auto = options.kernel == "auto";
    let kernel = if options.goals() && is_auto && rustix::process::geteuid().is_root() {
        "required"
    } else {
        &options.kernel
    };
    let mut gates: Vec<Peer> = Vec::new();
    for word in &options.gate_bin {
        let (name, path) = gate_name(word);
        gates.push(Peer::gate(name, Path::new(path), kernel));
    }
    let others = Peer::all(Path::new(""), kernel);
    let others = others
        .into_iter()
        .filter(|peer| !matches!(peer.kind, Kind::Gate { .. }));
    let all: Vec<Peer> = gates.into_iter().chain(others).collect();
    // These take part when they are named.
    let by_unix: Vec<Peer> = all.iter().filter_map(Peer::by_unix).collect();
    let known = || all.iter().chain(&by_unix);
    let mut names = BTreeSet::new();
    for peer in known() {
        ensure!(
            names.insert(peer.name.as_str()),
            "two ways are called `{}`: give each gate a name of its own, --gate-bin NAME=PATH",
            peer.name
        );
    }
    let names: Vec<_> = known().map(|peer| peer.name.as_str()).collect();
    for name in &options.peers {
        ensure!(
            names.contains(&name.as_str()),
            "there is no peer `{name}`; there are {}",
            names.join(", ")
        );
    }
    let is_chosen = |peer: &&Peer| match &options.peers[..] {
        [] if options.goals() => goals::all_ways().contains(&peer.name.as_str()),
        [] => !peer.by_unix,
        names => names.contains(&peer.name),
    };
    let chosen: Vec<Peer> = known().filter(is_chosen).cloned().collect();
    if options.goals() {
        ensure!(
            chosen.iter().any(|peer| peer.name == "gate"),
            "`goals` are those of the way `gate`, which is not among the ways of this run"
        );
    }
    let mut found = Vec::new();
    for peer in chosen {
        let version = peer.version();
        if let (Kind::Gate { .. }, Err(error)) = (&peer.kind, &version) {
            bail!("{}: {error:#}", peer.name);
        }
        if let Err(error) = &version {
            eprintln!("{} is absent: {error:#}", peer.name);
        }
        found.push(Asked { peer, version });
    }
    Ok(found)
}

/// `NAME=PATH`, where the name is one that a file can have; else it is all a path.
fn gate_name(word: &str) -> (&str, &str) {
    let plain = |name: &str| {
        let letters = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        !name.is_empty() && name.bytes().all(letters)
    };
    match word.split_once('=') {
        Some((name, path)) if plain(name) => (name, path),
        _ => ("gate", word),
    }
}

/// Each gate with its kernel plane and without, for what compares the two.
#[must_use]
pub fn planes(asked: &[Asked]) -> Vec<Peer> {
    let gates = asked.iter().filter_map(|one| match &one.peer.kind {
        Kind::Gate { program, .. } if !one.peer.by_unix => Some((&one.peer.name, program)),
        _ => None,
    });
    gates
        .flat_map(|(name, program)| {
            [
                Peer::gate(name, program, "required"),
                Peer::gate(&format!("{name}-local"), program, "off"),
            ]
        })
        .collect()
}

/// What the report says of each of them.
#[must_use]
pub fn infos(asked: &[Asked], commands: &BTreeMap<String, BTreeSet<String>>) -> Vec<PeerInfo> {
    let mut infos: Vec<PeerInfo> = asked
        .iter()
        .map(|Asked { peer, version }| PeerInfo {
            name: peer.name.clone(),
            version: version.as_ref().ok().cloned(),
            commands: Vec::new(),
            absent: version.as_ref().err().map(|error| format!("{error:#}")),
            note: peer.note().map(str::to_owned),
        })
        .collect();
    for (name, commands) in commands {
        let commands = commands.iter().cloned().collect();
        match infos.iter_mut().find(|info| info.name == *name) {
            Some(info) => info.commands = commands,
            None => infos.push(PeerInfo {
                name: name.clone(),
                version: None,
                commands,
                absent: None,
                note: None,
            }),
        }
    }
    infos
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_may_have_a_name() {
        assert_eq!(gate_name("a/gate"), ("gate", "a/gate"));
        assert_eq!(gate_name("base=a/gate"), ("base", "a/gate"));
        assert_eq!(gate_name("a/b=c/gate"), ("gate", "a/b=c/gate"));
    }
}
