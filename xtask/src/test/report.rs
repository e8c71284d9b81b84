//! What test programs say, added up: libtest and libtest-mimic print the same forms.

use std::fmt;

/// Counts and names of one or more test programs.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Report {
    /// Tests that passed.
    pub passed: u64,
    /// Tests that failed, by name.
    pub failed: Vec<String>,
    /// Tests that could not run here, by name.
    pub skipped: Vec<String>,
}

impl Report {
    /// Takes over the counts of another report.
    pub fn add(&mut self, other: Report) {
        self.passed += other.passed;
        self.failed.extend(other.failed);
        self.skipped.extend(other.skipped);
    }

    /// One test that was no libtest test.
    pub fn record(&mut self, name: &str, outcome: Outcome) {
        match outcome {
            Outcome::Passed => self.passed += 1,
            Outcome::Failed => self.failed.push(name.to_owned()),
            Outcome::Skipped => self.skipped.push(name.to_owned()),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (failed, skipped) = (self.failed.len(), self.skipped.len());
        write!(
            f,
            "{} passed, {failed} failed, {skipped} skipped",
            self.passed
        )
    }
}

/// How one test ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It held.
    Passed,
    /// It did not.
    Failed,
    /// It could not run here.
    Skipped,
}

/// Reads the output of one test program, line by line.
#[derive(Debug, Default)]
pub struct Parser {
    program: String,
    names: Report,
    /// Sums of the `test result:` lines: passed, failed, ignored. A doc test run has several.
    totals: (u64, u64, u64),
    finished: bool,
}

impl Parser {
    /// For the program of that name, which stands before the names of its tests.
    pub fn new(program: &str) -> Self {
        Self {
            program: program.to_owned(),
            ..Self::default()
        }
    }

    /// Takes one line without its line break.
    pub fn line(&mut self, line: &str) {
        if let Some(rest) = line.strip_prefix("test result: ") {
            self.finished = true;
            self.totals.0 += count(rest, "passed");
            self.totals.1 += count(rest, "failed");
            self.totals.2 += count(rest, "ignored");
        } else if let Some((name, verdict)) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.rsplit_once(" ... "))
        {
            let name = format!("{}: {}", self.program, name.trim_end());
            if verdict.starts_with("FAILED") {
                self.names.failed.push(name);
            } else if verdict.starts_with("ignored") {
                self.names.skipped.push(name);
            }
        }
    }

    /// The report, once the program has ended, well or not.
    ///
    /// The result line is the truth for the counts. A test whose name was lost between lines of
    /// its own output is counted without a name; a program that died before its result line, or
    /// failed without a failed test, is a failure itself.
    pub fn finish(mut self, ended_well: bool) -> Report {
        let (passed, failed, ignored) = self.totals;
        let pad = |names: &mut Vec<String>, wanted: u64, what: &str| {
            while (names.len() as u64) < wanted {
                names.push(format!("{}: {what}, name not seen", self.program));
            }
        };
        pad(&mut self.names.failed, failed, "a failed test");
        pad(&mut self.names.skipped, ignored, "an ignored test");
        if !self.finished || (!ended_well && self.names.failed.is_empty()) {
            let how = if self.finished { "failed" } else { "died" };
            self.names
                .failed
                .push(format!("{}: the program {how}", self.program));
        }
        self.names.passed = passed;
        self.names
    }
}

/// The number before `word` in `ok. 3 passed; 0 failed; 1 ignored; ...`.
fn count(result: &str, word: &str) -> u64 {
    result
        .split(['.', ';'])
        .find_map(|part| part.trim().strip_suffix(word)?.trim().parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, ended_well: bool) -> Report {
        let mut parser = Parser::new("p");
        text.lines().for_each(|line| parser.line(line));
        parser.finish(ended_well)
    }

    #[test]
    fn libtest_output_is_added_up() {
        let text = "running 4 tests\ntest a ... ok\ntest b::c ... FAILED\n\
                    test d ... ignored, needs root\ntest e - should panic ... ok\n\n\
                    test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out";
        let report = parse(text, false);
        assert_eq!(report.passed, 2);
        assert_eq!(report.failed, ["p: b::c"]);
        assert_eq!(report.skipped, ["p: d"]);
        assert_eq!(report.to_string(), "2 passed, 1 failed, 1 skipped");
    }

    #[test]
    fn a_program_that_dies_is_a_failure() {
        let report = parse("test a ... ok\n", false);
        assert_eq!(report.failed, ["p: the program died"]);
        let report = parse("test result: ok. 1 passed; 0 failed; 0 ignored;", false);
        assert_eq!(report.failed, ["p: the program failed"]);
        assert_eq!(
            parse("", true).failed.len(),
            1,
            "no result line, whatever the status"
        );
    }

    #[test]
    fn several_result_lines_are_summed() {
        let line = "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured\n";
        assert_eq!(parse(&line.repeat(2), true).passed, 6);
    }

    #[test]
    fn garbled_names_are_counted_all_the_same() {
        let text = "test a ... noise\nFAILED\ntest result: FAILED. 0 passed; 1 failed; 2 ignored;";
        let report = parse(text, false);
        assert_eq!((report.failed.len(), report.skipped.len()), (1, 2));
    }
}
