//! The shape of a refusal: what drivers, logs and scrapers read.

use std::time::{Duration, Instant};

use anyhow::Result;
use gate_tests::backend::{FakeBackend, Script};
use gate_tests::clients::{both_streams, libpq};
use gate_tests::gate::Gate;
use gate_tests::host;
use gate_tests::session::{OpenError, Session};
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire::{self, ErrorResponse, PROTOCOL_3_0, SSL_REQUEST, Wire, startup};

const SOON: Duration = Duration::from_secs(2);

pub fn register(suite: &mut Suite) {
    suite.both("f2_golden_bytes_of_every_refusal", golden_bytes);
    suite.both("f1_every_limit_is_53300_and_names_itself", every_limit);
    suite.both(
        "d4_psql_reads_the_refusal_in_every_sslmode",
        psql_in_every_sslmode,
    );
    suite.both("e7_hostile_names_break_nothing", hostile_names);
    suite.both(
        "a_refused_client_that_does_not_close_is_closed",
        refused_client_lingers,
    );
}

const EVERY_LIMIT: &str = "[limits]\nmax_connections = 3\n\
                           [limits.user]\napp = 1\nretired = \"none\"\n\
                           [limits.database]\nstage = 1";

/// Sends a startup packet and reads to the end of the stream.
fn answer(gate: &Gate, packet: &[u8]) -> Result<Vec<u8>> {
    let mut wire = Wire::connect(gate.address())?;
    wire.send(packet)?;
    let start = Instant::now();
    let bytes = wire.rest(SOON)?;
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );
    Ok(bytes)
}

/// `E`, a length that counts itself, S, V, C, M in that order, a final NUL,
/// and nothing behind it but the FIN.
fn assert_golden(bytes: &[u8], code: &str, text: &str) {
    let shown = String::from_utf8_lossy(bytes);
    assert_eq!(bytes.first(), Some(&b'E'), "{shown}");
    let length = u32::from_be_bytes(bytes[1..5].try_into().expect("four bytes"));
    assert_eq!(length as usize, bytes.len() - 1, "{shown}");
    assert!((8..=30_000).contains(&length));
    let error = ErrorResponse::parse(&bytes[5..]).expect("strictly readable");
    let kinds: Vec<u8> = error.fields.iter().map(|(kind, _)| *kind).collect();
    assert!(kinds.starts_with(b"SVCM"), "{shown}");
    assert!(
        kinds[4..].iter().all(|kind| b"DH".contains(kind)),
        "{shown}"
    );
    assert_eq!(error.field(b'S'), "FATAL");
    assert_eq!(error.field(b'V'), "FATAL");
    assert_eq!(error.code(), code);
    assert_eq!(error.text(), text);
}

fn golden_bytes(stage: &Stage) -> Result<()> {
    let gate = Gate::start(stage.plane, stage.postgres.address(), EVERY_LIMIT)?;
    let one = gate.open("app", "stage")?;
    let app = answer(&gate, &wire::login("app", "prod"))?;
    assert_golden(&app, "53300", "too many connections for role \"app\"");
    let retired = answer(&gate, &wire::login("retired", "prod"))?;
    assert_golden(
        &retired,
        "53300",
        "too many connections for role \"retired\"",
    );
    let stage_full = answer(&gate, &wire::login("guest", "stage"))?;
    assert_golden(
        &stage_full,
        "53300",
        "too many connections for database \"stage\"",
    );
    let two = gate.open_all(2, "guest", "prod")?;
    let full = answer(&gate, &wire::login("guest", "prod"))?;
    assert_golden(&full, "53300", "sorry, too many clients already");
    let nobody = answer(&gate, &startup(PROTOCOL_3_0, &[(b"database", b"prod")]))?;
    assert_golden(
        &nobody,
        "28000",
        "no PostgreSQL user name specified in startup packet",
    );
    let body = [&PROTOCOL_3_0.to_be_bytes()[..], b"user\0app\0\0x"].concat();
    let malformed = answer(&gate, &wire::first_packet(&body))?;
    let text = "invalid startup packet layout: expected terminator as last byte";
    assert_golden(&malformed, "08P01", text);
    // The refusal answers the startup packet, never the SSLRequest.
    let mut wire = Wire::connect(gate.address())?;
    wire.send(&SSL_REQUEST)?;
    assert_eq!(wire.byte()?, b'N');
    wire.send(&wire::login("guest", "prod"))?;
    assert_golden(
        &wire.rest(SOON)?,
        "53300",
        "sorry, too many clients already",
    );
    drop((one, two));
    gate.wait_empty(SOON)
}

fn every_limit(stage: &Stage) -> Result<()> {
    let gate = Gate::start(stage.plane, stage.postgres.address(), EVERY_LIMIT)?;
    let _one = gate.open("app", "stage")?;
    gate.refused("app", "prod")?;
    gate.refused("guest", "stage")?;
    let _two = gate.open_all(2, "guest", "prod")?;
    let texts = [
        gate.refused("guest", "prod")?.text().to_owned(),
        gate.refused("app", "stage")?.text().to_owned(),
    ];
    // F4: no numbers for strangers.
    assert!(
        texts
            .iter()
            .all(|text| !text.contains(|c: char| c.is_ascii_digit())),
        "{texts:?}"
    );
    let metrics = gate.metrics()?;
    let by_reason = |reason| metrics.sum("gate_connections_rejected_total", &[("reason", reason)]);
    assert_eq!(by_reason("database"), 1.0);
    assert_eq!(by_reason("user") + by_reason("max_connections"), 3.0);
    assert!(by_reason("user") >= 1.0 && by_reason("max_connections") >= 1.0);
    Ok(())
}

fn psql_in_every_sslmode(stage: &Stage) -> Result<()> {
    let gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits.user]\napp = 1",
    )?;
    let _one = gate.open("app", "prod")?;
    let psql = |user: &str, sslmode: &str, gssencmode: &str| -> Result<String> {
        let mut command = libpq("psql", gate.address(), user)?;
        command
            .env("PGSSLMODE", sslmode)
            .env("PGGSSENCMODE", gssencmode);
        command.args(["-X", "-A", "-t", "-d", "prod", "-c", "select 1"]);
        Ok(both_streams(&host::run(
            &mut command,
            Duration::from_secs(10),
        )?))
    };
    for sslmode in ["disable", "allow", "prefer"] {
        for gssencmode in ["disable", "prefer"] {
            let said = psql("app", sslmode, gssencmode)?;
            let wanted = "FATAL:  too many connections for role \"app\"";
            assert!(said.contains(wanted), "{sslmode} {gssencmode}: {said}");
            assert_eq!(psql("guest", sslmode, gssencmode)?, "1\n");
        }
    }
    let said = psql("guest", "require", "prefer")?;
    assert!(
        said.contains("server does not support SSL, but SSL was required"),
        "{said}"
    );
    Ok(())
}

fn hostile_names(stage: &Stage) -> Result<()> {
    let backend = FakeBackend::start(Script::Trusting)?;
    let gate = Gate::start(stage.plane, backend.address(), "[limits]\ndefault_user = 1")?;
    let names: [&[u8]; 9] = [
        // The label that all users without a limit of their own share.
        b"other",
        b"100%s %n",
        b"quote\" back\\slash 'single'",
        b"line\nfeed\r\ttab",
        b"\xFF\xFEnot utf-8\xC3",
        b"{user=\"x\"} 1",
        b"\x1B[31mred\x07",
        "наум \u{202E}\u{1F600}".as_bytes(),
        b"--user",
    ];
    for name in names {
        let packet = startup(PROTOCOL_3_0, &[(b"user", name), (b"database", name)]);
        let mut wire = Wire::connect(gate.address())?;
        wire.send(&packet)?;
        let mut session = Session::finish(wire)?;
        assert_eq!(session.value("hello")?, "hello");
        let lines = gate.log().len();

        let refused = answer(&gate, &packet)?;
        let error = ErrorResponse::parse(&refused[5..]).expect("valid UTF-8, strictly readable");
        assert_eq!(error.code(), "53300");
        assert!(
            error.text().starts_with("too many connections for role \""),
            "{error:?}"
        );
        assert!(!error.text().contains(char::is_control), "{error:?}");

        gate.metrics()?;
        let now = gate.connections()?;
        let shown = now.in_use("by_user");
        assert_eq!(shown.len(), 1, "{}", now.0);
        // The escaped form is accepted back and means the same name.
        gate.gatectl(&["limits", "set", "user", "--", &shown[0], "2"])?;
        gate.metrics()?;
        let mut wire = Wire::connect(gate.address())?;
        wire.send(&packet)?;
        let second = Session::finish(wire)?;
        assert_eq!(answer(&gate, &packet)?.first(), Some(&b'E'));
        gate.gatectl(&["limits", "unset", "user", "--", &shown[0]])?;
        let table = gate.gatectl(&["connections"])?;
        assert!(
            !table.contains(|c: char| c.is_control() && c != '\n'),
            "{table:?}"
        );
        let log = gate.log();
        for line in &log[lines..] {
            serde_json::from_str::<serde_json::Value>(line)?;
        }
        drop((session, second));
        gate.wait_empty(SOON)?;
    }
    Ok(())
}

fn refused_client_lingers(stage: &Stage) -> Result<()> {
    let gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits.user]\nretired = \"none\"",
    )?;
    let mut lingering = Vec::new();
    for _ in 0..20 {
        let mut wire = Wire::connect(gate.address())?;
        wire.send(&wire::login("retired", "prod"))?;
        let refused = wire.message()?.expect("an answer");
        assert_eq!(refused.tag, b'E');
        assert_eq!(wire.message()?, None, "FIN follows");
        lingering.push(wire);
    }
    // None of them closes its side: gate waits for at most a second or so.
    gate.wait_empty(Duration::from_secs(3))?;
    let open = gate.usage()?.fds;
    drop(lingering);
    assert!(open < 200, "{open} descriptors");
    assert!(matches!(
        gate.open("retired", "prod"),
        Err(OpenError::Refused(_))
    ));
    Ok(())
}
