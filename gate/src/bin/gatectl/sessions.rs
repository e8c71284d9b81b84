//! `gatectl sessions`: who is there, and what it does.

use std::net::IpAddr;
use std::time::Duration;

use clap::Args;
use gate::control::api::{Session, SessionQuery, Sessions};
use gate::session::outcome::SessionState;

use crate::output::{Output, Table};
use crate::target::{Failure, Target};

/// Ages below this are shown with a tenth of a second.
const FINE: f64 = 60.0;

#[derive(Args)]
pub struct Filter {
    /// Of this user
    #[arg(long, value_name = "NAME", value_parser = name)]
    user: Option<String>,
    /// Of this database
    #[arg(long, value_name = "NAME", value_parser = name)]
    database: Option<String>,
    /// In this state
    #[arg(long, value_parser = SessionState::ALL.iter().map(|state| state.label()).collect::<Vec<_>>())]
    state: Option<String>,
    /// From this IP address
    #[arg(long, value_name = "IP")]
    source: Option<IpAddr>,
    /// So many, the oldest
    #[arg(long, value_name = "N")]
    limit: Option<usize>,
}

pub fn run(filter: Filter, target: &Target, output: Output) -> Result<(), Failure> {
    let query = SessionQuery {
        user: filter.user,
        database: filter.database,
        state: filter.state,
        source: filter.source.map(|address| address.to_string()),
        limit: filter.limit,
    };
    let sessions: Sessions = target.post("/sessions", Some(&query))?;
    output.print(&sessions, text)
}

pub fn text(sessions: &Sessions) -> String {
    let mut table = Table::new([
        "ID",
        "USER",
        "DATABASE",
        "SOURCE",
        "BACKEND",
        "STATE",
        "AGE",
        "IDLE",
        "TO BACKEND",
        "TO CLIENT",
    ]);
    for session in &sessions.sessions {
        let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
        table.row([
            session.id.to_string(),
            or_dash(&session.user),
            or_dash(&session.database),
            or_dash(&session.source),
            backend(session),
            session.state.clone(),
            time(session.age_seconds),
            time(session.idle_seconds),
            session.bytes_to_backend.to_string(),
            session.bytes_to_client.to_string(),
        ]);
    }
    let mut text = if table.is_empty() {
        "no sessions\n".to_owned()
    } else {
        table.render()
    };
    let shown = sessions.sessions.len();
    if shown < sessions.found {
        text += &format!("\nthe oldest {shown} of {}\n", sessions.found);
    }
    for worker in &sessions.unanswered {
        text += &format!("\nworker {worker} did not answer in time: its sessions are missing\n");
    }
    text
}

fn backend(session: &Session) -> String {
    match (&session.backend, &session.backend_address) {
        (Some(name), Some(address)) => format!("{name} {address}"),
        (Some(name), None) => name.clone(),
        (None, _) => "-".to_owned(),
    }
}

fn time(seconds: f64) -> String {
    if seconds < FINE {
        return format!("{seconds:.1}s");
    }
    humantime::format_duration(Duration::from_secs(seconds as u64)).to_string()
}

fn name(text: &str) -> Result<String, String> {
    match gate::config::name::parse(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
