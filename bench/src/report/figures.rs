//! Figures as people read them, three significant digits of each, and aligned tables.

use crate::stats::Spread;

/// A line of text is not wider, if it can be helped.
const WIDTH: usize = 110;
/// Nor is a table.
const TABLE_WIDTH: usize = 130;

/// Three significant digits, with commas between thousands.
#[must_use]
pub fn figure(value: f64) -> String {
    if !value.is_finite() {
        return "-".to_owned();
    }
    let size = value.abs();
    if size == 0.0 {
        return "0".to_owned();
    }
    if size < 0.0001 {
        return format!("{value:.2e}");
    }
    // As printed: 9.999 has the digits of 10.0.
    let exponent: i32 = format!("{size:.2e}")
        .rsplit_once('e')
        .and_then(|(_, exponent)| exponent.parse().ok())
        .unwrap_or(0);
    if exponent > 2 {
        let unit = 10_f64.powi(exponent - 2);
        return thousands(&format!("{:.0}", (value / unit).round() * unit));
    }
    let decimals = usize::try_from(2 - exponent).unwrap_or(0);
    format!("{value:.decimals$}")
}

/// A count, exact, with commas between thousands.
#[must_use]
pub fn count(value: u64) -> String {
    thousands(&value.to_string())
}

/// Median, lowest and highest; whole numbers below a thousand are counts and stay whole.
#[must_use]
pub fn parts(spread: &Spread) -> [String; 3] {
    let values = [spread.median, spread.min, spread.max];
    let is_count = |value: &f64| value.fract() == 0.0 && value.abs() < 1000.0;
    if values.iter().all(is_count) {
        return values.map(|value| format!("{value:.0}"));
    }
    values.map(figure)
}

/// Median, lowest and highest of a ratio, whose whole numbers are no counts.
#[must_use]
pub fn ratio_parts(spread: &Spread) -> [String; 3] {
    [spread.median, spread.min, spread.max].map(figure)
}

/// A percentile's name.
#[must_use]
pub fn percentile(percent: f64) -> String {
    if percent >= 100.0 {
        "max".to_owned()
    } else {
        format!("p{percent}")
    }
}

/// Text with each line indented, broken between words; the first line begins with
/// `head`, the others below its end.
#[must_use]
pub fn paragraph(head: &str, text: &str) -> String {
    let indent = head.chars().count();
    let mut lines = vec![head.to_owned()];
    let mut fresh = true;
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is a first line");
        if !fresh && line.chars().count() + 1 + word.chars().count() > WIDTH {
            lines.push(format!("{:indent$}{word}", ""));
            continue;
        }
        if !fresh {
            line.push(' ');
        }
        line.push_str(word);
        fresh = false;
    }
    let lines: Vec<&str> = lines.iter().map(|line| line.trim_end()).collect();
    lines.join("\n") + "\n"
}

/// A table whose first column names the rows.
#[derive(Clone, Debug, Default)]
pub struct Table {
    head: Vec<Vec<String>>,
    rows: Vec<(String, Vec<Cell>)>,
}

/// A field of a table.
#[derive(Clone, Debug)]
pub enum Cell {
    /// Aligned right, as figures are.
    Figure(String),
    /// Aligned left.
    Text(String),
    /// Median, lowest, highest, each aligned with those above and below.
    Spread([String; 3]),
}

impl Cell {
    /// Of a spread of figures, or a dash.
    #[must_use]
    pub fn of(spread: Option<&Spread>) -> Self {
        spread.map_or_else(Self::none, |spread| Self::Spread(parts(spread)))
    }

    /// Of a spread of ratios, or a dash.
    #[must_use]
    pub fn of_ratio(spread: Option<&Spread>) -> Self {
        spread.map_or_else(Self::none, |spread| Self::Spread(ratio_parts(spread)))
    }

    /// There is no such figure.
    #[must_use]
    pub fn none() -> Self {
        Self::Figure("-".to_owned())
    }
}

impl Table {
    /// With a head of any number of lines per column; the first column is that of names.
    #[must_use]
    pub fn new(head: Vec<Vec<String>>) -> Self {
        Self {
            head,
            rows: Vec::new(),
        }
    }

    /// Adds a row; columns that it does not have stay empty.
    pub fn row(&mut self, name: impl Into<String>, cells: Vec<Cell>) {
        self.rows.push((name.into(), cells));
    }

    /// Whether there is no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Its lines, indented; columns that do not fit go below the others.
    #[must_use]
    pub fn print(&self, indent: usize) -> String {
        self.print_within(indent, TABLE_WIDTH)
    }

    /// The same with lines of another width.
    #[must_use]
    pub fn print_within(&self, indent: usize, line_width: usize) -> String {
        let mut names = self.head.first().cloned().unwrap_or_default();
        let heads = self.head.iter().map(Vec::len).max().unwrap_or(0);
        names.resize(heads, String::new());
        names.extend(self.rows.iter().map(|(name, _)| name.clone()));
        let names = pad(&names, false);
        let columns: Vec<Vec<String>> = (1..self.head.len())
            .map(|column| self.column(column, heads))
            .collect();
        let mut text = String::new();
        let mut left = columns.as_slice();
        while !left.is_empty() {
            let mut width = indent + width_of(&names);
            let fits = |column: &&Vec<String>| {
                width += 3 + width_of(column);
                width <= line_width
            };
            let fitting = left.iter().take_while(fits).count().max(1);
            let (now, later) = left.split_at(fitting);
            for (line, name) in names.iter().enumerate() {
                let cells: Vec<&str> = now.iter().map(|column| column[line].as_str()).collect();
                let row = format!("{:indent$}{name}   {}", "", cells.join("   "));
                text.push_str(row.trim_end());
                text.push('\n');
            }
            if !later.is_empty() {
                text.push('\n');
            }
            left = later;
        }
        text
    }

    fn column(&self, column: usize, heads: usize) -> Vec<String> {
        let cells: Vec<Option<&Cell>> = self
            .rows
            .iter()
            .map(|(_, cells)| cells.get(column - 1))
            .collect();
        let mut widths = [0; 3];
        for cell in cells.iter().flatten() {
            if let Cell::Spread(parts) = cell {
                for (width, part) in widths.iter_mut().zip(parts) {
                    *width = part.chars().count().max(*width);
                }
            }
        }
        let is_text = cells
            .iter()
            .flatten()
            .any(|cell| matches!(cell, Cell::Text(_)));
        let has_spread = widths[0] > 0;
        let mut lines = self.head[column].clone();
        lines.resize(heads, String::new());
        lines.extend(cells.into_iter().map(|cell| match cell {
            None => String::new(),
            Some(Cell::Spread([median, min, max])) => {
                let [a, b, c] = widths;
                format!("{median:>a$} [{min:>b$} - {max:>c$}]")
            }
            // Below the medians, not below the highest values.
            Some(Cell::Figure(text)) if has_spread => {
                let [a, b, c] = widths;
                format!("{text:>a$}{:rest$}", "", rest = b + c + 6)
            }
            Some(Cell::Figure(text) | Cell::Text(text)) => text.clone(),
        }));
        pad(&lines, !is_text && !has_spread)
    }
}

fn pad(lines: &[String], right: bool) -> Vec<String> {
    let width = width_of(lines);
    let pad = |line: &String| {
        if right {
            format!("{line:>width$}")
        } else {
            format!("{line:<width$}")
        }
    };
    lines.iter().map(pad).collect()
}

fn width_of(lines: &[String]) -> usize {
    let widths = lines.iter().map(|line| line.chars().count());
    widths.max().unwrap_or(0)
}

fn thousands(digits: &str) -> String {
    let (sign, digits) = digits.strip_prefix('-').map_or(("", digits), |d| ("-", d));
    let mut text = sign.to_owned();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_significant_digits() {
        let figures = [
            (0.0, "0"),
            (1.0, "1.00"),
            (9.999, "10.0"),
            (12.345, "12.3"),
            (-0.012_345, "-0.0123"),
            (999.6, "1,000"),
            (1234.0, "1,230"),
            (123_456_789.0, "123,000,000"),
            (0.000_012_3, "1.23e-5"),
            (f64::NAN, "-"),
        ];
        for (value, text) in figures {
            assert_eq!(figure(value), text);
        }
        assert_eq!(count(1_234_567), "1,234,567");
    }

    #[test]
    fn counts_stay_whole_and_ratios_do_not() {
        let whole = Spread {
            median: 3.0,
            min: 0.0,
            max: 120.0,
        };
        assert_eq!(parts(&whole), ["3", "0", "120"]);
        assert_eq!(ratio_parts(&whole), ["3.00", "0", "120"]);
    }

    #[test]
    fn columns_are_aligned() {
        let heads = ["peer", "CPU", "note"].map(|head| vec![head.to_owned()]);
        let mut table = Table::new(heads.to_vec());
        let cell = |parts: [&str; 3]| Cell::Spread(parts.map(str::to_owned));
        let note = |note: &str| Cell::Text(note.to_owned());
        table.row("gate", vec![cell(["8.00", "7.00", "10.0"]), note("well")]);
        table.row(
            "haproxy",
            vec![cell(["12.0", "9.00", "13.0"]), note("also")],
        );
        table.row("nginx", vec![Cell::none()]);
        let expected = "\
            peer      CPU                  note\n\
            gate      8.00 [7.00 - 10.0]   well\n\
            haproxy   12.0 [9.00 - 13.0]   also\n\
            nginx        -\n";
        assert_eq!(table.print(0), expected);
    }

    #[test]
    fn wide_tables_go_on_below() {
        let head = |name: &str| vec![name.to_owned()];
        let mut heads = vec![head("peer")];
        heads.extend((0..5).map(|_| head(&"x".repeat(30))));
        let mut table = Table::new(heads);
        table.row("gate", vec![Cell::none(); 5]);
        let text = table.print(2);
        assert!(
            text.lines().all(|line| line.chars().count() <= TABLE_WIDTH),
            "{text}"
        );
        assert_eq!(text.matches("  peer").count(), 2, "{text}");
    }

    #[test]
    fn paragraphs_are_broken_between_words() {
        let text = paragraph("  peer: ", &"word ".repeat(40));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[1].starts_with("        word"), "{text}");
    }
}
