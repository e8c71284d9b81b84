//! A script of bytes, as the life of one session.
//!
//! One byte is one step: its low five bits say what happens, its high three bits how. A corpus
//! file can thus be read and written by hand, and every file is a valid script.

use std::time::Duration;

use gate::session::event::{Deadlines, Input};
use gate::session::outcome::{ConnectFailure, Reason};

use super::driver::{Driver, WAIT};

const DEADLINES: Deadlines = Deadlines {
    startup: Duration::from_secs(15),
    connect: Duration::from_secs(5),
    auth: Duration::from_secs(60),
    cancel: Duration::from_secs(10),
    idle: Duration::ZERO,
    half_close: Duration::ZERO,
    abandoned: Duration::from_secs(60),
};

const SSL_REQUEST: &[u8] = &[0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x2f];
const GSSENC_REQUEST: &[u8] = &[0, 0, 0, 8, 0x04, 0xd2, 0x16, 0x30];
const CANCEL: &[u8] = &[
    0, 0, 0, 16, 0x04, 0xd2, 0x16, 0x2e, 0, 0, 0x12, 0x67, 0, 0, 0, 42,
];
const STARTUP: &[u8] = b"\0\0\0\x21\0\x03\0\0user\0app\0database\0prod\0\0";
const NO_USER: &[u8] = b"\0\0\0\x17\0\x03\0\0database\0prod\0\0";
/// AuthenticationOk, BackendKeyData, ReadyForQuery.
const LOGIN: &[u8] = b"R\0\0\0\x08\0\0\0\0K\0\0\0\x0c\0\0\x12\x67\0\0\0\x2aZ\0\0\0\x05I";
const LOGIN_ERROR: &[u8] = b"E\0\0\0\x18SFATAL\0C28P01\0Mno\0\0";

/// The first byte says which session it is, the others are its steps.
pub fn session(data: &[u8]) {
    let (kind, mut steps) = data.split_first().map_or((0, data), |(k, rest)| (*k, rest));
    let deadlines = Deadlines {
        idle: Duration::from_secs(u64::from(kind >> 5) * 30),
        half_close: Duration::from_secs(u64::from(kind >> 5 & 1) * 7),
        ..DEADLINES
    };
    let mut driver = match kind & 0x1f {
        0..=27 => Driver::new(deadlines, None),
        28 | 29 => Driver::new(deadlines, Some(Reason::OverCeiling)),
        30 => Driver::new(deadlines, Some(Reason::Descriptors)),
        _ => Driver::cancel(deadlines, CANCEL),
    };
    while let Some((step, rest)) = steps.split_first() {
        steps = rest;
        let used = one_step(&mut driver, step & 0x1f, usize::from(step >> 5), steps);
        steps = &steps[used..];
    }
    driver.finish();
}

/// Takes one step, and returns how many of the bytes behind it belonged to it.
fn one_step(driver: &mut Driver, what: u8, how: usize, rest: &[u8]) -> usize {
    let piece = |bytes: &'static [u8]| &bytes[bytes.len() * how / 8..];
    match what {
        0 | 1 => driver.feed(Input::ClientData(STARTUP)),
        2 => driver.feed(Input::ClientData(&STARTUP[..STARTUP.len() * how / 8])),
        3 => driver.feed(Input::ClientData(piece(STARTUP))),
        4 => driver.feed(Input::ClientData(SSL_REQUEST)),
        5 => driver.feed(Input::ClientData(GSSENC_REQUEST)),
        6 => driver.feed(Input::ClientData(CANCEL)),
        7 => driver.feed(Input::ClientData(NO_USER)),
        8 => {
            let bytes = rest.get(..how + 1).unwrap_or(rest);
            driver.feed(Input::ClientData(bytes));
            return bytes.len();
        }
        9 => driver.feed(Input::ClientData(&vec![rest.len() as u8; 1 << (2 * how)])),
        10 | 11 => driver.feed(Input::Connected),
        12 => driver.feed(Input::ConnectFailed(failure(how))),
        13 => driver.feed(Input::BackendData(LOGIN)),
        14 => driver.feed(Input::BackendData(&LOGIN[..LOGIN.len() * how / 8])),
        15 => driver.feed(Input::BackendData(piece(LOGIN))),
        16 => driver.feed(Input::BackendData(LOGIN_ERROR)),
        17 => {
            let bytes = rest.get(..how + 1).unwrap_or(rest);
            driver.feed(Input::BackendData(bytes));
            return bytes.len();
        }
        18 | 19 => driver.feed(Input::ClientEnded),
        20 => driver.feed(Input::ClientLost),
        21 => driver.feed(Input::BackendEnded),
        22 => driver.feed(Input::BackendLost),
        23 | 24 => driver.wait(Duration::from_millis(10 << (2 * how))),
        25 => driver.feed(Input::Evict),
        26 => driver.feed(Input::Stop),
        27 => driver.ledger = Err(Reason::ALL[how]),
        28 => driver.ledger = Ok(()),
        29 => driver.doom(Reason::Draining),
        30 => driver.wait(Duration::from_secs(60)),
        _ => match how {
            0 | 1 => driver.defers = true,
            2 => driver.feed(Input::Admission(driver.ledger)),
            3 => driver.feed(Input::Wait {
                wait: WAIT,
                reason: Reason::User,
            }),
            4 => driver.feed(Input::Turn),
            5 => driver.feed(Input::AddressFailed(ConnectFailure::Refused)),
            _ => driver.defers = false,
        },
    }
    0
}

fn failure(how: usize) -> ConnectFailure {
    ConnectFailure::ALL[how % ConnectFailure::ALL.len()]
}
