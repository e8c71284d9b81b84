//! The admissions in flight: bytes that the kernel reads until it answers.

use std::collections::HashMap;

use gate_common::abi::AdmitRequest;

type Bytes = [u8; size_of::<AdmitRequest>()];

/// Admissions in flight at most; beyond, the caller asks by a plain call. A
/// round of a worker's loop rarely has so many.
const IN_FLIGHT_MAX: usize = 1024;

/// Lent buffers by the user data of their operation, and those to lend next.
#[derive(Debug, Default)]
pub(super) struct Requests {
    lent: HashMap<u64, Box<Bytes>>,
    #[expect(
        clippy::vec_box,
        reason = "a buffer keeps its place when it is lent again"
    )]
    free: Vec<Box<Bytes>>,
}

impl Requests {
    /// Keeps `bytes` in place until they are taken back. `None` if too many
    /// are lent, or this operation's are already.
    pub(super) fn lend(&mut self, data: u64, bytes: Bytes) -> Option<*const Bytes> {
        if self.lent.len() >= IN_FLIGHT_MAX || self.lent.contains_key(&data) {
            return None;
        }
        let buffer = match self.free.pop() {
            Some(mut buffer) => {
                *buffer = bytes;
                buffer
            }
            None => Box::new(bytes),
        };
        let place = &raw const *buffer;
        self.lent.insert(data, buffer);
        Some(place)
    }

    /// The operation's completion came.
    pub(super) fn take_back(&mut self, data: u64) {
        self.free.extend(self.lent.remove(&data));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_stay_in_place_while_they_are_lent() {
        let mut requests = Requests::default();
        let first = requests.lend(1, [1; size_of::<Bytes>()]).unwrap();
        assert_eq!(requests.lend(1, [9; size_of::<Bytes>()]), None);
        let others: Vec<_> = (2..=IN_FLIGHT_MAX as u64)
            .map(|data| requests.lend(data, [0; size_of::<Bytes>()]).unwrap())
            .collect();
        assert_eq!(requests.lend(0, [0; size_of::<Bytes>()]), None);
        assert!(!others.contains(&first));
        assert_eq!(*requests.lent[&1], [1; size_of::<Bytes>()]);
        assert_eq!(&raw const *requests.lent[&1], first);
        requests.take_back(1);
        let again = requests.lend(0, [2; size_of::<Bytes>()]);
        assert_eq!(again, Some(first));
    }
}
