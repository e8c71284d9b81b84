//! Medians and paired ratios.

use serde::{Deserialize, Serialize};

/// What a figure was over all rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The middle one; of an even number the mean of the two in the middle.
    pub median: f64,
    /// The lowest.
    pub min: f64,
    /// The highest.
    pub max: f64,
}

impl Spread {
    /// Of at least one value; `None` of none.
    #[must_use]
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len().is_multiple_of(2) {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        } else {
            sorted[middle]
        };
        Some(Self { median, min, max })
    }

    /// Of the ratios of each round, so that what a round had in common, such
    /// as a busy machine, falls out.
    #[must_use]
    pub fn of_ratios(values: &[f64], to: &[f64]) -> Option<Self> {
        let pairs = values.iter().zip(to).filter(|(_, to)| **to != 0.0);
        Self::of(pairs.map(|(value, to)| value / to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spread(median: f64, min: f64, max: f64) -> Option<Spread> {
        Some(Spread { median, min, max })
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(Spread::of([3.0, 1.0, 2.0]), spread(2.0, 1.0, 3.0));
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0]), spread(2.5, 1.0, 4.0));
        assert_eq!(Spread::of([]), None);
    }

    #[test]
    fn ratios_are_paired_by_round() {
        // The medians alone would say 1.0.
        let ratios = Spread::of_ratios(&[10.0, 20.0, 30.0], &[20.0, 10.0, 60.0]);
        assert_eq!(ratios, spread(0.5, 0.5, 2.0));
        assert_eq!(Spread::of_ratios(&[1.0], &[0.0]), None);
    }
}
