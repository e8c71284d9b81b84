//! Reading and setting limits.
//!
//! Each limit has two words, `runtime` (set by `gatectl`, wins) and `config`
//! (from the configuration). The words lie where the decision reads them, so
//! a limit is in force when its word is written.

use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

use gate_common::abi::{LISTENER_PROBE, NameKey, NameKind, SlotKind, SlotRef, slot};
use gate_common::limit::{
    Limit, LimitWords, Setting, UNLIMITED_TOKENS, resolve, resolve_ceiling, resolve_over_headroom,
};
use gate_common::slots::{self, Book};

use super::{Ledger, NamesError};
use crate::config::Config;

/// Lookups of a name that others recycle meanwhile, before a set gives up.
const SET_ATTEMPTS: usize = 8;

/// Names one limit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LimitKey {
    /// Admitted sessions in all.
    MaxConnections,
    /// Pending connections.
    MaxPending,
    /// Sockets per listener, unless it has its own.
    Ceiling,
    /// Sockets over a ceiling before SYNs are reset.
    OverHeadroom,
    /// Users without a limit of their own.
    DefaultUser,
    /// Databases without a limit of their own.
    DefaultDatabase,
    /// A user.
    User(Vec<u8>),
    /// A database.
    Database(Vec<u8>),
    /// A backend of the configuration.
    Backend(Vec<u8>),
    /// Sockets of one listener, by its address.
    Listener(String),
}

/// Who sets a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// `gatectl`, until unset.
    Runtime,
    /// The configuration.
    Config,
}

/// Where a limit in force comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitSource {
    /// `gatectl`.
    Runtime,
    /// The configuration.
    Config,
    /// Its kind's default, or built in.
    Default,
}

impl LimitSource {
    /// The word in tables and JSON.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Runtime => "runtime",
            Self::Config => "config",
            Self::Default => "default",
        }
    }
}

/// One limit with its value and its use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitRow {
    /// Which.
    pub key: LimitKey,
    /// What is in force.
    pub limit: Limit,
    /// Who set it.
    pub source: LimitSource,
    /// How much of it is in use: sessions, or sockets of a listener.
    pub used: u64,
}

impl Ledger {
    /// Sets a limit; [`Setting::Inherit`] unsets it. In force on return.
    ///
    /// # Errors
    /// A name that has no slot and can get none.
    pub fn set_limit(
        &self,
        key: &LimitKey,
        layer: Layer,
        setting: Setting,
    ) -> Result<(), NamesError> {
        for _ in 0..SET_ATTEMPTS {
            let (words, found) = self.find_words(key)?;
            // Under the lock no name is recycled: either it still is whose we
            // looked up, and keeps its slot for the limit, or we look again.
            let _lock = self.names().lock().ok_or(NamesError::Locked)?;
            if found.is_none_or(|found| self.is_current(found)) {
                match layer {
                    Layer::Runtime => words.runtime.store(setting.encode(), SeqCst),
                    Layer::Config => words.config.store(setting.encode(), SeqCst),
                }
                return Ok(());
            }
        }
        Err(NamesError::Locked)
    }

    /// Writes all limits of a configuration, and unsets those that an earlier
    /// one had. Runtime limits stay.
    ///
    /// # Errors
    /// See [`NamesError`]. What could be written before is in force.
    pub fn apply_config(&self, config: &Config) -> Result<(), NamesError> {
        let limits = &config.limits;
        let mut wanted: Vec<(LimitKey, Setting)> = vec![
            (LimitKey::MaxConnections, limits.max_connections),
            (LimitKey::MaxPending, limits.max_pending),
            (LimitKey::Ceiling, limits.ceiling),
            (LimitKey::OverHeadroom, limits.over_headroom),
            (LimitKey::DefaultUser, limits.default_user),
            (LimitKey::DefaultDatabase, limits.default_database),
        ];
        let users = limits.user.iter();
        wanted.extend(users.map(|(name, setting)| (LimitKey::User(name.clone()), *setting)));
        let databases = limits.database.iter();
        wanted
            .extend(databases.map(|(name, setting)| (LimitKey::Database(name.clone()), *setting)));
        wanted.extend(config.backends.iter().map(|backend| {
            let name = backend.name.clone().into_bytes();
            (LimitKey::Backend(name), backend.max_connections)
        }));
        wanted.extend(config.listeners.iter().map(|listener| {
            let key = LimitKey::Listener(listener.address.to_string());
            (key, listener.ceiling)
        }));
        let waiting = match limits.waits.promised() {
            0 => Setting::Inherit,
            clients => Setting::AtMost(clients),
        };
        let words = &self.limit_words()[slot::WAITING as usize];
        words.config.store(waiting.encode(), SeqCst);
        for (key, setting) in &wanted {
            self.set_limit(key, Layer::Config, *setting)?;
        }
        for (key, found) in self.all_names()? {
            let key = limit_key(&key);
            if self.config_setting(&key, found) == Setting::Inherit {
                continue;
            }
            if !wanted.iter().any(|(wanted, _)| *wanted == key) {
                self.set_limit(&key, Layer::Config, Setting::Inherit)?;
            }
        }
        Ok(())
    }

    fn config_setting(&self, key: &LimitKey, found: SlotRef) -> Setting {
        let words = match key {
            LimitKey::Listener(_) => self.listener_limit_words(),
            _ => self.limit_words(),
        };
        let words = words.get(found.index as usize);
        words.map_or(Setting::Inherit, |words| {
            Setting::decode(words.config.load(SeqCst))
        })
    }

    /// Tells how many sockets the descriptors allow: the cap of an automatic
    /// ceiling. A session has two, its client's and its backend's, so half of it
    /// is the cap of a limit on sessions.
    pub fn set_fd_cap(&self, sockets: u64) {
        let words = &self.limit_words()[slot::FD_CAP as usize];
        words
            .config
            .store(Setting::AtMost(sockets.max(1)).encode(), SeqCst);
    }

    /// Every limit that is set or whose name is known, sorted.
    ///
    /// # Errors
    /// The table of names could not be read.
    pub fn limits(&self) -> io::Result<Vec<LimitRow>> {
        let mut rows = vec![
            self.plain_row(LimitKey::MaxConnections, slot::TOTAL, self.admitted()),
            self.plain_row(LimitKey::MaxPending, slot::MAX_PENDING, self.pending()),
            self.plain_row(LimitKey::Ceiling, slot::CEILING, 0),
            self.plain_row(LimitKey::OverHeadroom, slot::OVER_HEADROOM, 0),
            self.plain_row(LimitKey::DefaultUser, slot::DEFAULT_USER, 0),
            self.plain_row(LimitKey::DefaultDatabase, slot::DEFAULT_DATABASE, 0),
        ];
        rows[2].limit = self.ceiling_of(&LimitWords::default());
        rows[3].limit = match self.over_headroom(rows[2].limit) {
            UNLIMITED_TOKENS.. => Limit::Unlimited,
            sockets => Limit::AtMost(sockets),
        };
        for (key, found) in self.all_names()? {
            rows.push(match limit_key(&key) {
                key @ LimitKey::Listener(_) => self.listener_row(key, found.index),
                key => self.named_row(key, found.index),
            });
        }
        rows.sort_by(|left, right| left.key.cmp(&right.key));
        Ok(rows)
    }

    /// A listener's ceiling in force.
    #[must_use]
    pub fn ceiling(&self, listener: u32) -> Limit {
        self.ceiling_of(&self.listener_limit_words()[listener as usize])
    }

    /// How many sockets may be over that ceiling before SYNs are reset.
    #[must_use]
    pub fn over_headroom(&self, ceiling: Limit) -> u64 {
        let setting = self.limit_words()[slot::OVER_HEADROOM as usize].setting();
        resolve_over_headroom(setting, ceiling)
    }

    /// A limit with no name and no default.
    #[must_use]
    pub fn plain_limit(&self, index: u32) -> Limit {
        let setting = self.limit_words()[index as usize].setting();
        resolve(setting, Setting::Unlimited)
    }

    fn ceiling_of(&self, own: &LimitWords<AtomicU64>) -> Limit {
        resolve_ceiling(
            own.setting(),
            self.limit_words()[slot::CEILING as usize].setting(),
            self.plain_limit(slot::TOTAL),
            self.max_pending(),
            self.plain_limit(slot::FD_CAP),
        )
    }

    fn find_words(
        &self,
        key: &LimitKey,
    ) -> Result<(&LimitWords<AtomicU64>, Option<SlotRef>), NamesError> {
        let named = |kind, name: &[u8]| {
            let found = self.find_or_make(&NameKey::new(kind, name))?;
            Ok((&self.limit_words()[found.index as usize], Some(found)))
        };
        let fixed = |index: u32| Ok((&self.limit_words()[index as usize], None));
        match key {
            LimitKey::MaxConnections => fixed(slot::TOTAL),
            LimitKey::MaxPending => fixed(slot::MAX_PENDING),
            LimitKey::Ceiling => fixed(slot::CEILING),
            LimitKey::OverHeadroom => fixed(slot::OVER_HEADROOM),
            LimitKey::DefaultUser => fixed(slot::DEFAULT_USER),
            LimitKey::DefaultDatabase => fixed(slot::DEFAULT_DATABASE),
            LimitKey::User(name) => named(NameKind::User, name),
            LimitKey::Database(name) => named(NameKind::Database, name),
            LimitKey::Backend(name) => named(NameKind::Backend, name),
            LimitKey::Listener(address) => {
                let index = self.listener_index(address)?;
                Ok((&self.listener_limit_words()[index as usize], None))
            }
        }
    }

    fn plain_row(&self, key: LimitKey, index: u32, used: u64) -> LimitRow {
        let words = &self.limit_words()[index as usize];
        LimitRow {
            key,
            limit: self.plain_limit(index),
            source: source(words),
            used,
        }
    }

    fn named_row(&self, key: LimitKey, index: u32) -> LimitRow {
        let kind = match key {
            LimitKey::User(_) => SlotKind::User,
            LimitKey::Database(_) => SlotKind::Database,
            _ => SlotKind::Backend,
        };
        LimitRow {
            key,
            limit: self.resolve(kind, index).unwrap_or(Limit::None),
            source: source(&self.limit_words()[index as usize]),
            used: u64::from(slots::used(self.words()[index as usize].load(SeqCst))),
        }
    }

    fn listener_row(&self, key: LimitKey, index: u32) -> LimitRow {
        let index = index.min(LISTENER_PROBE);
        LimitRow {
            key,
            limit: self.ceiling(index),
            source: source(&self.listener_limit_words()[index as usize]),
            used: self.sockets(index),
        }
    }
}

fn source(words: &LimitWords<AtomicU64>) -> LimitSource {
    if Setting::decode(words.runtime.load(SeqCst)) != Setting::Inherit {
        LimitSource::Runtime
    } else if Setting::decode(words.config.load(SeqCst)) != Setting::Inherit {
        LimitSource::Config
    } else {
        LimitSource::Default
    }
}

fn limit_key(key: &NameKey) -> LimitKey {
    let name = key.name().to_vec();
    if key.kind == NameKind::User as u8 {
        LimitKey::User(name)
    } else if key.kind == NameKind::Database as u8 {
        LimitKey::Database(name)
    } else if key.kind == NameKind::Backend as u8 {
        LimitKey::Backend(name)
    } else {
        LimitKey::Listener(String::from_utf8_lossy(&name).into_owned())
    }
}
