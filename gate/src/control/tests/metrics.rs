//! `/metrics` against a strict reader of OpenMetrics text.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::super::limited::Limited;
use super::super::metrics;
use super::Fixture;
use crate::admission::WaitsFor;
use crate::session::outcome::{
    CancelOutcome, CloseReason, ConnectFailure, Reason, StartupFailure, WaitOutcome,
};
use crate::stats::Direction;

/// Sample (name and labels, as written) to value.
type Samples = BTreeMap<String, f64>;

fn scrape(gate: &Fixture) -> Samples {
    let text = metrics::scrape(&gate.state, &Arc::new(Limited::default())).expect("text");
    read_strictly(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Reads text as a strict parser does: one HELP and TYPE per family, its
/// samples right behind them with the suffixes of its type, unique label sets,
/// valid escapes, `# EOF` at the end and nothing after it.
fn read_strictly(text: &str) -> Result<Samples, String> {
    let body = text.strip_suffix("# EOF\n").ok_or("no # EOF at the end")?;
    let mut samples = Samples::new();
    let mut families = BTreeSet::new();
    let (mut family, mut kind) = (String::new(), String::new());
    for line in body.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words.as_slice() {
            ["#", "HELP", name, help] => {
                if help.is_empty() || !families.insert((*name).to_owned()) {
                    return Err(format!("second or empty HELP: {line}"));
                }
                (family, kind) = ((*name).to_owned(), String::new());
            }
            ["#", "TYPE", name, its] if *name == family && kind.is_empty() => {
                kind = (*its).to_owned();
            }
            ["#", "UNIT", name, unit] if *name == family && name.ends_with(&format!("_{unit}")) => {
            }
            ["#", ..] => return Err(format!("unexpected: {line}")),
            _ => {
                let (name, value) = read_sample(line)?;
                check_suffix(&family, &kind, &name)?;
                if samples.insert(name, value).is_some() {
                    return Err(format!("label set twice: {line}"));
                }
            }
        }
    }
    Ok(samples)
}

fn read_sample(line: &str) -> Result<(String, f64), String> {
    let (series, value) = line.rsplit_once(' ').ok_or(format!("no value: {line}"))?;
    let value = value.parse().map_err(|_| format!("no number: {line}"))?;
    if let Some((_, labels)) = series.split_once('{') {
        let labels = labels
            .strip_suffix('}')
            .ok_or(format!("open labels: {line}"))?;
        let mut rest = labels;
        let mut keys = BTreeSet::new();
        while !rest.is_empty() {
            let (key, after) = rest.split_once("=\"").ok_or(format!("bad label: {line}"))?;
            let end = closing_quote(after).ok_or(format!("bad value: {line}"))?;
            if !keys.insert(key.trim_start_matches(',')) {
                return Err(format!("label twice: {line}"));
            }
            rest = &after[end + 1..];
        }
    }
    Ok((series.to_owned(), value))
}

fn closing_quote(text: &str) -> Option<usize> {
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some(at),
            '\\' if !matches!(characters.next()?.1, '\\' | '"' | 'n') => return None,
            _ => {}
        }
    }
    None
}

fn check_suffix(family: &str, kind: &str, series: &str) -> Result<(), String> {
    let name = series.split('{').next().unwrap_or_default();
    let suffixes: &[&str] = match kind {
        "gauge" => &[""],
        "counter" => &["_total"],
        "histogram" => &["_sum", "_count", "_bucket"],
        _ => return Err(format!("type {kind} of {family}")),
    };
    let fits = suffixes
        .iter()
        .any(|suffix| name == format!("{family}{suffix}"));
    fits.then_some(())
        .ok_or(format!("{series} is no sample of the {kind} {family}"))
}

#[test]
fn the_reader_is_strict() {
    let table = [
        ("# HELP a b.\n# TYPE a gauge\na 1\n", "no # EOF"),
        (
            "# HELP a b.\n# TYPE a gauge\na 1\na 2\n# EOF\n",
            "label set twice",
        ),
        (
            "# HELP a b.\n# TYPE a gauge\n# HELP a b.\n# EOF\n",
            "second or empty HELP",
        ),
        (
            "# HELP a b.\n# TYPE a counter\na 1\n# EOF\n",
            "no sample of the counter",
        ),
        (
            "# HELP a b.\n# TYPE a gauge\na{x=\"\\q\"} 1\n# EOF\n",
            "bad value",
        ),
        ("# HELP a b.\n# TYPE a gauge\na{x=\"\n\"} 1\n# EOF\n", ""),
        (
            "# HELP a b.\n# TYPE a gauge\na{x=\"1\",x=\"2\"} 1\n# EOF\n",
            "label twice",
        ),
    ];
    for (text, message) in table {
        let error = read_strictly(text).expect_err(text);
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn every_count_shows_where_the_interface_says() {
    let mut gate =
        Fixture::new("[limits.user]\napp = 2\nretired = \"none\"\n[limits.database]\nprod = 300");
    for _ in 0..2 {
        gate.admit(b"app", b"prod").expect("admitted");
    }
    gate.admit(b"stranger", b"elsewhere").expect("admitted");
    gate.pending();
    let stats = gate.state.stats.clone();
    for worker in &stats {
        worker.waited(WaitOutcome::Admitted);
        worker.accepted();
        worker.holds(4);
        worker.rejected(0, Reason::User);
        worker.startup_failed(StartupFailure::BadStartup);
        worker.closed(CloseReason::BackendReset);
        worker.relayed(Direction::ToClient, 100);
        worker.cancelled(CancelOutcome::Forwarded);
        worker.accept_failed(libc::EMFILE);
        worker.connect_failed(0, ConnectFailure::Refused);
        worker.admission_took(Duration::from_micros(3));
        worker.backend_connect_took(Duration::from_secs(60));
        worker.ready_took(Duration::from_millis(2));
        worker.round_took(Duration::from_nanos(900));
    }
    let now = std::time::Instant::now();
    gate.state.backends.connected(0, 0, false, now);
    for _ in 0..2 {
        gate.state
            .backends
            .failed(0, 0, ConnectFailure::Refused, now);
    }
    let ticket = crate::admission::Ticket {
        worker: 0,
        id: 0,
        generation: 0,
    };
    let waiting = &gate.state.waiting;
    waiting.join(ticket, b"app", WaitsFor::User(b"app".to_vec()), 1);
    let samples = scrape(&gate);
    let expected = [
        (
            r#"gate_backend_up{backend="default",address="127.0.0.1:5432"}"#,
            0.0,
        ),
        (
            r#"gate_backend_address_connects_total{backend="default",address="127.0.0.1:5432"}"#,
            1.0,
        ),
        (
            r#"gate_backend_address_failures_total{backend="default",address="127.0.0.1:5432"}"#,
            2.0,
        ),
        (r#"gate_connections_active{listener="127.0.0.1:6432"}"#, 3.0),
        (
            r#"gate_connections_pending{listener="127.0.0.1:6432"}"#,
            1.0,
        ),
        ("gate_connections_waiting", 1.0),
        (r#"gate_waited_total{outcome="admitted"}"#, 2.0),
        (r#"gate_waited_total{outcome="left"}"#, 0.0),
        ("gate_connection_limit", 5000.0),
        ("gate_pending_limit", 1000.0),
        (
            r#"gate_connections_rejected_total{listener="127.0.0.1:6432",reason="user"}"#,
            2.0,
        ),
        (
            r#"gate_connections_rejected_total{listener="127.0.0.1:6432",reason="names_full"}"#,
            0.0,
        ),
        (r#"gate_startup_failures_total{reason="bad_startup"}"#, 2.0),
        (r#"gate_user_connections_active{user="app"}"#, 2.0),
        (r#"gate_user_connections_active{user="other"}"#, 1.0),
        (r#"gate_user_connection_limit{user="app"}"#, 2.0),
        (r#"gate_user_connection_limit{user="retired"}"#, -1.0),
        (r#"gate_user_connection_limit{user="other"}"#, 0.0),
        (r#"gate_database_connections_active{database="prod"}"#, 2.0),
        (r#"gate_database_connection_limit{database="prod"}"#, 300.0),
        (r#"gate_backend_connections_active{backend="default"}"#, 3.0),
        (r#"gate_backend_connection_limit{backend="default"}"#, 0.0),
        (
            r#"gate_backend_connect_failures_total{backend="default",reason="refused"}"#,
            2.0,
        ),
        ("gate_kernel_active", 0.0),
        (
            r#"gate_admission_duration_seconds_bucket{le="0.000002"}"#,
            0.0,
        ),
        (
            r#"gate_admission_duration_seconds_bucket{le="0.000004"}"#,
            2.0,
        ),
        ("gate_admission_duration_seconds_count", 2.0),
        ("gate_admission_duration_seconds_sum", 6e-6),
        (
            r#"gate_backend_connect_duration_seconds_bucket{le="8.388608"}"#,
            0.0,
        ),
        (
            r#"gate_backend_connect_duration_seconds_bucket{le="+Inf"}"#,
            2.0,
        ),
        ("gate_ready_duration_seconds_count", 2.0),
        (r#"gate_ready_duration_seconds_bucket{le="0.001024"}"#, 0.0),
        (r#"gate_ready_duration_seconds_bucket{le="0.002048"}"#, 2.0),
        (r#"gate_loop_duration_seconds_bucket{le="0.000001"}"#, 2.0),
        (r#"gate_loop_duration_seconds_bucket{le="+Inf"}"#, 2.0),
        (
            r#"gate_sessions_closed_total{reason="backend_reset",fault="backend"}"#,
            2.0,
        ),
        (r#"gate_relayed_bytes_total{direction="to_client"}"#, 200.0),
        (r#"gate_worker_connections_accepted_total{worker="1"}"#, 1.0),
        (r#"gate_worker_connections{worker="0"}"#, 4.0),
        (r#"gate_cancel_requests_total{outcome="forwarded"}"#, 2.0),
        (r#"gate_limited{scope="user"}"#, 0.0),
        (r#"gate_limited_seconds_total{scope="over_ceiling"}"#, 0.0),
        (r#"gate_accept_errors_total{errno="EMFILE"}"#, 2.0),
        (r#"gate_accept_errors_total{errno="other"}"#, 0.0),
        (r#"gate_ledger_errors_total{kind="impossible_count"}"#, 0.0),
    ];
    for (series, value) in expected {
        assert_eq!(
            samples.get(series),
            Some(&value),
            "{series} in {samples:#?}"
        );
    }
    assert!(samples.contains_key("gate_open_fds"));
    assert!(
        !samples
            .keys()
            .any(|series| series.starts_with("gate_kernel_sockets"))
    );
}

#[test]
fn e7_hostile_names_make_valid_series() {
    let mut gate = Fixture::new(
        "[limits.user]\n'a\\\\b\\xff\\x0a' = 5\n'q\"u' = 6\nother = 7\n'\\x6fthe' = 8\n",
    );
    gate.admit(b"a\\b\xff\n", b"d").expect("admitted");
    gate.admit(b"other", b"d").expect("admitted");
    let samples = scrape(&gate);
    let users: Vec<_> = samples
        .iter()
        .filter(|(series, _)| series.starts_with("gate_user_connections_active"))
        .map(|(series, value)| (series.as_str(), *value))
        .collect();
    let expected = [
        (r#"gate_user_connections_active{user="\\x6fther"}"#, 1.0),
        (
            r#"gate_user_connections_active{user="a\\\\b\\xff\\x0a"}"#,
            1.0,
        ),
        (r#"gate_user_connections_active{user="othe"}"#, 0.0),
        (r#"gate_user_connections_active{user="other"}"#, 0.0),
        (r#"gate_user_connections_active{user="q\"u"}"#, 0.0),
    ];
    assert_eq!(users, expected);
}

#[test]
fn strangers_make_no_series() {
    let mut gate = Fixture::new("");
    let before: Vec<String> = scrape(&gate).into_keys().collect();
    for number in 0..2000 {
        gate.admit(format!("stranger{number}").as_bytes(), b"d")
            .expect("admitted");
    }
    let samples = scrape(&gate);
    assert_eq!(
        samples[r#"gate_user_connections_active{user="other"}"#],
        2000.0
    );
    assert_eq!(samples.into_keys().collect::<Vec<_>>(), before);
}
