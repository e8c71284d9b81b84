//! The words of a command line that are handed on to gate-bench, and what they ask of xtask.

use std::ffi::{OsStr, OsString};

/// Scenarios of gate-bench, `all`, and `goals`.
const SCENARIOS: [&str; 11] = [
    "storm", "admit", "relay", "bulk", "idle", "connect", "kernel", "stall", "mixed", "all",
    "goals",
];

/// Options of gate-bench that stand alone: the word behind any other one is its value.
const FLAGS: [&str; 3] = ["--flame", "--help", "-h"];

/// Arguments of `gate-bench run`. Its options are its own: only those are known here that xtask
/// would add, and those without a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Words(Vec<OsString>);

impl Words {
    /// The words as they were given.
    pub fn new(words: Vec<OsString>) -> Self {
        Self(words)
    }

    /// Every word, in order.
    pub fn all(&self) -> &[OsString] {
        &self.0
    }

    /// Whether an option was given, as `--option value` or `--option=value`.
    pub fn have(&self, option: &str) -> bool {
        self.value(option).is_some()
    }

    /// Adds an option and its value.
    pub fn push(&mut self, option: &str, value: impl AsRef<OsStr>) {
        self.0.push(option.into());
        self.0.push(value.as_ref().to_owned());
    }

    /// Adds scenarios.
    pub fn push_scenarios(&mut self, scenarios: &[&str]) {
        // In front of the options: one of those may take any number of values.
        let names = scenarios.iter().map(OsString::from);
        self.0.splice(0..0, names);
    }

    /// Whether somebody asks how this works.
    pub fn ask_for_help(&self) -> bool {
        self.0.iter().any(|word| word == "--help" || word == "-h")
    }

    /// Whether a scenario is named. gate-bench runs its own choice of them otherwise.
    pub fn name_a_scenario(&self) -> bool {
        SCENARIOS.iter().any(|name| self.name(name))
    }

    /// Whether pgbench is run.
    pub fn need_pgbench(&self) -> bool {
        ["mixed", "all", "goals"].iter().any(|name| self.name(name)) || !self.name_a_scenario()
    }

    /// Whether a real PostgreSQL is to be made for this run: mixed runs pgbench, and storm measures
    /// PostgreSQL's own refusals in the row `direct`.
    pub fn need_postgresql(&self) -> bool {
        let direct = self.value("--peers").is_none_or(|peers| {
            let peers = peers.to_string_lossy();
            peers.split(',').any(|peer| peer.trim() == "direct")
        });
        let needed = self.need_pgbench() || (self.name("storm") && direct);
        needed && !self.have("--postgres")
    }

    fn name(&self, scenario: &str) -> bool {
        let mut words = self.0.iter().enumerate();
        words.any(|(at, word)| word == scenario && !self.is_a_value(at))
    }

    /// Whether the word there belongs to the option before it.
    fn is_a_value(&self, at: usize) -> bool {
        let before = at.checked_sub(1).and_then(|before| self.0[before].to_str());
        before.is_some_and(|word| {
            word.starts_with('-') && !word.contains('=') && !FLAGS.contains(&word)
        })
    }

    /// The value of an option; empty if the value is missing, for gate-bench to complain about.
    fn value(&self, option: &str) -> Option<OsString> {
        self.0.iter().enumerate().find_map(|(at, word)| {
            if word == option {
                return Some(self.0.get(at + 1).cloned().unwrap_or_default());
            }
            let rest = word.to_str()?.strip_prefix(option)?;
            rest.strip_prefix('=').map(OsString::from)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Words {
        Words::new(line.split_whitespace().map(OsString::from).collect())
    }

    #[test]
    fn words_are_handed_on_as_they_are_and_options_come_behind() {
        let mut given = words("relay --rounds 3 --closed --future-option=x");
        given.push("--out", "dir");
        assert_eq!(
            given,
            words("relay --rounds 3 --closed --future-option=x --out dir")
        );
        let mut given = words("--rounds 3");
        given.push_scenarios(&["relay", "storm"]);
        assert_eq!(given, words("relay storm --rounds 3"));
    }

    #[test]
    fn an_option_is_found_in_either_form_and_by_its_whole_name() {
        for line in ["--out x", "--out=x", "relay --out"] {
            assert!(words(line).have("--out"), "{line}");
        }
        for line in ["", "--outer x", "out", "--postgres-pid 7"] {
            assert!(!words(line).have("--out"), "{line}");
            assert!(!words(line).have("--postgres"), "{line}");
        }
    }

    #[test]
    fn a_cluster_is_made_for_those_who_need_one_and_have_none() {
        for line in [
            "",
            "--rounds 3",
            "all",
            "goals --rounds 5",
            "mixed relay",
            "mixed --peers gate",
            "storm",
            "storm --peers gate,direct",
            "storm --peers=direct",
        ] {
            assert!(words(line).need_postgresql(), "{line}");
        }
        for line in [
            "relay bulk",
            "storm --peers gate,haproxy",
            "all --postgres 127.0.0.1:5432",
            "mixed --postgres=127.0.0.1:5432",
        ] {
            assert!(!words(line).need_postgresql(), "{line}");
        }
    }

    #[test]
    fn the_value_of_an_option_is_no_scenario() {
        for line in ["--only relay", "--rounds 3 --only relay", "--only=relay"] {
            assert!(!words(line).name_a_scenario(), "{line}");
        }
        for line in [
            "relay",
            "relay --only storm",
            "--rounds 3 relay",
            "--only=x relay",
            "--flame relay",
        ] {
            assert!(words(line).name("relay"), "{line}");
            assert!(!words(line).name("storm"), "{line}");
        }
        assert!(!words("relay --only mixed").need_postgresql());
    }

    #[test]
    fn pgbench_is_run_by_mixed_alone() {
        for line in [
            "",
            "all",
            "goals",
            "mixed",
            "relay mixed --postgres 127.0.0.1:1",
        ] {
            assert!(words(line).need_pgbench(), "{line}");
        }
        assert!(!words("storm relay").need_pgbench());
    }

    #[test]
    fn help_is_asked_for_anywhere() {
        assert!(words("relay --help").ask_for_help());
        assert!(words("-h").ask_for_help());
        assert!(!words("relay").ask_for_help());
    }
}
