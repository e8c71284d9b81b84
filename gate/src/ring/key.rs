//! How a [`Key`] crosses the ring, in 64 bits of user data.

use crate::worker::{Key, Kind};

/// User data whose completion nobody waits for.
pub(super) const IGNORED: u64 = 0;

const KINDS: [Kind; 5] = [
    Kind::Accept,
    Kind::Client,
    Kind::Backend,
    Kind::Waker,
    Kind::Admit,
];

pub(super) const fn encode(key: Key) -> u64 {
    (key.index as u64) << 32 | (key.generation as u64) << 8 | key.kind as u64
}

pub(super) fn decode(data: u64) -> Option<Key> {
    let kind = *KINDS.get((data & 0xff).checked_sub(1)? as usize)?;
    Some(Key::new(kind, (data >> 32) as u32, (data >> 8) as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_survive_user_data() {
        for kind in KINDS {
            let key = Key::new(kind, u32::MAX, u32::MAX);
            assert_eq!(decode(encode(key)), Some(key));
        }
        assert_eq!(decode(IGNORED), None);
        assert_eq!(decode(KINDS.len() as u64 + 1), None);
    }
}
