//! How a limit is encoded in a 64-bit word, and which of two words wins.

use crate::word::Word;

/// Tokens of an unlimited listener: enough never to run out, so that its
/// sockets stay counted.
pub const UNLIMITED_TOKENS: u64 = 1 << 40;

const INHERIT: u64 = 0;
const UNLIMITED: u64 = UNLIMITED_TOKENS;
const NONE: u64 = 1 << 41;
const AUTO: u64 = 1 << 42;

/// A limit as it stands in one word of a map. A new map is all zeroes, which
/// reads as [`Setting::Inherit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// Not set here: the next word in line decides.
    Inherit,
    /// No bound.
    Unlimited,
    /// Nobody.
    None,
    /// Derived from the other limits (listener ceilings only).
    Auto,
    /// At most so many; never 0 and below [`UNLIMITED_TOKENS`].
    AtMost(u64),
}

impl Setting {
    /// The number as people write it: 0 means unlimited.
    #[must_use]
    pub const fn from_number(number: u64) -> Self {
        match number {
            0 => Self::Unlimited,
            1..UNLIMITED_TOKENS => Self::AtMost(number),
            _ => Self::Unlimited,
        }
    }

    /// Reads a word. An encoding from nowhere reads as [`Setting::None`]: a
    /// damaged limit must not open the gate.
    #[inline(always)]
    #[must_use]
    pub const fn decode(word: u64) -> Self {
        match word {
            INHERIT => Self::Inherit,
            1..UNLIMITED_TOKENS => Self::AtMost(word),
            UNLIMITED => Self::Unlimited,
            AUTO => Self::Auto,
            _ => Self::None,
        }
    }

    /// The word that [`Setting::decode`] reads back.
    #[inline(always)]
    #[must_use]
    pub const fn encode(self) -> u64 {
        match self {
            Self::Inherit => INHERIT,
            Self::Unlimited => UNLIMITED,
            Self::None => NONE,
            Self::Auto => AUTO,
            Self::AtMost(number) => number,
        }
    }
}

/// A limit after resolution: what a decision reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// No bound.
    Unlimited,
    /// Nobody.
    None,
    /// At most so many.
    AtMost(u64),
}

impl Limit {
    /// Whether one more is allowed beside `used`.
    #[inline(always)]
    #[must_use]
    pub const fn allows_one_more(self, used: u64) -> bool {
        used < self.tokens()
    }

    /// The limit as a count of tokens.
    #[inline(always)]
    #[must_use]
    pub const fn tokens(self) -> u64 {
        match self {
            Self::Unlimited => UNLIMITED_TOKENS,
            Self::None => 0,
            Self::AtMost(number) => number,
        }
    }
}

/// The two words of one limit. Userspace alone writes them: `gatectl` the
/// first, the configuration the second.
#[derive(Debug, Default)]
#[repr(C)]
pub struct LimitWords<W> {
    /// Set while running; wins until unset.
    pub runtime: W,
    /// From the configuration.
    pub config: W,
}

impl<W: Word> LimitWords<W> {
    /// The setting in force here, before inheritance.
    #[inline(always)]
    pub fn setting(&self) -> Setting {
        match Setting::decode(self.runtime.load()) {
            Setting::Inherit => Setting::decode(self.config.load()),
            set => set,
        }
    }
}

/// Resolves a named limit: its own setting, else its kind's default, else
/// unlimited.
#[inline(always)]
#[must_use]
pub const fn resolve(own: Setting, default: Setting) -> Limit {
    match own {
        Setting::Inherit | Setting::Auto => match default {
            Setting::Inherit | Setting::Auto | Setting::Unlimited => Limit::Unlimited,
            Setting::None => Limit::None,
            Setting::AtMost(number) => Limit::AtMost(number),
        },
        Setting::Unlimited => Limit::Unlimited,
        Setting::None => Limit::None,
        Setting::AtMost(number) => Limit::AtMost(number),
    }
}

/// Resolves a listener's ceiling on sockets.
///
/// `auto` is `max_connections + max_pending + max(64, max_connections / 64)`,
/// capped by what the file descriptors allow; with no bound on either it is
/// that cap alone.
#[inline(always)]
#[must_use]
pub const fn resolve_ceiling(
    own: Setting,
    shared: Setting,
    max_connections: Limit,
    max_pending: Limit,
    fd_cap: Limit,
) -> Limit {
    let setting = match own {
        Setting::Inherit => shared,
        set => set,
    };
    match setting {
        Setting::Inherit | Setting::Auto => auto_ceiling(max_connections, max_pending, fd_cap),
        Setting::Unlimited => Limit::Unlimited,
        Setting::None => Limit::None,
        Setting::AtMost(number) => Limit::AtMost(number),
    }
}

#[inline(always)]
const fn auto_ceiling(max_connections: Limit, max_pending: Limit, fd_cap: Limit) -> Limit {
    let (Limit::AtMost(_) | Limit::None, Limit::AtMost(_) | Limit::None) =
        (max_connections, max_pending)
    else {
        return fd_cap;
    };
    let sessions = max_connections.tokens();
    let mut slack = sessions / 64;
    if slack < 64 {
        slack = 64;
    }
    let wanted = sessions + max_pending.tokens() + slack;
    if wanted < fd_cap.tokens() {
        Limit::AtMost(wanted)
    } else {
        fd_cap
    }
}

/// How many sockets may be over a ceiling before new SYNs are reset: `auto`
/// is `max(64, ceiling / 16)`.
#[inline(always)]
#[must_use]
pub const fn resolve_over_headroom(setting: Setting, ceiling: Limit) -> u64 {
    match setting {
        Setting::AtMost(number) => number,
        Setting::Unlimited => UNLIMITED_TOKENS,
        Setting::None => 0,
        Setting::Inherit | Setting::Auto => {
            let part = ceiling.tokens() / 16;
            if part < 64 { 64 } else { part }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_three_values_that_people_confuse_are_different() {
        assert_eq!(Setting::from_number(0), Setting::Unlimited);
        assert_eq!(Setting::from_number(1), Setting::AtMost(1));
        assert_ne!(Setting::None.encode(), Setting::Unlimited.encode());
        assert!(Limit::Unlimited.allows_one_more(u64::from(u32::MAX)));
        assert!(!Limit::None.allows_one_more(0));
        assert!(Limit::AtMost(1).allows_one_more(0));
        assert!(!Limit::AtMost(1).allows_one_more(1));
    }

    #[test]
    fn a_damaged_word_admits_nobody() {
        assert_eq!(Setting::decode(u64::MAX), Setting::None);
        assert_eq!(Setting::decode(UNLIMITED + 1), Setting::None);
    }

    #[test]
    fn an_override_wins_over_the_default_of_its_kind() {
        let table = [
            (Setting::Inherit, Setting::Inherit, Limit::Unlimited),
            (Setting::Inherit, Setting::AtMost(5), Limit::AtMost(5)),
            (Setting::Inherit, Setting::None, Limit::None),
            (Setting::AtMost(9), Setting::AtMost(5), Limit::AtMost(9)),
            (Setting::Unlimited, Setting::AtMost(5), Limit::Unlimited),
            (Setting::None, Setting::Unlimited, Limit::None),
        ];
        for (own, default, expected) in table {
            assert_eq!(resolve(own, default), expected, "{own:?} over {default:?}");
        }
    }

    #[test]
    fn auto_ceiling_follows_the_documented_sum() {
        let auto = |sessions, pending, cap| {
            resolve_ceiling(Setting::Inherit, Setting::Auto, sessions, pending, cap)
        };
        let at = Limit::AtMost;
        assert_eq!(auto(at(5000), at(1000), at(9000)), at(5000 + 1000 + 78));
        assert_eq!(auto(at(10), at(10), at(9000)), at(84));
        assert_eq!(auto(at(5000), at(1000), at(3000)), at(3000));
        assert_eq!(auto(Limit::Unlimited, at(1000), at(3000)), at(3000));
        assert_eq!(
            auto(Limit::Unlimited, at(1), Limit::Unlimited),
            Limit::Unlimited
        );
        let own = resolve_ceiling(Setting::AtMost(7), Setting::Auto, at(1), at(1), at(1));
        assert_eq!(own, at(7));
    }

    #[test]
    fn headroom_is_a_sixteenth_but_at_least_64() {
        let auto = |ceiling| resolve_over_headroom(Setting::Inherit, ceiling);
        assert_eq!(auto(Limit::AtMost(100)), 64);
        assert_eq!(auto(Limit::AtMost(6400)), 400);
        assert_eq!(
            resolve_over_headroom(Setting::AtMost(3), Limit::AtMost(100)),
            3
        );
    }

    proptest! {
        #[test]
        fn settings_survive_the_word(number in 1..UNLIMITED_TOKENS) {
            for setting in [
                Setting::Inherit,
                Setting::Unlimited,
                Setting::None,
                Setting::Auto,
                Setting::AtMost(number),
            ] {
                prop_assert_eq!(Setting::decode(setting.encode()), setting);
            }
        }
    }
}
