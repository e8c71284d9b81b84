//! The startup phase: segments, sizes, versions, encryption requests.

use std::time::Duration;

use anyhow::{Context, Result};
use gate_tests::backend::{FakeBackend, Script};
use gate_tests::gate::Gate;
use gate_tests::host;
use gate_tests::session::Session;
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire::{self, GSSENC_REQUEST, PROTOCOL_3_0, SSL_REQUEST, Wire, startup};

const SOON: Duration = Duration::from_secs(2);
/// `MAX_STARTUP_PACKET_LENGTH` in `src/include/libpq/pqcomm.h`, plus the length itself.
const LONGEST: usize = 10_004;

pub fn register(suite: &mut Suite) {
    suite.both(
        "e1_segments_and_sizes_of_the_startup_packet",
        segments_and_sizes,
    );
    suite.both("e1_every_valid_first_packet_byte_by_byte", byte_by_byte);
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

type Pairs<'a> = &'a [(&'a [u8], &'a [u8])];

/// A valid packet of exactly `length` bytes; `filler` is how many are padding.
fn padded(length: usize) -> (Vec<u8>, usize) {
    let login = |filler: &[u8]| {
        let pairs: Pairs = &[(b"user", b"app"), (b"database", b"prod"), (b"a.b", filler)];
        startup(PROTOCOL_3_0, pairs)
    };
    let filler = length - login(b"").len();
    (login(&vec![b'x'; filler]), filler)
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
        let (packet, filler) = padded(LONGEST);
        assert_eq!(packet.len(), LONGEST);
        let mut wire = Wire::connect(gate.address())?;
        for piece in packet.chunks(LONGEST.div_ceil(pieces)) {
            wire.send(piece)?;
            std::thread::sleep(Duration::from_millis(20));
        }
        let mut session = Session::finish(wire).with_context(|| format!("in {pieces}"))?;
        assert_eq!(
            session.value("select length(current_setting('a.b'))")?,
            filler.to_string()
        );
    }
    let mut wire = Wire::connect(gate.address())?;
    wire.send(&padded(LONGEST + 1).0)?;
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

fn byte_by_byte(stage: &Stage) -> Result<()> {
    let gate = Gate::start(stage.plane, stage.postgres.address(), "")?;
    let app: Pairs = &[(b"user", b"app"), (b"database", b"prod")];
    let with = |key, value| startup(PROTOCOL_3_0, &[app, &[(key, value)]].concat());
    let logins = [
        ("3.0", startup(PROTOCOL_3_0, app)),
        ("3.2", startup(PROTOCOL_3_0 + 2, app)),
        ("user only", startup(PROTOCOL_3_0, &app[..1])),
        ("options", with(b"options", b"-c geqo=off")),
        ("no replication", with(b"replication", b"false")),
        ("an option of the protocol", with(b"_pq_.x", b"1")),
    ];
    let pause = Duration::from_millis(1);
    for (name, packet) in logins {
        for requests in [&[][..], &[SSL_REQUEST, GSSENC_REQUEST]] {
            let mut wire = Wire::connect(gate.address())?;
            for request in requests {
                wire.send_slowly(request, pause)?;
                assert_eq!(wire.byte()?, b'N', "{name}");
            }
            wire.send_slowly(&packet, pause)?;
            let mut session = Session::finish(wire).context(name)?;
            assert_eq!(session.value("select current_user")?, "app", "{name}");
        }
    }
    let walker: Pairs = &[
        (b"user", b"walker"),
        (b"database", b"prod"),
        (b"replication", b"database"),
    ];
    let mut wire = Wire::connect(gate.address())?;
    wire.send_slowly(&startup(PROTOCOL_3_0, walker), pause)?;
    Session::finish(wire).context("a walsender")?;

    let mut sleeper = gate.open("app", "prod")?;
    sleeper.wire.send(&wire::query("select pg_sleep(30)"))?;
    let mut cancel = Wire::connect(gate.address())?;
    // Not before the query has begun.
    std::thread::sleep(Duration::from_millis(100));
    cancel.send_slowly(&sleeper.cancel_packet(), pause)?;
    assert_eq!(cancel.rest(SOON)?, b"");
    let cancelled = sleeper.answer().expect_err("the query was cancelled");
    assert_eq!(cancelled.code(), "57014");
    drop(sleeper);
    gate.wait_empty(SOON)?;
    let failures = gate.metrics()?.sum("gate_startup_failures_total", &[]);
    assert_eq!(failures, 0.0);
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
    // PostgreSQL speaks protocol 2 to a client of protocol 2; psql has not for
    // a decade. The words are what counts.
    let mut wire = Wire::connect(gate.address())?;
    wire.send(&startup(2 << 16, &[(b"user", b"app")]))?;
    let said = String::from_utf8_lossy(&wire.rest(SOON)?).into_owned();
    let words = "unsupported frontend protocol 2.0: server supports 3.0 to 3.";
    assert!(said.starts_with('E') && said.contains(words), "{said:?}");
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
        padded(LONGEST).0,
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
        let mut wire = Wire::connect(gate.address())?;
        for request in requests {
            wire.send(request)?;
            assert_eq!(wire.byte()?, b'N');
        }
        wire.send(&wire::login("app", "prod"))?;
        let mut session = Session::finish(wire)?;
        assert_eq!(session.value("select current_user")?, "app");
    }
    for (address, twice) in [
        (stage.postgres.address(), SSL_REQUEST),
        (gate.address(), SSL_REQUEST),
        // PostgreSQL may have Kerberos and answer G.
        (gate.address(), GSSENC_REQUEST),
    ] {
        let mut wire = Wire::connect(address)?;
        wire.send(&twice)?;
        assert_eq!(wire.byte()?, b'N');
        wire.send(&twice)?;
        let failure = Session::finish(wire).expect_err("each is legal once");
        assert_eq!(failure.code(), "0A000", "{failure}");
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
    for (address, request) in [
        (stage.postgres.address(), SSL_REQUEST),
        (gate.address(), SSL_REQUEST),
        (gate.address(), GSSENC_REQUEST),
    ] {
        let mut wire = Wire::connect(address)?;
        wire.send(&[&request[..], &wire::login("app", "prod")].concat())?;
        let answer = wire.rest(SOON)?;
        // PostgreSQL says N first; what follows is an error, never a login.
        let rest = answer.strip_prefix(b"N").unwrap_or(&answer);
        let Some((b'E', message)) = rest.split_first() else {
            assert_eq!(rest, b"", "neither an error nor the end");
            continue;
        };
        let error = wire::ErrorResponse::parse(&message[4..]).map_err(anyhow::Error::msg)?;
        assert_eq!(error.code(), "08P01", "{error:?}");
    }
    host::eventually_true(SOON, "counted as bad", || {
        let bad = gate
            .metrics()?
            .sum("gate_startup_failures_total", &[("reason", "bad_startup")]);
        Ok(bad == 2.0)
    })?;
    gate.wait_empty(SOON)
}
