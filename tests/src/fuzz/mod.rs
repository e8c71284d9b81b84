//! The oracles of the fuzz targets: any bytes in, a panic if gate broke a promise.
//!
//! The targets in `tests/fuzz` call these functions, and so do the tests here: on every file of
//! the committed corpora, and on random bytes.
#![forbid(unsafe_code)]

mod driver;
mod first_packet;
mod script;

pub use first_packet::first_packet;
pub use script::session;

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use proptest::prelude::*;

    use super::{first_packet, session};

    /// Runs every file of a corpus through its oracle.
    fn replay(target: &str, oracle: fn(&[u8])) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
        let mut count = 0;
        for entry in fs::read_dir(folder.join(target)).expect("the corpus is there") {
            let path = entry.expect("it can be read").path();
            let bytes = fs::read(&path).expect("it can be read");
            println!("{}", path.display());
            oracle(&bytes);
            count += 1;
        }
        assert!(count >= 20, "{target}: only {count} files in the corpus");
    }

    #[test]
    fn the_corpus_of_first_packet_holds() {
        replay("first_packet", first_packet);
    }

    #[test]
    fn the_corpus_of_session_holds() {
        replay("session", session);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4000) })]

        #[test]
        fn random_first_packets_hold(
            flags in any::<u8>(),
            code in prop_oneof![Just(196_608), Just(196_610), Just(80_877_102), Just(80_877_103), any::<u32>()],
            body in "(user|database|replication|[a-z0-9\\x00]{1,3}|\\x00){0,12}",
            off in -2_i64..3,
        ) {
            let length = (body.len() as i64 + 8 + off) as u32;
            let mut bytes = vec![flags];
            bytes.extend_from_slice(&length.to_be_bytes());
            bytes.extend_from_slice(&code.to_be_bytes());
            bytes.extend_from_slice(body.as_bytes());
            first_packet(&bytes);
        }

        #[test]
        fn random_sessions_hold(script in proptest::collection::vec(any::<u8>(), 0..120)) {
            session(&script);
        }
    }
}
