//! What is printed: JSON for programs, aligned tables for people.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use gate_common::limit::Limit;
use serde::Serialize;

use crate::target::Failure;

/// How to print.
#[derive(Clone, Copy)]
pub struct Output {
    pub json: bool,
}

impl Output {
    /// Prints an object as JSON, or what `text` makes of it.
    pub fn print<T: Serialize>(
        self,
        object: &T,
        text: impl FnOnce(&T) -> String,
    ) -> Result<(), Failure> {
        if self.json {
            let json = serde_json::to_string_pretty(object).map_err(Failure::new)?;
            return write(&(json + "\n"));
        }
        write(&text(object))
    }
}

/// Writes to standard output. A reader that has seen enough is no failure.
pub fn write(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::new(error)),
        _ => Ok(()),
    }
}

/// A table whose numbers stand right and whose words stand left.
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new<const N: usize>(head: [&str; N]) -> Self {
        Self {
            rows: vec![head.map(str::to_owned).into()],
        }
    }

    pub fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.into());
    }

    pub fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }

    pub fn render(&self) -> String {
        let columns = self.rows[0].len();
        let width = |column: usize| {
            self.rows
                .iter()
                .map(|row| row[column].chars().count())
                .max()
                .unwrap_or(0)
        };
        let right = |column: usize| self.rows[1..].iter().all(|row| is_numeric(&row[column]));
        let layout: Vec<(usize, bool)> = (0..columns)
            .map(|column| (width(column), right(column)))
            .collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, (width, right)) in row.iter().zip(&layout) {
                let _ = match right {
                    true => write!(line, "{cell:>width$}  "),
                    false => write!(line, "{cell:<width$}  "),
                };
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }
}

/// A limit in a table.
pub fn limit(limit: Limit) -> String {
    match limit {
        Limit::Unlimited => "unlimited".to_owned(),
        Limit::None => "none".to_owned(),
        Limit::AtMost(number) => number.to_string(),
    }
}

fn is_numeric(cell: &str) -> bool {
    matches!(cell, "-" | "unlimited" | "none") || cell.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_right_and_words_left() {
        let mut table = Table::new(["USER", "ACTIVE", "LIMIT"]);
        table.row(["app".to_owned(), "42".to_owned(), "50".to_owned()]);
        table.row([
            "Zo\u{eb}".to_owned(),
            "7".to_owned(),
            limit(Limit::Unlimited),
        ]);
        assert_eq!(
            table.render(),
            "USER  ACTIVE      LIMIT\n\
             app       42         50\n\
             Zo\u{eb}        7  unlimited\n"
        );
    }
}
