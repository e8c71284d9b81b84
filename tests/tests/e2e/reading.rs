//! First packets: gate and PostgreSQL must read the same, or gate refuses.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use gate_tests::gate::Gate;
use gate_tests::postgres::LONG_USER;
use gate_tests::session::{OpenError, Session};
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire::{self, PROTOCOL_3_0, Wire, startup};

const SOON: Duration = Duration::from_secs(2);

pub fn register(suite: &mut Suite) {
    suite.both("e2_gate_and_postgresql_read_the_same_packet", same_reading);
}

/// What a server made of a first packet.
#[derive(Debug, PartialEq, Eq)]
enum Reading {
    /// Let in, as this user in this database.
    In(String),
    /// SQLSTATE and text.
    Error(String, String),
    /// Closed without a word.
    Silent,
}

type Pairs<'a> = &'a [(&'a [u8], &'a [u8])];

/// The packets: how they differ from a plain login, and the login's identity
/// if it is a walsender without SQL.
fn packets() -> Vec<(&'static str, Vec<u8>)> {
    let long = LONG_USER.as_bytes();
    let longer = [long, b"4"].concat();
    let three = |pairs: Pairs| startup(PROTOCOL_3_0, pairs);
    let raw = |body: &[u8]| wire::first_packet(&[&PROTOCOL_3_0.to_be_bytes()[..], body].concat());
    let walsender = |value| {
        let database: (&[u8], &[u8]) = (b"database", b"prod");
        startup(
            PROTOCOL_3_0,
            &[(b"user", b"walker"), database, (b"replication", value)],
        )
    };
    vec![
        ("plain", wire::login("app", "prod")),
        ("no database", three(&[(b"user", b"app")])),
        (
            "empty database",
            three(&[(b"user", b"app"), (b"database", b"")]),
        ),
        (
            "database first",
            three(&[(b"database", b"prod"), (b"user", b"app")]),
        ),
        ("no user", three(&[(b"database", b"prod")])),
        (
            "empty user",
            three(&[(b"user", b""), (b"database", b"prod")]),
        ),
        ("no pairs", three(&[])),
        (
            "two users",
            three(&[
                (b"user", b"guest"),
                (b"user", b"app"),
                (b"database", b"prod"),
            ]),
        ),
        (
            "two databases",
            three(&[
                (b"user", b"app"),
                (b"database", b"prod"),
                (b"database", b"stage"),
            ]),
        ),
        (
            "empty last database",
            three(&[
                (b"user", b"app"),
                (b"database", b"prod"),
                (b"database", b""),
            ]),
        ),
        (
            "capital key",
            three(&[
                (b"USER", b"guest"),
                (b"user", b"app"),
                (b"database", b"prod"),
            ]),
        ),
        ("63 bytes", three(&[(b"user", long)])),
        ("64 bytes", three(&[(b"user", &longer)])),
        (
            "64 bytes twice",
            three(&[(b"user", &longer), (b"database", &longer)]),
        ),
        (
            "options",
            three(&[
                (b"user", b"app"),
                (b"options", b"-c search_path=x"),
                (b"database", b"prod"),
            ]),
        ),
        (
            "unknown option",
            three(&[(b"user", b"app"), (b"no.such", b""), (b"database", b"prod")]),
        ),
        (
            "unknown setting",
            three(&[(b"user", b"app"), (b"nosuch", b"1"), (b"database", b"prod")]),
        ),
        (
            "unknown user",
            three(&[(b"user", b"who is it"), (b"database", b"prod")]),
        ),
        (
            "unknown database",
            three(&[(b"user", b"app"), (b"database", b"what is it")]),
        ),
        ("only the version", raw(b"")),
        ("no terminator", raw(b"user\0app\0database\0prod\0")),
        ("two terminators", raw(b"user\0app\0database\0prod\0\0\0")),
        ("garbage after the terminator", raw(b"user\0app\0\0garbage")),
        (
            "pair after the terminator",
            raw(b"user\0app\0\0database\0prod\0\0"),
        ),
        ("key without value", raw(b"user\0app\0database\0")),
        ("key without end", raw(b"user\0app\0database")),
        ("value without end", raw(b"user\0app")),
        ("replication=on", walsender(b"on")),
        ("replication=t", walsender(b"t")),
        ("replication=1", walsender(b"1")),
        ("replication=yes", walsender(b"yes")),
        ("replication=TRUE", walsender(b"TRUE")),
        ("replication=false", walsender(b"false")),
        ("replication=of", walsender(b"of")),
        ("replication=0", walsender(b"0")),
        ("replication=o", walsender(b"o")),
        ("replication=maybe", walsender(b"maybe")),
        ("replication=", walsender(b"")),
        ("replication=database", walsender(b"database")),
        ("replication=Database", walsender(b"Database")),
        ("protocol 4.0", startup(4 << 16, &[(b"user", b"app")])),
        (
            "protocol 1234.5678",
            wire::first_packet(&80_877_102_u32.to_be_bytes()),
        ),
        (
            "protocol 1234.5681",
            wire::first_packet(&80_877_105_u32.to_be_bytes()),
        ),
        ("protocol 0", startup(0, &[(b"user", b"app")])),
        ("length 0", vec![0, 0, 0, 0]),
        ("length 7", vec![0, 0, 0, 7, 0, 3, 0]),
        (
            "length 10005",
            [&10_005_u32.to_be_bytes()[..], &[0; 64]].concat(),
        ),
        ("length below 0", vec![0xFF; 8]),
    ]
}

fn same_reading(stage: &Stage) -> Result<()> {
    let gate = Gate::start(stage.plane, stage.postgres.address(), "")?;
    let mut wrong = Vec::new();
    for (name, packet) in packets() {
        let (expected, _direct) = read(stage.postgres.address(), &packet)?;
        let (got, session) = read(gate.address(), &packet)?;
        let same = match (&expected, &got) {
            // The server's highest minor version is its own affair.
            (Reading::Error(code, _), Reading::Error(got, _)) if code == "0A000" => code == got,
            _ => expected == got,
        };
        if !same {
            wrong.push(format!("{name}: PostgreSQL {expected:?}, gate {got:?}"));
        }
        // And it is counted as the one that PostgreSQL sees.
        if let (Reading::In(identity), Some(_)) = (&got, &session) {
            let now = gate.connections()?;
            let users = now.in_use("by_user").join(",");
            let databases = now.in_use("by_database").join(",");
            let counted = format!("{users}@{databases}");
            if counted != *identity {
                wrong.push(format!(
                    "{name}: PostgreSQL sees {identity}, gate counts {counted}"
                ));
            }
        }
        drop(session);
        gate.wait_connections(SOON, name, |now| now.active() == 0 && now.pending() == 0)?;
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    gate.wait_empty(SOON)
}

/// Sends a first packet and half-closes nothing: the server must decide.
fn read(address: SocketAddr, packet: &[u8]) -> Result<(Reading, Option<Session>)> {
    let mut wire = Wire::connect(address)?;
    wire.send(packet)?;
    let mut session = match Session::finish(wire) {
        Ok(session) => session,
        Err(OpenError::Refused(error)) => {
            let reading = Reading::Error(error.code().into(), error.text().into());
            return Ok((reading, None));
        }
        Err(OpenError::Closed) => return Ok((Reading::Silent, None)),
        Err(OpenError::Io(error)) if error.kind() == std::io::ErrorKind::ConnectionReset => {
            return Ok((Reading::Silent, None));
        }
        Err(other) => bail!("{other}"),
    };
    let identity = match session.value("select current_user || '@' || current_database()") {
        Ok(identity) => identity,
        // A physical walsender knows no SQL: it has no database.
        Err(OpenError::Refused(_)) => {
            let row = session
                .query("IDENTIFY_SYSTEM")?
                .pop()
                .context("IDENTIFY_SYSTEM")?;
            format!("walker@{}", row[3].clone().unwrap_or_default())
        }
        Err(other) => bail!("{other}"),
    };
    Ok((Reading::In(identity), Some(session)))
}
