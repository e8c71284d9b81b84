//! The choice of loads that the table of goals needs, and the table.

use anyhow::{Context as _, Result, ensure};
use gate_tests::suite::{Stage, Suite};
use serde_json::Value;

use crate::harness::{Bench, QUICK, items, points, postgres_words};
use crate::scenarios::{pgbench, prepare};

/// What a line may say of its goal.
const VERDICTS: [&str; 4] = ["met_with_stretch", "met", "missed", "reported"];

pub fn register(suite: &mut Suite) {
    suite.kernel("goals are measured and judged", judged);
    suite.kernel("goals without a server are not judged", without_postgres);
}

fn judged(stage: &Stage) -> Result<()> {
    prepare(stage.postgres)?;
    let pgbench = pgbench()?;
    let own = ["goals", "--idle", "20", "--stalled", "5", "--rate", "300"];
    let more = ["--pgbench", &pgbench];
    let bench = Bench::new()?;
    let mut words = bench.words(&[&own[..], &more, &QUICK].concat())?;
    words.extend(postgres_words(stage)?);
    let ended = bench.run_well(&words)?;
    let report = bench.report()?;
    let absent: Vec<&str> = items(&report["peers"])
        .filter(|peer| !peer["absent"].is_null())
        .filter_map(|peer| peer["name"].as_str())
        .collect();
    let goals: Vec<&Value> = items(&report["goals"]).collect();
    ensure!(goals.len() == 24, "{} goals", goals.len());
    for goal in &goals {
        let figure = goal["figure"].as_str().context("a figure")?;
        let verdict = goal["verdict"].as_str().context("a verdict")?;
        if absent.iter().any(|peer| figure.ends_with(peer)) {
            ensure!(verdict == "not_measured", "{goal}");
            continue;
        }
        ensure!(VERDICTS.contains(&verdict), "{goal}");
        ensure!(goal["rounds"] == 2, "{goal}");
        ensure!(goal["measured"]["median"].is_number(), "{goal}");
        let has_goal = goal["goal"].is_string();
        ensure!(has_goal == (verdict != "reported"), "{goal}");
    }
    // Nobody has more CPUs or workers than another.
    let cpus = items(&report["placement"]["gate_cpus"]).count();
    ensure!(cpus <= 1, "{cpus} CPUs");
    let commands = items(&report["peers"]).filter(|peer| peer["name"] == "gate");
    let commands: Vec<&Value> = commands.flat_map(|peer| items(&peer["commands"])).collect();
    ensure!(!commands.is_empty(), "gate ran with no command line");
    for line in commands {
        let line = line.as_str().context("a command")?;
        ensure!(line.contains("--workers 1 "), "{line}");
        ensure!(line.contains("--kernel required"), "{line}");
    }
    // The table is the end of the report, on the terminal too.
    let (_, table) = bench_table(&ended.stdout)?;
    for words in ["at most", "no goal", "gate-unix / haproxy-unix"] {
        ensure!(table.contains(words), "no {words:?} in:\n{table}");
    }
    ensure!(!table.contains("\n## "), "{table}");
    let file = bench.out().join("report.json").display().to_string();
    let again = bench.run(&["report", &file])?;
    again.expect(0)?;
    let (_, again) = bench_table(&again.stdout)?;
    ensure!(table.starts_with(again.trim_end()), "{again}");
    Ok(())
}

fn bench_table(text: &str) -> Result<(&str, &str)> {
    text.split_once("\ngoals: median")
        .with_context(|| format!("no table in:\n{text}"))
}

fn without_postgres(_: &Stage) -> Result<()> {
    let own = ["goals", "--peers", "gate", "--only=-S"];
    let bench = Bench::new()?;
    bench.run_well(&bench.words(&[&own[..], &QUICK].concat())?)?;
    let report = bench.report()?;
    ensure!(points(&report).count() == 2, "pgbench -S, and with -C");
    for goal in items(&report["goals"]) {
        ensure!(goal["verdict"] == "not_measured", "{goal}");
        let notes: Vec<&str> = items(&goal["notes"]).filter_map(Value::as_str).collect();
        ensure!(!notes.is_empty(), "it does not say why: {goal}");
    }
    Ok(())
}
