//! A strict reader of OpenMetrics text: what it accepts, every scraper does.

use std::collections::HashSet;

/// One line: name, labels in order, value.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Name with its suffix, such as `_total`.
    pub name: String,
    /// Label names and unescaped values.
    pub labels: Vec<(String, String)>,
    /// The value.
    pub value: f64,
}

/// A whole page of metrics.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// All samples, in order.
    pub samples: Vec<Sample>,
}

impl Metrics {
    /// Reads a page.
    ///
    /// # Errors
    /// When it does not end with `# EOF`, a family has two HELP or TYPE lines
    /// or is not contiguous, a sample belongs to no family, a series comes
    /// twice, or a line cannot be read.
    pub fn parse(text: &str) -> Result<Self, String> {
        let body = text
            .strip_suffix("# EOF\n")
            .or_else(|| text.strip_suffix("# EOF"));
        let body = body.ok_or("no # EOF at the end")?;
        let mut described = HashSet::new();
        let mut family = String::new();
        let mut series = HashSet::new();
        let mut samples = Vec::new();
        for line in body.lines() {
            if let Some(described_as) = line.strip_prefix("# ") {
                let mut words = described_as.splitn(3, ' ');
                let keyword = words.next().unwrap_or_default();
                let name = words.next().ok_or_else(|| format!("no name: {line}"))?;
                if !["HELP", "TYPE", "UNIT"].contains(&keyword) {
                    return Err(format!("unknown comment: {line}"));
                }
                if !described.insert((keyword.to_owned(), name.to_owned())) {
                    return Err(format!("second {keyword} of {name}"));
                }
                name.clone_into(&mut family);
                continue;
            }
            let sample = parse_sample(line).map_err(|error| format!("{error}: {line}"))?;
            let suffix = sample.name.strip_prefix(&family);
            let known = [
                "", "_total", "_sum", "_count", "_bucket", "_created", "_info",
            ];
            if family.is_empty() || !suffix.is_some_and(|suffix| known.contains(&suffix)) {
                return Err(format!("not of the family {family:?}: {line}"));
            }
            let mut labels = sample.labels.clone();
            labels.sort();
            if !series.insert((sample.name.clone(), labels)) {
                return Err(format!("series comes twice: {line}"));
            }
            samples.push(sample);
        }
        Ok(Self { samples })
    }

    /// The sum of all series of a name that carry these labels; 0 if none.
    #[must_use]
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let wanted = |sample: &&Sample| {
            sample.name == name
                && labels.iter().all(|(label, value)| {
                    let mut own = sample.labels.iter();
                    own.any(|(own, text)| own == label && text == value)
                })
        };
        self.samples
            .iter()
            .filter(wanted)
            .map(|sample| sample.value)
            .sum()
    }

    /// Whether there is any series of this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.samples.iter().any(|sample| sample.name == name)
    }
}

fn parse_sample(line: &str) -> Result<Sample, String> {
    let name_end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, mut rest) = line.split_at(name_end);
    if name.is_empty()
        || !name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':')
    {
        return Err("bad name".into());
    }
    let mut labels = Vec::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = parse_labels(inside, &mut labels)?;
    }
    let value = rest.trim_start().split(' ').next().unwrap_or_default();
    let value = value.parse().map_err(|_| "bad value")?;
    let mut seen = HashSet::new();
    if !labels.iter().all(|(label, _)| seen.insert(label)) {
        return Err("label comes twice".into());
    }
    Ok(Sample {
        name: name.to_owned(),
        labels,
        value,
    })
}

/// Reads labels up to the closing brace and returns what follows it.
fn parse_labels<'a>(
    mut rest: &'a str,
    labels: &mut Vec<(String, String)>,
) -> Result<&'a str, String> {
    loop {
        if let Some(after) = rest.strip_prefix('}') {
            return Ok(after);
        }
        let (label, after) = rest.split_once("=\"").ok_or("no label value")?;
        let mut value = String::new();
        let mut characters = after.char_indices();
        let end = loop {
            match characters.next().ok_or("label value without end")? {
                (at, '"') => break at,
                (_, '\\') => value.push(match characters.next() {
                    Some((_, 'n')) => '\n',
                    Some((_, c @ ('\\' | '"'))) => c,
                    _ => return Err("bad escape".into()),
                }),
                (_, c) => value.push(c),
            }
        };
        labels.push((label.to_owned(), value));
        rest = &after[end + 1..];
        rest = rest.strip_prefix(',').unwrap_or(rest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_good_page_is_read() {
        let page = "# HELP a_b Words.\n# TYPE a_b counter\na_b_total{user=\"x\\\"\\n\"} 3\n# EOF\n";
        let metrics = Metrics::parse(page).unwrap();
        assert_eq!(metrics.sum("a_b_total", &[("user", "x\"\n")]), 3.0);
        assert_eq!(metrics.sum("a_b_total", &[("user", "y")]), 0.0);
    }

    #[test]
    fn a_bad_page_is_not() {
        for page in [
            "a 1\n# EOF\n",
            "# TYPE a gauge\na 1\n",
            "# TYPE a gauge\n# TYPE a gauge\n# EOF\n",
            "# TYPE a gauge\na 1\na 2\n# EOF\n",
            "# TYPE a gauge\na{x=\"1\\q\"} 1\n# EOF\n",
            "# TYPE a gauge\na{x=\"1\"} one\n# EOF\n",
            "# TYPE a gauge\nb 1\n# EOF\n",
            "# TYPE a gauge\na{x=\"1\",x=\"2\"} 1\n# EOF\n",
        ] {
            assert!(Metrics::parse(page).is_err(), "{page}");
        }
    }
}
