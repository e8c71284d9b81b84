//! First packets: gate and PostgreSQL must read the same, or gate refuses.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use gate_tests::backend::{FakeBackend, Script};
use gate_tests::gate::Gate;
use gate_tests::host;
use gate_tests::postgres::LONG_USER;
use gate_tests::session::{OpenError, Session};
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire::{self, GSSENC_REQUEST, PROTOCOL_3_0, SSL_REQUEST, Wire, startup};

const SOON: Duration = Duration::from_secs(2);
/// `MAX_STARTUP_PACKET_LENGTH` in `src/include/libpq/pqcomm.h`, plus the length itself.
const LONGEST: usize = 10_004;

pub fn register(suite: &mut Suite) {
    suite.both("e2_gate_and_postgresql_read_the_same_packet", same_reading);
    suite.both(
        "e1_segments_and_sizes_of_the_startup_packet",
        segments_and_sizes,
    );
    suite.both(
        "e3_protocol_versions_are_negotiated_by_the_server_alone",
        versions,
    );
    suite.both("e5_packets_pass_byte_for_byte", byte_for_byte);
    suite.both(
        "d1_ssl_and_gss_requests_once_each_in_either_order",
        encryption_requests,
    );
    suite.both(
        "d3_nothing_behind_an_encryption_request_is_a_startup",
        pipelined,
    );
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
        ("protocol 2.0", startup(2 << 16, &[(b"user", b"app")])),
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

/// A valid packet of exactly `length` bytes.
fn padded(length: usize) -> Vec<u8> {
    let shortest = startup(
        PROTOCOL_3_0,
        &[(b"user", b"app"), (b"database", b"prod"), (b"a.b", b"")],
    );
    let filler = vec![b'x'; length - shortest.len()];
    startup(
        PROTOCOL_3_0,
        &[(b"user", b"app"), (b"database", b"prod"), (b"a.b", &filler)],
    )
}

fn segments_and_sizes(stage: &Stage) -> Result<()> {
    let gate = Gate::start(stage.plane, stage.postgres.address(), "")?;
    let mut wire = Wire::connect(gate.address())?;
    wire.send_slowly(&wire::login("app", "prod"), Duration::from_millis(2))?;
    let mut session = Session::finish(wire)?;
    assert_eq!(session.value("select current_user")?, "app");

    let mut wire = Wire::connect(gate.address())?;
    wire.send_slowly(&SSL_REQUEST, Duration::from_millis(2))?;
    assert_eq!(wire.byte()?, b'N');
    wire.send_slowly(&wire::login("app", "prod"), Duration::from_millis(2))?;
    Session::finish(wire)?.close()?;

    for pieces in [1, 2, 5] {
        let packet = padded(LONGEST);
        assert_eq!(packet.len(), LONGEST);
        let mut wire = Wire::connect(gate.address())?;
        for piece in packet.chunks(LONGEST.div_ceil(pieces)) {
            wire.send(piece)?;
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut session = Session::finish(wire).with_context(|| format!("in {pieces}"))?;
        assert_eq!(
            session.value("select length(current_setting('a.b'))")?,
            "9952"
        );
    }
    let mut wire = Wire::connect(gate.address())?;
    wire.send(&padded(LONGEST + 1))?;
    assert_eq!(
        wire.rest(SOON)?,
        b"",
        "one byte too long is closed without a word"
    );
    drop(session);
    gate.wait_empty(SOON)?;
    let failures = gate
        .metrics()?
        .sum("gate_startup_failures_total", &[("reason", "bad_startup")]);
    assert_eq!(failures, 1.0);

    // A query sent with the startup packet is not lost.
    let mut wire = Wire::connect(gate.address())?;
    let mut both = wire::login("app", "prod");
    both.extend(wire::query("select 'pipelined'"));
    wire.send(&both)?;
    let mut session = Session::finish(wire)?;
    assert_eq!(session.answer()?, [[Some("pipelined".to_owned())]]);
    Ok(())
}

fn versions(stage: &Stage) -> Result<()> {
    let gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits.user]\nretired = \"none\"",
    )?;
    let minors = [0_u32, 1, 2, 9999];
    for minor in minors {
        for option in [&b"application_name"[..], b"_pq_.test_protocol_negotiation"] {
            let packet = |user: &[u8]| {
                startup(
                    3 << 16 | minor,
                    &[(b"user", user), (b"database", b"prod"), (option, b"x")],
                )
            };
            let open = |address| {
                let mut wire = Wire::connect(address)?;
                wire.send(&packet(b"app"))?;
                Session::finish(wire)
            };
            let direct = open(stage.postgres.address())?;
            let mut through = open(gate.address())?;
            assert_eq!(through.negotiations, direct.negotiations, "3.{minor}");
            assert_eq!(through.value("select current_user")?, "app");

            let mut wire = Wire::connect(gate.address())?;
            wire.send(&packet(b"retired"))?;
            let refused = Session::finish(wire).expect_err("nobody may");
            assert_eq!(refused.code(), "53300", "3.{minor}: {refused}");
        }
    }
    Ok(())
}

fn byte_for_byte(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let gate = Gate::start(stage.plane, backend.address(), "")?;
    let options: Pairs = &[
        (b"user", b"app"),
        (b"database", b"prod"),
        (b"options", b"-c geqo=off -c statement_timeout=5min"),
        (b"application_name", b""),
        (b"unknown parameter", b"\x01\x02\xFF"),
        (b"_pq_.future", b"yes"),
        (b"user", b"app"),
    ];
    let sent = [
        wire::login("app", "prod"),
        startup(PROTOCOL_3_0, options),
        startup(3 << 16 | 9999, options),
        startup(
            PROTOCOL_3_0,
            &[(b"user", &[b'u'; 200]), (b"database", &[b'd'; 200])],
        ),
        startup(
            PROTOCOL_3_0,
            &[(b"user", b"\xFF\xFE\" %s\n"), (b"database", b"\\x")],
        ),
        padded(LONGEST),
    ];
    for packet in &sent {
        let mut wire = Wire::connect(gate.address())?;
        wire.send(packet)?;
        let mut session = Session::finish(wire)?;
        assert_eq!(session.value("echo")?, "echo");
    }
    let received = backend.startups();
    assert_eq!(received.len(), sent.len());
    for (number, (sent, received)) in sent.iter().zip(&received).enumerate() {
        assert!(sent == received, "packet {number} was changed");
    }
    gate.wait_empty(SOON)
}

fn encryption_requests(stage: &Stage) -> Result<()> {
    let gate = Gate::start(stage.plane, stage.postgres.address(), "")?;
    for requests in [
        &[][..],
        &[SSL_REQUEST],
        &[GSSENC_REQUEST],
        &[SSL_REQUEST, GSSENC_REQUEST],
        &[GSSENC_REQUEST, SSL_REQUEST],
    ] {
        for address in [stage.postgres.address(), gate.address()] {
            let mut wire = Wire::connect(address)?;
            for request in requests {
                wire.send(request)?;
                assert_eq!(wire.byte()?, b'N');
            }
            wire.send(&wire::login("app", "prod"))?;
            let mut session = Session::finish(wire)?;
            assert_eq!(session.value("select current_user")?, "app");
        }
    }
    for twice in [SSL_REQUEST, GSSENC_REQUEST] {
        for address in [stage.postgres.address(), gate.address()] {
            let mut wire = Wire::connect(address)?;
            wire.send(&twice)?;
            assert_eq!(wire.byte()?, b'N');
            wire.send(&twice)?;
            let failure = Session::finish(wire).expect_err("each is legal once");
            assert_eq!(failure.code(), "0A000", "{failure}");
        }
    }
    // A cancel may come behind an encryption request too.
    let mut sleeper = gate.open("app", "prod")?;
    sleeper.wire.send(&wire::query("select pg_sleep(20)"))?;
    std::thread::sleep(Duration::from_millis(100));
    let mut cancel = Wire::connect(gate.address())?;
    cancel.send(&SSL_REQUEST)?;
    assert_eq!(cancel.byte()?, b'N');
    cancel.send(&sleeper.cancel_packet())?;
    assert_eq!(cancel.rest(SOON)?, b"");
    assert_eq!(sleeper.answer().expect_err("cancelled").code(), "57014");
    drop(sleeper);
    gate.wait_empty(SOON)
}

fn pipelined(stage: &Stage) -> Result<()> {
    let gate = Gate::start(stage.plane, stage.postgres.address(), "")?;
    for request in [SSL_REQUEST, GSSENC_REQUEST] {
        for address in [stage.postgres.address(), gate.address()] {
            let mut wire = Wire::connect(address)?;
            let mut bytes = request.to_vec();
            bytes.extend(wire::login("app", "prod"));
            wire.send(&bytes)?;
            let answer = wire.rest(SOON)?;
            // PostgreSQL may say N first; what follows is an error or nothing.
            let rest = answer.strip_prefix(b"N").unwrap_or(&answer);
            let Some((b'E', message)) = rest.split_first() else {
                assert_eq!(rest, b"", "neither an error nor the end");
                continue;
            };
            let error = wire::ErrorResponse::parse(&message[4..]).map_err(anyhow::Error::msg)?;
            assert_eq!(error.code(), "08P01", "{error:?}");
        }
    }
    host::eventually_true(SOON, "counted as bad", || {
        let bad = gate
            .metrics()?
            .sum("gate_startup_failures_total", &[("reason", "bad_startup")]);
        Ok(bad == 2.0)
    })?;
    gate.wait_empty(SOON)
}
