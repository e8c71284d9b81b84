//! What an operation's 64 bits of user data say.

/// Which descriptor of its owner an operation is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A listener's accept.
    Accept = 1,
    /// A session's client.
    Client = 2,
    /// A session's backend.
    Backend = 3,
    /// The worker's own wake-up.
    Waker = 4,
}

/// Names an operation: an index with the generation it is meant for, never a
/// pointer, so that a late completion is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// What the operation is about.
    pub kind: Kind,
    /// Index in the owner's table.
    pub index: u32,
    /// Generation of that index, 24 bits.
    pub generation: u32,
}

const GENERATION_BITS: u32 = 24;
/// User data whose completion nobody waits for.
pub(super) const IGNORED: u64 = 0;

impl Key {
    /// A key; the generation is cut to 24 bits.
    #[must_use]
    pub const fn new(kind: Kind, index: u32, generation: u32) -> Self {
        Self {
            kind,
            index,
            generation: generation & ((1 << GENERATION_BITS) - 1),
        }
    }

    pub(super) const fn encode(self) -> u64 {
        (self.index as u64) << 32 | (self.generation as u64) << 8 | self.kind as u64
    }

    pub(super) const fn decode(data: u64) -> Option<Self> {
        let kind = match data & 0xff {
            1 => Kind::Accept,
            2 => Kind::Client,
            3 => Kind::Backend,
            4 => Kind::Waker,
            _ => return None,
        };
        Some(Self::new(kind, (data >> 32) as u32, (data >> 8) as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_survive_user_data() {
        for kind in [Kind::Accept, Kind::Client, Kind::Backend, Kind::Waker] {
            let key = Key::new(kind, u32::MAX, u32::MAX);
            assert_eq!(Key::decode(key.encode()), Some(key));
        }
        assert_eq!(Key::decode(IGNORED), None);
    }

    #[test]
    fn another_generation_is_another_key() {
        assert_ne!(Key::new(Kind::Client, 1, 1), Key::new(Kind::Client, 1, 2));
    }
}
