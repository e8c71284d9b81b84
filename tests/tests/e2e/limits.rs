//! Limits: who is let in, who is not, and what operators see and change.

use std::time::Duration;

use anyhow::Result;
use gate_tests::clients::{block_on, both_streams, psql, sqlstate, tokio_client};
use gate_tests::crowd;
use gate_tests::gate::Gate;
use gate_tests::observe::Count;
use gate_tests::suite::{Stage, Suite};

const SOON: Duration = Duration::from_secs(2);

pub fn register(suite: &mut Suite) {
    suite.both(
        "psql_and_tokio_postgres_see_the_third_of_two_refused",
        third_of_two,
    );
    suite.both("an_override_wins_over_the_default_of_its_kind", overrides);
    suite.both("a_database_limit_is_shared_by_its_users", shared_database);
    suite.both("a9_zero_one_and_none_are_three_values", zero_one_none);
    suite.both(
        "gatectl_lowers_and_raises_while_connected",
        gatectl_lowers_and_raises,
    );
    suite.both(
        "sighup_lowers_and_raises_while_connected",
        sighup_lowers_and_raises,
    );
    suite.both(
        "a_runtime_limit_wins_over_a_reload_until_unset",
        runtime_wins,
    );
    suite.both("two_hundred_at_once_take_exactly_the_limit", two_hundred);
    suite.both("a5_all_slots_or_none", all_or_none);
}

fn third_of_two(stage: &Stage) -> Result<()> {
    let gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits.user]\napp = 2",
    )?;
    let mut sessions = gate.open_all(2, "app", "prod")?;
    assert_eq!(sessions[1].value("select current_user")?, "app");

    let third = psql(gate.address(), "app", "prod", "select 1")?;
    assert_eq!(third.status.code(), Some(2), "{}", both_streams(&third));
    let said = both_streams(&third);
    assert!(
        said.contains("FATAL:  too many connections for role \"app\""),
        "{said}"
    );
    let error = block_on(
        Duration::from_secs(10),
        tokio_client(gate.address(), "app", "prod", None),
    )?
    .expect_err("the limit is 2");
    assert_eq!(sqlstate(&error), "53300");
    assert_eq!(
        gate.refused("app", "stage")?.text(),
        "too many connections for role \"app\""
    );

    // Others are not affected, and a slot that comes back is used again.
    gate.open("guest", "prod")?.close()?;
    sessions.remove(0).close()?;
    gate.wait_connections(SOON, "app has 1", |now| now.user("app").active == 1)?;
    let again = psql(gate.address(), "app", "prod", "select current_user")?;
    assert_eq!(both_streams(&again), "app\n");
    drop(sessions);
    gate.wait_empty(SOON)
}

fn overrides(stage: &Stage) -> Result<()> {
    let settings = "[limits]\ndefault_user = 1\ndefault_database = 20\n\
                    [limits.user]\nadmin = 3\nreport = 0\nretired = \"none\"";
    let gate = Gate::start(stage.plane, stage.postgres.address(), settings)?;
    let _guest = gate.open("guest", "prod")?;
    assert_eq!(gate.refused("guest", "prod")?.code(), "53300");
    let _admins = gate.open_all(3, "admin", "prod")?;
    assert_eq!(gate.refused("admin", "prod")?.code(), "53300");
    let _reports = gate.open_all(12, "report", "prod")?;
    let nobody = gate.refused("retired", "prod")?;
    assert_eq!(nobody.text(), "too many connections for role \"retired\"");

    let now = gate.connections()?;
    let count = |active, limit| Count { active, limit };
    assert_eq!(now.user("guest"), count(1, Some(1)));
    assert_eq!(now.user("admin"), count(3, Some(3)));
    assert_eq!(now.user("report"), count(12, Some(0)));
    assert_eq!(now.user("retired"), count(0, None));
    assert_eq!(now.0["by_user"]["retired"]["none"], true);
    assert_eq!(now.database("prod"), count(16, Some(20)));
    Ok(())
}

fn shared_database(stage: &Stage) -> Result<()> {
    let gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits.database]\nprod = 3",
    )?;
    let mut all = Vec::new();
    for user in ["app", "admin", "guest"] {
        all.push(gate.open(user, "prod")?);
    }
    let error = gate.refused("report", "prod")?;
    assert_eq!(error.code(), "53300");
    assert_eq!(error.text(), "too many connections for database \"prod\"");
    let _elsewhere = gate.open("report", "stage")?;
    all.pop();
    gate.wait_connections(SOON, "prod has 2", |now| now.database("prod").active == 2)?;
    let _now_in = gate.open("report", "prod")?;
    Ok(())
}

fn zero_one_none(stage: &Stage) -> Result<()> {
    let settings = "[limits]\nmax_connections = 0\n\
                    [limits.user]\napp = 0\nadmin = 1\nguest = \"none\"";
    let gate = Gate::start(stage.plane, stage.postgres.address(), settings)?;
    let _unlimited = gate.open_all(60, "app", "prod")?;
    let _one = gate.open("admin", "prod")?;
    assert_eq!(gate.refused("admin", "prod")?.code(), "53300");
    assert_eq!(gate.refused("guest", "prod")?.code(), "53300");
    let now = gate.connections()?;
    assert_eq!(now.active(), 61);
    assert_eq!(now.0["total"]["limit"], 0);
    Ok(())
}

fn gatectl_lowers_and_raises(stage: &Stage) -> Result<()> {
    let gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits.user]\napp = 5",
    )?;
    let mut open = gate.open_all(5, "app", "prod")?;
    gate.gatectl(&["limits", "set", "user", "app", "2"])?;
    let now = gate.connections()?;
    assert_eq!(
        now.user("app"),
        Count {
            active: 5,
            limit: Some(2)
        }
    );
    assert_eq!(now.0["by_user"]["app"]["source"], "runtime");
    for session in &mut open {
        assert_eq!(session.value("select 'alive'")?, "alive");
    }
    for left in (1..5).rev() {
        assert_eq!(
            gate.refused("app", "prod")?.code(),
            "53300",
            "{} are open",
            left + 1
        );
        open.truncate(left);
        gate.wait_connections(SOON, "one less", |now| {
            now.user("app").active == left as i64
        })?;
    }
    open.push(gate.open("app", "prod")?);
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    gate.gatectl(&["limits", "set", "user", "app", "3"])?;
    open.push(gate.open("app", "prod")?);
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    gate.gatectl(&["limits", "set", "user", "app", "none"])?;
    assert_eq!(gate.connections()?.user("app").limit, None);
    gate.gatectl(&["limits", "set", "user", "app", "unlimited"])?;
    assert_eq!(gate.connections()?.user("app").limit, Some(0));
    open.extend(gate.open_all(4, "app", "prod")?);
    gate.gatectl(&["limits", "unset", "user", "app"])?;
    let now = gate.connections()?;
    assert_eq!(
        now.user("app"),
        Count {
            active: 7,
            limit: Some(5)
        }
    );
    assert_eq!(now.0["by_user"]["app"]["source"], "config");

    gate.gatectl(&["limits", "set", "max-connections", "7"])?;
    assert_eq!(
        gate.refused("guest", "prod")?.text(),
        "sorry, too many clients already"
    );
    gate.gatectl(&["limits", "set", "database", "prod", "1"])?;
    gate.gatectl(&["limits", "unset", "max-connections"])?;
    let error = gate.refused("guest", "prod")?;
    assert_eq!(error.text(), "too many connections for database \"prod\"");
    gate.gatectl(&["limits", "set", "default-user", "1"])?;
    let _one = gate.open("guest", "stage")?;
    assert_eq!(gate.refused("guest", "stage")?.code(), "53300");
    Ok(())
}

fn sighup_lowers_and_raises(stage: &Stage) -> Result<()> {
    let with_limit = |limit| format!("[limits.user]\napp = {limit}");
    let mut gate = Gate::start(stage.plane, stage.postgres.address(), &with_limit(4))?;
    let mut open = gate.open_all(4, "app", "prod")?;
    gate.reload(&with_limit(2))?;
    let lowered = gate.wait_connections(SOON, "the limit is 2", |now| {
        now.user("app").limit == Some(2)
    })?;
    assert_eq!(lowered.user("app").active, 4, "a reload keeps every count");
    assert_eq!(lowered.active(), 4);
    assert_eq!(open[3].value("select 'alive'")?, "alive");
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    gate.reload(&with_limit(6))?;
    gate.wait_connections(SOON, "the limit is 6", |now| {
        now.user("app").limit == Some(6)
    })?;
    open.extend(gate.open_all(2, "app", "prod")?);
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");

    // A configuration with a mistake changes nothing and ends nobody.
    gate.reload("[limits]\nno_such_key = 1")?;
    std::thread::sleep(Duration::from_millis(300));
    assert!(gate.is_running());
    let now = gate.connections()?;
    assert_eq!(
        now.user("app"),
        Count {
            active: 6,
            limit: Some(6)
        }
    );
    assert_eq!(open[5].value("select 'alive'")?, "alive");
    // An override that left the file is gone.
    gate.reload("[limits]\ndefault_user = 0")?;
    gate.wait_connections(SOON, "no limit", |now| now.user("app").limit == Some(0))?;
    drop(open);
    gate.wait_empty(SOON)
}

fn runtime_wins(stage: &Stage) -> Result<()> {
    let mut gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits.user]\napp = 3",
    )?;
    gate.gatectl(&["limits", "set", "user", "app", "1"])?;
    gate.reload("[limits]\ndefault_database = 7\n[limits.user]\napp = 9")?;
    let now = gate.wait_connections(SOON, "the reload is in force", |now| {
        now.0["defaults"]["per_database"] == 7
    })?;
    assert_eq!(now.user("app").limit, Some(1));
    let _one = gate.open("app", "prod")?;
    assert_eq!(gate.refused("app", "prod")?.code(), "53300");
    gate.gatectl(&["limits", "unset", "user", "app"])?;
    assert_eq!(gate.connections()?.user("app").limit, Some(9));
    let output = gate.gatectl_output(&["limits", "set", "user", "app", "many"])?;
    assert_eq!(
        output.status.code(),
        Some(2),
        "a wrong number is a usage error"
    );
    Ok(())
}

fn two_hundred(stage: &Stage) -> Result<()> {
    let gate = Gate::start(
        stage.plane,
        stage.postgres.address(),
        "[limits.user]\nadmin = 150",
    )?;
    for round in 0..2 {
        let mut storm = crowd::storm(gate.address(), 200, "admin", "prod");
        storm.expect_refusals("53300")?;
        assert_eq!(storm.sessions.len(), 150, "round {round}");
        assert_eq!(gate.connections()?.user("admin").active, 150);
        for session in &mut storm.sessions {
            assert_eq!(session.value("select current_user")?, "admin");
        }
        drop(storm);
        gate.wait_empty(Duration::from_secs(5))?;
    }
    let refused = gate
        .metrics()?
        .sum("gate_connections_rejected_total", &[("reason", "user")]);
    assert_eq!(refused, 100.0);
    Ok(())
}

fn all_or_none(stage: &Stage) -> Result<()> {
    let settings = "[limits]\nmax_connections = 4\n[limits.user]\napp = 2\n\
                    [limits.database]\nstage = 1";
    let gate = Gate::start(stage.plane, stage.postgres.address(), settings)?;
    let mut all = gate.open_all(1, "app", "stage")?;
    let figures = || -> Result<[i64; 6]> {
        let now = gate.connections()?;
        Ok([
            now.active(),
            now.user("app").active,
            now.user("guest").active,
            now.database("stage").active,
            now.database("prod").active,
            now.backend("default").active,
        ])
    };
    for _ in 0..20 {
        let error = gate.refused("guest", "stage")?;
        assert_eq!(error.text(), "too many connections for database \"stage\"");
    }
    assert_eq!(figures()?, [1, 1, 0, 1, 0, 1]);
    all.extend(gate.open_all(1, "app", "prod")?);
    for _ in 0..20 {
        let error = gate.refused("app", "prod")?;
        assert_eq!(error.text(), "too many connections for role \"app\"");
    }
    assert_eq!(figures()?, [2, 2, 0, 1, 1, 2]);
    all.extend(gate.open_all(2, "guest", "prod")?);
    for _ in 0..20 {
        let error = gate.refused("guest", "prod")?;
        assert_eq!(error.text(), "sorry, too many clients already");
    }
    assert_eq!(figures()?, [4, 2, 2, 1, 3, 4]);
    drop(all);
    gate.wait_empty(SOON)?;
    let mut again = gate.open_all(2, "app", "prod")?;
    again.extend(gate.open_all(1, "guest", "stage")?);
    again.extend(gate.open_all(1, "guest", "prod")?);
    assert_eq!(gate.refused("guest", "prod")?.code(), "53300");
    Ok(())
}
