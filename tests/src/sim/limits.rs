//! Limits on sessions: what they are, whoever set them, and whether they are kept.

use std::collections::BTreeMap;

use gate::ledger::{LimitKey, LimitRow};
use gate::state::State;
use gate_common::limit::Setting;

use super::control::Done;
use super::tcp::GATE;
use super::world::World;

/// A limit: its kind (total, user, database, backend) and its name.
pub type Key = (char, String);

/// No limit is passed, as the backends see it.
pub fn within_limits(world: &World) {
    let mut used: BTreeMap<(char, &str), u64> = BTreeMap::new();
    for backend in &world.backends {
        let open = !world.lines[backend.line].tcp.ends[GATE].closed;
        if let (true, Some(client)) = (open, backend.client) {
            let client = &world.clients[client];
            for key in [
                ('t', ""),
                ('u', client.user.as_str()),
                ('d', client.database.as_str()),
                ('b', backend.name.as_str()),
            ] {
                *used.entry(key).or_default() += 1;
            }
        }
    }
    for (key, used) in used {
        let key = (key.0, key.1.to_owned());
        let most = world.control.allows(&key);
        assert!(used <= most, "{key:?}: {used} of {most}");
    }
    if let Some(state) = &world.state {
        assert_eq!(
            state.ledger.errors(),
            0,
            "the ledger counted what cannot be"
        );
    }
}

impl Done {
    /// How many sessions this limit allows now, those included that were there
    /// before it fell.
    pub fn allows(&self, key: &Key) -> u64 {
        let over = self.over.get(key).copied().unwrap_or(0);
        over.max(tokens(self.setting(key)))
    }

    fn setting(&self, (kind, name): &Key) -> Setting {
        let limits = &self.config.limits;
        let by_gatectl = self.runtime.get(&(*kind, name.clone()));
        if let Some(setting) = by_gatectl.filter(|setting| **setting != Setting::Inherit) {
            return *setting;
        }
        let (own, default) = match kind {
            't' => (Some(limits.max_connections), Setting::Unlimited),
            'u' => (
                limits.user.get(name.as_bytes()).copied(),
                limits.default_user,
            ),
            'd' => (
                limits.database.get(name.as_bytes()).copied(),
                limits.default_database,
            ),
            _ => {
                let mut backends = self.config.backends.iter();
                let backend = backends.find(|backend| backend.name == *name);
                (
                    backend.map(|backend| backend.max_connections),
                    Setting::Unlimited,
                )
            }
        };
        own.unwrap_or(default)
    }
}

fn tokens(setting: Setting) -> u64 {
    match setting {
        Setting::AtMost(most) => most,
        Setting::None => 0,
        _ => u64::MAX,
    }
}

/// The ledger's limits on sessions.
pub fn rows(state: &State) -> BTreeMap<Key, LimitRow> {
    let rows = state.ledger.limits().expect("it lies in this process");
    let text = |name: &[u8]| String::from_utf8_lossy(name).into_owned();
    let keyed = rows.into_iter().filter_map(|row| {
        let key = match &row.key {
            LimitKey::MaxConnections => ('t', String::new()),
            LimitKey::User(name) => ('u', text(name)),
            LimitKey::Database(name) => ('d', text(name)),
            LimitKey::Backend(name) => ('b', text(name)),
            _ => return None,
        };
        Some((key, row))
    });
    keyed.collect()
}

/// Whoever was admitted before a limit fell may stay.
pub fn limits_fell(world: &mut World, state: &State) {
    let control = &mut world.control;
    control.over.clear();
    for (key, row) in rows(state) {
        if row.used > tokens(control.setting(&key)) {
            control.over.insert(key, row.used);
        }
    }
}

/// Some of those that were admitted before a limit fell may have left.
pub fn slots_came_free(world: &mut World, state: &State) {
    let control = &mut world.control;
    if !control.over.is_empty() {
        let rows = rows(state);
        for (key, over) in &mut control.over {
            *over = (*over).min(rows.get(key).map_or(0, |row| row.used));
        }
        let mut over = std::mem::take(&mut control.over);
        over.retain(|key, used| *used > tokens(control.setting(key)));
        control.over = over;
    }
}
