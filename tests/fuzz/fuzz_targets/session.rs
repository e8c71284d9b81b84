#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| gate_tests::fuzz::session(data));
