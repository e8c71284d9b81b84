//! The harness itself, against plain PostgreSQL: what the other tests trust.

use std::time::Duration;

use anyhow::Result;
use gate_tests::backend::{FakeBackend, Script};
use gate_tests::clients::{block_on, both_streams, psql, sqlstate, tokio_client};
use gate_tests::postgres::{LOCKED_PASSWORD, LOCKED_USER};
use gate_tests::session::Session;
use gate_tests::suite::{Stage, Suite};
use gate_tests::wire::{self, Wire};

pub fn register(suite: &mut Suite) {
    suite.local("harness_clients_reach_plain_postgresql", clients);
    suite.local("harness_reads_errors_strictly", errors);
    suite.local("harness_fake_backends_follow_their_script", fakes);
}

fn clients(stage: &Stage) -> Result<()> {
    let address = stage.postgres.address();
    let mut session = Session::open(address, "app", "prod")?;
    assert_eq!(
        session.value("select current_user || '@' || current_database()")?,
        "app@prod"
    );
    assert_eq!(session.key.len(), 4);
    let error = session.query("select 1/0").expect_err("division by zero");
    assert_eq!(error.code(), "22012");
    assert_eq!(session.query("select 1, null")?, [[Some("1".into()), None]]);
    session.close()?;

    let output = psql(address, "app", "prod", "select 40 + 2")?;
    assert_eq!(both_streams(&output), "42\n");
    let wrong = block_on(Duration::from_secs(10), async {
        let good = tokio_client(address, LOCKED_USER, "prod", Some(LOCKED_PASSWORD)).await?;
        good.simple_query("select 1").await?;
        Ok::<_, anyhow::Error>(tokio_client(address, LOCKED_USER, "prod", Some("wrong")).await)
    })??;
    assert_eq!(
        sqlstate(&wrong.expect_err("the password is wrong")),
        "28P01"
    );
    Ok(())
}

fn errors(stage: &Stage) -> Result<()> {
    let error = Session::open(stage.postgres.address(), "nobody here", "prod")
        .expect_err("there is no such role");
    assert_eq!(error.code(), "28000");
    assert_eq!(error.text(), "role \"nobody here\" does not exist");
    for body in [
        &b"SFATAL\0"[..],
        b"SFATAL",
        b"SFATAL\0\0x",
        b"M\xFF\0\0",
        b"",
    ] {
        assert!(wire::ErrorResponse::parse(body).is_err(), "{body:?}");
    }
    Ok(())
}

fn fakes(_: &Stage) -> Result<()> {
    let fake = FakeBackend::start(Script::Trusting)?;
    let mut session = Session::open(fake.address(), "any", "thing")?;
    assert_eq!(session.value("what I said")?, "what I said");
    assert_eq!(fake.startups(), [wire::login("any", "thing")]);
    let mut cancel = Wire::connect(fake.address())?;
    cancel.send(&session.cancel_packet())?;
    assert!(cancel.ends_within(Duration::from_secs(1)));
    assert_eq!(fake.cancels(), [wire::cancel(7, &[1, 2, 3, 4])]);
    fake.switch(Script::Full);
    let refused = Session::open(fake.address(), "any", "thing").expect_err("it is full");
    assert_eq!(refused.code(), "53300");
    fake.switch(Script::Resets);
    assert!(Session::open(fake.address(), "any", "thing").is_err());
    assert_eq!(fake.accepted(), 4);
    Ok(())
}
