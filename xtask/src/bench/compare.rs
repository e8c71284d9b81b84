//! `cargo xtask bench compare`: this checkout beside another commit, in one run.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser};

use super::instructions::{self, Counts};
use super::output::{self, Output};
use super::words::Words;
use super::worktree::{self, Worktree};
use super::{build, help_of_gate_bench, measure};
use crate::{host, sys};

/// What a change of gate's own code shows in first.
const SCENARIOS: [&str; 3] = ["relay", "storm", "connect"];

/// Measures this checkout (head) beside another commit (base), interleaved in one run
#[derive(Parser, Debug)]
#[command(
    name = "cargo xtask bench compare",
    bin_name = "cargo xtask bench compare",
    after_help = "Builds gate of BASE in a git worktree under target/bench/compare, which is removed \
afterwards, and gate of\nthis checkout with its uncommitted changes. gate-bench runs both \
interleaved and prints the ratios\nhead/base with their spread. Then instructions of the pure hot \
functions are counted for both.\n\nScenarios are relay, storm and connect unless named. The options \
are those of `cargo xtask bench`,\nand --commit is both commits unless given.\n\nExamples:\n  cargo xtask bench compare HEAD\n  \
cargo xtask bench compare main relay --rounds 9"
)]
struct Args {
    /// Commit to compare with: a hash, a branch or a tag
    base: String,

    /// Scenarios and options, handed on to `gate-bench run` as they are
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<OsString>,
}

/// Runs the task; `words` begin with the word `compare`.
pub fn main(root: &Path, words: &[OsString]) -> Result<ExitCode> {
    sys::note_signals();
    // Asked here and not by clap, which would not see it behind other words.
    if Words::new(words.to_vec()).ask_for_help() {
        println!("{}", Args::command().render_help());
        return help_of_gate_bench(root);
    }
    let args = Args::parse_from(words);
    let words = Words::new(args.words);
    let hash = worktree::resolve(root, &args.base)?;
    let output = Output::new()?;
    let folder = output::base()?;
    let target = folder.join("compare-target");
    let base = Worktree::new(root, &folder.join("compare"), &hash)?;
    let commits = commits(&build::commit(root), &build::commit(&base.path));
    eprintln!("bench: {commits}");

    let base_gate = build::other_gate(&base.path, &target)?;
    build::release(root, &["gate", "gate-bench"])?;
    // Everything is built before anything is measured.
    let programs = instruction_programs(root, &base, &target)?;
    let words = words_for_both(words, &commits, &base_gate, &build::program("gate")?);
    let code = measure(root, words, &output)?;
    match programs {
        Some(_) if code != ExitCode::SUCCESS => {
            eprintln!("bench: gate-bench failed, so instructions were not counted");
        }
        Some((base, head)) => count_both(&base, &head, &output)?,
        None => {}
    }
    Ok(code)
}

/// What the report calls the measured commits.
fn commits(head: &str, base: &str) -> String {
    format!("{head} (head), {base} (base)")
}

fn count_both(base: &Path, head: &Path, output: &Output) -> Result<()> {
    let (base, head) = (Counts::of(base)?, Counts::of(head)?);
    let columns = [("base", &base), ("head", &head)];
    println!("\nInstructions of one call\n");
    print!("{}", instructions::table(&columns));
    let file = output.folder.join("instructions.json");
    instructions::write(&file, &columns)?;
    output.keep()
}

/// The words for gate-bench, with both gates as the only peers unless others are asked for.
fn words_for_both(mut words: Words, commits: &str, base: &Path, head: &Path) -> Words {
    if !words.name_a_scenario() {
        words.push_scenarios(&SCENARIOS);
    }
    for (name, program) in [("head", head), ("base", base)] {
        let mut named = OsString::from(format!("{name}="));
        named.push(program);
        words.push("--gate-bin", named);
    }
    if !words.have("--peers") {
        words.push("--peers", "head,base");
    }
    if !words.have("--commit") {
        words.push("--commit", commits);
    }
    words
}

/// Builds what instructions are counted of, in base and head; says so where it cannot be.
fn instruction_programs(
    root: &Path,
    base: &Worktree,
    target: &Path,
) -> Result<Option<(PathBuf, PathBuf)>> {
    if !base.path.join(instructions::SOURCE).is_file() {
        eprintln!(
            "bench: base has no {}: instructions are not compared",
            instructions::SOURCE
        );
        return Ok(None);
    }
    if let Err(error) = instructions::valgrind() {
        eprintln!("bench: instructions are not compared: {error:#}");
        return Ok(None);
    }
    let base = build::instructions_program(&base.path, Some(target))
        .context("the instruction bench of base")?;
    let head = build::instructions_program(root, None)?;
    eprintln!(
        "bench: instructions will be counted of {}",
        host::shown(&head)
    );
    Ok(Some((base, head)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(given: &[&str]) -> String {
        let given = Words::new(given.iter().map(OsString::from).collect());
        let words = words_for_both(given, "C", Path::new("b/gate"), Path::new("h/gate"));
        let words = words.all().iter().map(|word| word.to_string_lossy());
        words.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn both_gates_run_and_scenarios_have_a_default() {
        let gates = "--gate-bin head=h/gate --gate-bin base=b/gate";
        assert_eq!(
            line(&["--rounds", "9"]),
            format!("relay storm connect --rounds 9 {gates} --peers head,base --commit C")
        );
        assert_eq!(
            line(&["bulk", "--peers=base,head,direct", "--commit=mine"]),
            format!("bulk --peers=base,head,direct --commit=mine {gates}")
        );
        assert_eq!(
            line(&["--only", "relay", "--peers", "head", "--commit", "c"]),
            format!("relay storm connect --only relay --peers head --commit c {gates}")
        );
    }

    #[test]
    fn two_gates_alone_need_no_postgresql_in_a_storm() {
        let (base, head) = (Path::new("b"), Path::new("h"));
        let words = |given| words_for_both(Words::new(given), "C", base, head);
        assert!(!words(vec![]).need_postgresql());
        assert!(words(vec!["mixed".into()]).need_postgresql());
    }

    #[test]
    fn base_comes_first_and_the_rest_is_handed_on() {
        let args = Args::parse_from(["compare", "main", "relay", "--rounds", "9"]);
        assert_eq!(args.base, "main");
        assert_eq!(args.words, ["relay", "--rounds", "9"]);
        assert!(Args::try_parse_from(["compare"]).is_err());
    }
}
