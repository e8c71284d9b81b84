//! Drivers of other languages, where they are installed: an extra that no run
//! needs. `PYTHONPATH` and `NODE_PATH` say where they lie.

use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use gate_tests::clients::both_streams;
use gate_tests::gate::Gate;
use gate_tests::host;
use gate_tests::suite::{Stage, Suite};

const LIMIT: Duration = Duration::from_secs(20);

pub fn register(suite: &mut Suite) {
    if runs("python3", &["-c", "import psycopg, asyncpg, pg8000"]) {
        suite.both("d4_python_drivers_report_53300_and_connect_once", python);
    }
    if runs("node", &["-e", "require('pg'); require('postgres')"]) {
        suite.both(
            "d4_javascript_drivers_report_53300_and_connect_once",
            javascript,
        );
    }
}

fn runs(program: &str, arguments: &[&str]) -> bool {
    let output = host::run(Command::new(program).args(arguments), LIMIT);
    output.is_ok_and(|output| output.status.success())
}

fn python(stage: &Stage) -> Result<()> {
    let script = ["-c", include_str!("drivers.py")];
    each_reports(stage, "python3", &script, &["psycopg", "asyncpg", "pg8000"])
}

fn javascript(stage: &Stage) -> Result<()> {
    let script = ["-e", include_str!("drivers.js"), "--"];
    each_reports(stage, "node", &script, &["node-pg", "postgres.js"])
}

fn each_reports(stage: &Stage, program: &str, script: &[&str], drivers: &[&str]) -> Result<()> {
    let settings = "[limits.user]\napp = 1";
    let gate = Gate::start(stage.plane, stage.postgres.address(), settings)?;
    let said_by = |user: &str| -> Result<String> {
        let mut command = Command::new(program);
        command
            .args(script)
            .args([&gate.address().port().to_string(), user]);
        let output = host::run(&mut command, LIMIT)?;
        ensure!(output.status.success(), "{}", both_streams(&output));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let lines = |what: &str| -> String {
        drivers
            .iter()
            .map(|driver| format!("{driver} {what}\n"))
            .collect()
    };
    assert_eq!(said_by("guest")?, lines("in"));
    let _full = gate.open("app", "prod")?;
    assert_eq!(said_by("app")?, lines("53300"));
    let refused = gate
        .metrics()?
        .sum("gate_connections_rejected_total", &[("reason", "user")]);
    assert_eq!(
        refused,
        drivers.len() as f64,
        "each connects once, without a storm"
    );
    Ok(())
}
