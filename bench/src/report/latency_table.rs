//! Several distributions of latencies side by side.

use serde::Serialize;

use super::distribution::Distribution;
use super::figures::{self, Cell, Table, count, figure, paragraph};
use super::histogram::PERCENTILES;
use super::text::{MARKED, percentile_cell};

/// Percentiles of several distributions, one per row.
#[must_use]
pub fn side_by_side(distributions: &[Distribution]) -> String {
    let mut head = vec![
        vec![String::new()],
        vec!["values".to_owned()],
        vec!["mean".to_owned()],
    ];
    head.extend(PERCENTILES.map(|percent| vec![figures::percentile(percent)]));
    let mut table = Table::new(head);
    let mut marked = false;
    for one in distributions {
        let mean = one.mean_us.map_or_else(|| "-".to_owned(), figure);
        let mut cells = vec![Cell::Figure(count(one.count)), Cell::Figure(mean)];
        for percent in PERCENTILES {
            cells.push(one.at(percent).map_or_else(Cell::none, |us| {
                let (cell, mark) = percentile_cell(percent, us, one.count);
                marked |= mark;
                cell
            }));
        }
        table.row(&one.name, cells);
    }
    let mut text = "Latency, microseconds\n".to_owned();
    text.push_str(&table.print(2));
    if marked {
        text.push_str(MARKED);
    }
    text
}

/// Percentiles of the second distribution to those of the first.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PercentileRatios {
    /// What of.
    pub name: String,
    /// Percentile and ratio.
    pub ratios: Vec<(f64, f64)>,
}

/// Compares those of the same name, or, if there is one on each side, these two.
#[must_use]
pub fn percentile_ratios(a: &[Distribution], b: &[Distribution]) -> Vec<PercentileRatios> {
    let pairs: Vec<(String, &Distribution, &Distribution)> = match (a, b) {
        ([a], [b]) => vec![("B / A".to_owned(), a, b)],
        _ => {
            let other = |one: &Distribution| b.iter().find(|other| other.name == one.name);
            a.iter()
                .filter_map(|one| Some((format!("B / A, {}", one.name), one, other(one)?)))
                .collect()
        }
    };
    let ratios = |(name, a, b): (String, &Distribution, &Distribution)| PercentileRatios {
        name,
        ratios: PERCENTILES
            .into_iter()
            .filter_map(|percent| {
                let below = a.at(percent).filter(|below| *below > 0.0)?;
                Some((percent, b.at(percent)? / below))
            })
            .collect(),
    };
    pairs.into_iter().map(ratios).collect()
}

/// The ratios as text for people.
#[must_use]
pub fn ratios_text(ratios: &[PercentileRatios]) -> String {
    if ratios.is_empty() {
        return "\nThey have no peer in common, so there is no ratio.\n".to_owned();
    }
    let mut head = vec![vec![String::new()]];
    head.extend(PERCENTILES.map(|percent| vec![figures::percentile(percent)]));
    let mut table = Table::new(head);
    for of in ratios {
        let ratio = |percent: f64| {
            let found = of.ratios.iter().find(|(p, _)| *p == percent);
            found.map_or_else(Cell::none, |(_, ratio)| Cell::Figure(figure(*ratio)))
        };
        table.row(&of.name, PERCENTILES.map(ratio).to_vec());
    }
    let mut text = "\nRatios of the percentiles (less is better)\n".to_owned();
    text.push_str(&table.print(2));
    text.push('\n');
    text.push_str(&paragraph(
        "",
        "A histogram has no rounds, so there is no spread and no verdict; unless both are of one \
         run, they were not interleaved.",
    ));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_compared_one_by_one() {
        let of = |name: &str, factor: f64| Distribution {
            name: name.to_owned(),
            count: 1_000_000,
            mean_us: Some(factor),
            percentiles_us: PERCENTILES
                .map(|percent| (percent, percent * factor))
                .to_vec(),
            curve: Vec::new(),
        };
        let (a, b) = (of("a", 1.0), of("b", 1.5));
        let ratios = percentile_ratios(std::slice::from_ref(&a), std::slice::from_ref(&b));
        assert_eq!(ratios[0].ratios.len(), PERCENTILES.len());
        assert!(
            ratios[0]
                .ratios
                .iter()
                .all(|(_, ratio)| (ratio - 1.5).abs() < 1e-9)
        );
        let by_name = percentile_ratios(&[a.clone(), b.clone()], &[b, of("c", 3.0)]);
        assert_eq!(by_name.len(), 1);
        assert_eq!(by_name[0].name, "B / A, b");
        assert!(ratios_text(&by_name).contains("1.00"));
        assert!(side_by_side(&[a]).contains("1,000,000"));
    }
}
