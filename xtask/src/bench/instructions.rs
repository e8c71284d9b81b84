//! `cargo xtask bench instructions`: what one call of each pure hot function costs, counted by
//! valgrind. Counts hardly differ between two runs, so a change of one percent shows.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde_json::{Value, json};

use super::{build, output};
use crate::{child, host, sys};

/// The bench target of the package gate.
pub const BENCH: &str = "instructions";

/// Where it is in a checkout.
pub const SOURCE: &str = "gate/benches/instructions/main.rs";

/// The function of that program inside of which valgrind counts.
const COUNTED_FUNCTION: &str = "*hot_measured*";

/// Counts the instructions of gate's pure hot functions
#[derive(Parser, Debug)]
#[command(
    name = "cargo xtask bench instructions",
    bin_name = "cargo xtask bench instructions",
    after_help = "Runs gate/benches/instructions under valgrind's callgrind and prints the \
instructions of one call\nof each function. Counts are kept under target/bench/instructions.\n\n\
Examples:\n  cargo xtask bench instructions --save before\n  \
cargo xtask bench instructions --baseline before"
)]
struct Args {
    /// Keep the counts under this name
    #[arg(long, value_name = "NAME", value_parser = file_name)]
    save: Option<String>,

    /// Compare with the counts kept under this name
    #[arg(long, value_name = "NAME", value_parser = file_name)]
    baseline: Option<String>,

    /// Write the counts to this file too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Build without optimization: for the test that counting works, not for its figures
    #[arg(long, hide = true)]
    quick: bool,

    /// Functions whose name contains this text; all if none is given
    filter: Option<String>,
}

/// Runs the task; `words` begin with the word `instructions`.
pub fn main(root: &Path, words: &[OsString]) -> Result<ExitCode> {
    let args = Args::parse_from(words);
    let kept = |name: &str| -> Result<PathBuf> {
        let folder = output::base()?.join("instructions");
        Ok(folder.join(name).with_extension("json"))
    };
    // What is missing is told before anything is built.
    valgrind()?;
    let baseline = match &args.baseline {
        Some(name) => {
            let mut counts = Counts::read(&kept(name)?)?;
            counts
                .0
                .retain(|(name, _)| chosen(name, args.filter.as_deref()));
            Some((name.as_str(), counts))
        }
        None => None,
    };
    sys::note_signals();
    let program = if args.quick {
        build::quick_instructions_program(root)?
    } else {
        build::instructions_program(root, None)?
    };
    let counts = Counts::filtered(&program, args.filter.as_deref())?;
    match &baseline {
        Some((name, baseline)) => print!("{}", table(&[(name, baseline), ("now", &counts)])),
        None => print!("{}", table(&[("instructions", &counts)])),
    }
    let now = [("instructions", &counts)];
    if let Some(name) = &args.save {
        write(&kept(name)?, &now)?;
    }
    if let Some(file) = &args.json {
        write(file, &now)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn file_name(name: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    if !name.is_empty() && name.chars().all(plain) {
        Ok(name.to_owned())
    } else {
        Err("a name is made of letters, digits, - and _".to_owned())
    }
}

/// Where valgrind is.
pub fn valgrind() -> Result<PathBuf> {
    host::find_program("valgrind").context(
        "instructions are counted by valgrind, which is not installed: \
         `cargo xtask setup --what bench` installs it",
    )
}

/// Instructions of one call, by function.
#[derive(Debug, Default, PartialEq)]
pub struct Counts(Vec<(String, f64)>);

impl Counts {
    /// Counts every function of a program that [`build::instructions_program`] built.
    pub fn of(program: &Path) -> Result<Self> {
        Self::filtered(program, None)
    }

    fn filtered(program: &Path, filter: Option<&str>) -> Result<Self> {
        let valgrind = valgrind()?;
        let listed = child::output(Command::new(program).arg("--list"))?;
        let functions: Vec<_> = listed
            .lines()
            .filter_map(listed_function)
            .filter(|(name, _)| chosen(name, filter))
            .collect();
        ensure!(!functions.is_empty(), "there is no such function");
        eprintln!(
            "bench: counting instructions of {} functions",
            functions.len()
        );
        let mut counts = Vec::new();
        for (name, calls) in functions {
            let said = child::output(
                Command::new(&valgrind)
                    .args(["--tool=callgrind", "--log-fd=1"])
                    .arg(format!("--toggle-collect={COUNTED_FUNCTION}"))
                    .arg("--callgrind-out-file=/dev/null")
                    .arg(program)
                    .arg(name),
            )?;
            let collected = collected(&said)
                .with_context(|| format!("valgrind counted nothing for {name}:\n{said}"))?;
            counts.push((name.to_owned(), collected as f64 / f64::from(calls)));
        }
        Ok(Self(counts))
    }

    fn read(file: &Path) -> Result<Self> {
        let text = fs::read_to_string(file).with_context(|| {
            let shown = host::shown(file);
            format!("there are no such counts ({shown}): keep some by --save")
        })?;
        let value: Value = serde_json::from_str(&text)
            .with_context(|| format!("{} is damaged", file.display()))?;
        let functions = value["functions"].as_array();
        let functions = functions.with_context(|| format!("{} is damaged", file.display()))?;
        let counts = functions.iter().filter_map(|function| {
            let name = function["name"].as_str()?.to_owned();
            Some((name, function["instructions"].as_f64()?))
        });
        Ok(Self(counts.collect()))
    }

    fn by_name(&self) -> BTreeMap<&str, f64> {
        let pairs = self.0.iter().map(|(name, count)| (name.as_str(), *count));
        pairs.collect()
    }
}

fn chosen(name: &str, filter: Option<&str>) -> bool {
    filter.is_none_or(|filter| name.contains(filter))
}

/// A line of `--list`: a name and how many calls are counted.
fn listed_function(line: &str) -> Option<(&str, u32)> {
    let (name, calls) = line.split_once('\t')?;
    let calls = calls.parse().ok().filter(|calls| *calls > 0)?;
    Some((name, calls))
}

/// The number behind `Collected :` of callgrind's messages; none if that is 0.
fn collected(said: &str) -> Option<u64> {
    let line = said.lines().find(|line| line.contains("Collected :"))?;
    let (_, number) = line.rsplit_once(':')?;
    number.trim().parse().ok().filter(|count| *count > 0)
}

/// One column for each of `columns`, in the order of the last one's functions, and the ratio of the
/// last column to the first one. A function that only the first one has comes at the end.
pub fn table(columns: &[(&str, &Counts)]) -> String {
    let (Some((_, first)), Some((_, last))) = (columns.first(), columns.last()) else {
        return String::new();
    };
    let mut names: Vec<&str> = last.0.iter().map(|(name, _)| name.as_str()).collect();
    let gone = first.0.iter().map(|(name, _)| name.as_str());
    let gone: Vec<&str> = gone.filter(|name| !names.contains(name)).collect();
    names.extend(gone);
    let width = names.iter().map(|name| name.len()).max().unwrap_or(0);

    let mut text = format!("{:width$}", "function");
    for (title, _) in columns {
        let _ = write!(text, "  {title:>12}");
    }
    text.push_str(if columns.len() > 1 {
        "     ratio\n"
    } else {
        "\n"
    });
    for name in names {
        let _ = write!(text, "{name:width$}");
        let counts: Vec<Option<f64>> = columns
            .iter()
            .map(|(_, counts)| counts.by_name().get(name).copied())
            .collect();
        for count in &counts {
            let shown = count.map_or_else(|| "-".to_owned(), |count| format!("{count:.0}"));
            let _ = write!(text, "  {shown:>12}");
        }
        if let (true, [Some(first), .., Some(last)]) = (columns.len() > 1, &counts[..]) {
            let _ = write!(text, "  {:>8.3}", last / first);
        }
        text.push('\n');
    }
    text
}

/// Writes counts for programs: the columns of [`table`] as fields of each function.
pub fn write(file: &Path, columns: &[(&str, &Counts)]) -> Result<()> {
    let mut functions: BTreeMap<&str, serde_json::Map<String, Value>> = BTreeMap::new();
    for (title, counts) in columns {
        for (name, count) in counts.by_name() {
            let fields = functions.entry(name).or_default();
            fields.insert((*title).to_owned(), json!(count));
        }
    }
    let functions: Vec<Value> = functions
        .into_iter()
        .map(|(name, mut fields)| {
            fields.insert("name".to_owned(), json!(name));
            Value::Object(fields)
        })
        .collect();
    if let Some(folder) = file.parent() {
        fs::create_dir_all(folder)?;
    }
    let text = serde_json::to_string_pretty(&json!({ "functions": functions }))?;
    fs::write(file, text + "\n").with_context(|| format!("cannot write {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn counts(pairs: &[(&str, f64)]) -> Counts {
        let own = pairs
            .iter()
            .map(|(name, count)| ((*name).to_owned(), *count));
        Counts(own.collect())
    }

    #[test]
    fn callgrind_says_what_it_collected() {
        let said = "==7== Callgrind, a call-graph generating cache profiler\n\
                    ==7== Events    : Ir\n==7== Collected : 123456\n==7== \n";
        assert_eq!(collected(said), Some(123_456));
        assert_eq!(collected(&said.replace("123456", "0")), None);
        assert_eq!(collected("==7== Events    : Ir\n"), None);
        assert_eq!(
            listed_function("cells/take and give\t100"),
            Some(("cells/take and give", 100))
        );
        assert_eq!(listed_function("cells\t0"), None);
    }

    #[test]
    fn the_table_has_ratios_and_what_one_side_lacks() {
        let base = counts(&[("kept", 100.0), ("gone", 5.0)]);
        let head = counts(&[("new", 7.4), ("kept", 150.0)]);
        let text = table(&[("base", &base), ("head", &head)]);
        let rows: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            rows,
            [
                vec!["function", "base", "head", "ratio"],
                vec!["new", "-", "7"],
                vec!["kept", "100", "150", "1.500"],
                vec!["gone", "5", "-"],
            ]
        );
        let single = table(&[("instructions", &base)]);
        assert!(!single.contains("ratio") && single.contains("100"));
    }

    #[test]
    fn counts_are_read_as_they_were_kept() {
        let scratch = Scratch::new("test-counts").unwrap();
        let file = scratch.path.join("folder/name.json");
        assert!(
            Counts::read(&file)
                .unwrap_err()
                .to_string()
                .contains("--save")
        );
        let before = counts(&[("a", 1.5), ("b", 2.0)]);
        write(&file, &[("instructions", &before)]).unwrap();
        assert_eq!(Counts::read(&file).unwrap(), before);
        fs::write(&file, "{}").unwrap();
        assert!(Counts::read(&file).is_err());
    }

    #[test]
    fn a_kept_name_is_a_file_name() {
        assert!(file_name("before-1").is_ok());
        for name in ["", "../x", "a b"] {
            assert!(file_name(name).is_err());
        }
    }
}
