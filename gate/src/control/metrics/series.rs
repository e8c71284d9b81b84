//! Writes metrics one at a time, each with all its series.
#![forbid(unsafe_code)]

use std::fmt;

use gate_common::limit::Limit;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

use crate::config::name;
use crate::ledger::{LimitRow, LimitSource};
use crate::stats::Distribution;

/// Label of all users, or databases, without a limit of their own.
pub(super) const OTHER: &str = "other";

/// Buckets of a histogram that have an upper bound: 1 us, 2 us, 4 us ... 8.4 s.
/// One more has none.
const BUCKETS: u32 = 24;

/// Label names and values of one series.
pub(super) type Labels = Vec<(&'static str, String)>;

/// The labels of a series.
pub(super) fn labels<const N: usize>(labels: [(&'static str, String); N]) -> Labels {
    labels.into()
}

/// A count as a gauge.
pub(super) fn gauge_value(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// A limit as a gauge: 0 is unlimited, -1 nobody.
pub(super) fn limit_value(limit: Limit) -> i64 {
    match limit {
        Limit::Unlimited => 0,
        Limit::None => -1,
        Limit::AtMost(number) => gauge_value(number),
    }
}

/// Writes one metric with all its series at a time.
pub(super) struct Series<'a, 'b> {
    pub encoder: &'a mut DescriptorEncoder<'b>,
}

impl Series<'_, '_> {
    pub fn gauge(&mut self, name: &str, help: &str, value: i64) -> fmt::Result {
        self.gauges(name, help, [(Labels::new(), value)])
    }

    pub fn gauges(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (Labels, i64)>,
    ) -> fmt::Result {
        let series = series
            .into_iter()
            .map(|(labels, value)| (labels, ConstGauge::new(value)));
        self.write(name, help, None, MetricType::Gauge, series)
    }

    /// `name` without `_total`, which is added.
    pub fn counters(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (Labels, u64)>,
    ) -> fmt::Result {
        let series = series
            .into_iter()
            .map(|(labels, value)| (labels, ConstCounter::new(value)));
        self.write(name, help, None, MetricType::Counter, series)
    }

    /// `name` without its unit and `_total`, which are added.
    pub fn counters_with_unit<N>(
        &mut self,
        name: &str,
        help: &str,
        unit: Unit,
        series: impl IntoIterator<Item = (Labels, N)>,
    ) -> fmt::Result
    where
        ConstCounter<N>: EncodeMetric,
    {
        let series = series
            .into_iter()
            .map(|(labels, value)| (labels, ConstCounter::new(value)));
        self.write(name, help, Some(&unit), MetricType::Counter, series)
    }

    /// `name` without its unit `seconds`, which is added.
    pub fn histogram(&mut self, name: &str, help: &str, all: &Distribution) -> fmt::Result {
        let mut below = 0;
        let mut buckets: Vec<(f64, u64)> = (0..BUCKETS)
            .map(|bucket| {
                let micros = 1_u64 << bucket;
                let up_to = all.up_to(micros * 1000);
                let within = up_to - std::mem::replace(&mut below, up_to);
                (micros as f64 / 1e6, within)
            })
            .collect();
        let count = all.count();
        buckets.push((f64::INFINITY, count - below));
        let unit = Unit::Seconds;
        let mut metric =
            self.encoder
                .encode_descriptor(name, help, Some(&unit), MetricType::Histogram)?;
        metric.encode_histogram::<Labels>(all.sum_ns() as f64 / 1e9, count, &buckets, None)
    }

    /// Use and limit of each user, or database, with a limit of its own, and
    /// of all others together.
    pub fn named(
        &mut self,
        kind: &'static str,
        rows: &[LimitRow],
        name_of: impl Fn(&LimitRow) -> Option<Vec<u8>>,
        default: Limit,
    ) -> fmt::Result {
        let mut used_by_others = 0;
        let mut active = Vec::new();
        let mut limits = Vec::new();
        for row in rows {
            match name_of(row) {
                Some(name) if row.source != LimitSource::Default => {
                    let label = labels([(kind, label_of(&name))]);
                    active.push((label.clone(), gauge_value(row.used)));
                    limits.push((label, limit_value(row.limit)));
                }
                Some(_) => used_by_others += row.used,
                None => {}
            }
        }
        let other = labels([(kind, OTHER.to_owned())]);
        active.push((other.clone(), gauge_value(used_by_others)));
        limits.push((other, limit_value(default)));
        self.gauges(
            &format!("gate_{kind}_connections_active"),
            &format!("Sessions of a {kind}; without a limit of its own under other"),
            active,
        )?;
        self.gauges(
            &format!("gate_{kind}_connection_limit"),
            &format!("Sessions allowed to a {kind}; 0 is unlimited, -1 nobody"),
            limits,
        )
    }

    fn write<M: EncodeMetric>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        kind: MetricType,
        series: impl IntoIterator<Item = (Labels, M)>,
    ) -> fmt::Result {
        let mut metric = self.encoder.encode_descriptor(name, help, unit, kind)?;
        for (labels, value) in series {
            if labels.is_empty() {
                value.encode(metric.encode_family(&NO_LABELS)?)?;
            } else {
                value.encode(metric.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}

const NO_LABELS: [(&str, &str); 0] = [];

/// A user that is called `other` must not share the series of all others:
/// its first byte is shown escaped, which reads back as the same name.
fn label_of(name: &[u8]) -> String {
    match name {
        b"other" => "\\x6fther".to_owned(),
        _ => name::escape(name),
    }
}
