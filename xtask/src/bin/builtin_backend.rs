//! The stand-in for PostgreSQL that `cargo xtask run` starts where none is installed.
//!
//! It lets everybody in and answers `select` of constants, so that `psql -c 'select 1'` works
//! through gate. Its first line on standard output is the address it listens on.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::stream;
use pgwire::api::auth::StartupHandler;
use pgwire::api::auth::noop::NoopStartupHandler;
use pgwire::api::query::SimpleQueryHandler;
use pgwire::api::results::{DataRowEncoder, FieldFormat, FieldInfo, QueryResponse, Response, Tag};
use pgwire::api::store::PortalStore;
use pgwire::api::{ClientInfo, ClientPortalStore, PgWireServerHandlers, Type};
use pgwire::error::{ErrorInfo, PgWireError, PgWireResult};
use tokio::net::TcpListener;

/// No sleep is longer: this server is for trying things out.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

#[tokio::main(flavor = "current_thread")]
async fn main() -> std::io::Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    println!("{}", listener.local_addr()?);
    std::io::stdout().flush()?;
    serve(listener).await
}

async fn serve(listener: TcpListener) -> std::io::Result<()> {
    let server = Arc::new(Server);
    loop {
        let (socket, _) = listener.accept().await?;
        let server = Arc::clone(&server);
        // How one client's connection ends is that client's affair.
        tokio::spawn(async move { pgwire::tokio::process_socket(socket, None, server).await });
    }
}

/// Every role of pgwire that this server plays.
struct Server;

impl PgWireServerHandlers for Server {
    fn simple_query_handler(&self) -> Arc<impl SimpleQueryHandler> {
        Arc::new(Server)
    }

    fn startup_handler(&self) -> Arc<impl StartupHandler> {
        Arc::new(Server)
    }
}

impl NoopStartupHandler for Server {}

#[async_trait]
impl SimpleQueryHandler for Server {
    async fn do_query<C>(&self, _client: &mut C, query: &str) -> PgWireResult<Vec<Response>>
    where
        C: ClientInfo + ClientPortalStore + Unpin + Send + Sync,
        C::PortalStore: PortalStore,
    {
        let mut responses = Vec::new();
        for statement in split(query, ';') {
            match parse(statement) {
                Statement::Empty => {}
                Statement::Command(tag) => responses.push(Response::Execution(Tag::new(&tag))),
                Statement::Select(columns) => {
                    for seconds in columns.iter().filter_map(|column| column.sleep) {
                        tokio::time::sleep(seconds).await;
                    }
                    responses.push(Response::Query(one_row(columns)?));
                }
                Statement::Unknown => return Err(not_here(statement)),
            }
        }
        if responses.is_empty() {
            responses.push(Response::EmptyQuery);
        }
        Ok(responses)
    }
}

/// One statement, as far as this server understands it.
#[derive(Debug, PartialEq)]
enum Statement {
    Empty,
    /// Accepted without any effect, answered by its tag.
    Command(String),
    Select(Vec<Column>),
    Unknown,
}

/// One constant of a `select`.
#[derive(Debug, PartialEq)]
struct Column {
    name: String,
    kind: Type,
    value: Option<String>,
    sleep: Option<Duration>,
}

impl Column {
    fn new(name: &str, kind: Type, value: Option<&str>) -> Self {
        Self {
            name: name.to_owned(),
            kind,
            value: value.map(str::to_owned),
            sleep: None,
        }
    }
}

fn parse(statement: &str) -> Statement {
    let statement = statement.trim();
    let (verb, rest) = statement
        .split_once(char::is_whitespace)
        .unwrap_or((statement, ""));
    let verb = verb.to_ascii_uppercase();
    match verb.as_str() {
        "" => Statement::Empty,
        "BEGIN" | "COMMIT" | "ROLLBACK" | "SET" | "RESET" | "DISCARD" => Statement::Command(verb),
        "SELECT" => match split(rest, ',').map(column).collect() {
            Some(columns) => Statement::Select(columns),
            None => Statement::Unknown,
        },
        _ => Statement::Unknown,
    }
}

/// A literal or one of three functions, with or without `as name`.
fn column(text: &str) -> Option<Column> {
    let text = text.trim();
    let lower = text.to_ascii_lowercase();
    if let Some(at) = lower.rfind(" as ") {
        let name = text[at + 4..].trim().trim_matches('"');
        let mut named = column(&text[..at])?;
        named.name = name.to_owned();
        return Some(named);
    }
    if let Some(quoted) = text.strip_prefix('\'') {
        let inner = quoted.strip_suffix('\'')?;
        let whole = !inner.replace("''", "").contains('\'');
        let value = inner.replace("''", "'");
        return whole.then(|| Column::new("?column?", Type::TEXT, Some(&value)));
    }
    if let Some(seconds) = lower
        .strip_prefix("pg_sleep(")
        .and_then(|s| s.strip_suffix(')'))
    {
        let seconds = Duration::try_from_secs_f64(seconds.trim().parse().ok()?).ok()?;
        let mut sleep = Column::new("pg_sleep", Type::VOID, Some(""));
        sleep.sleep = Some(seconds.min(SLEEP_MAX));
        return Some(sleep);
    }
    match lower.as_str() {
        "null" => Some(Column::new("?column?", Type::TEXT, None)),
        "true" => Some(Column::new("bool", Type::BOOL, Some("t"))),
        "false" => Some(Column::new("bool", Type::BOOL, Some("f"))),
        "version()" => Some(Column::new(
            "version",
            Type::TEXT,
            Some("gate's built-in server"),
        )),
        number if number.parse::<i32>().is_ok() => {
            Some(Column::new("?column?", Type::INT4, Some(number)))
        }
        number => {
            let digits = number.trim_start_matches(['+', '-']);
            let starts = digits.starts_with(|c: char| c.is_ascii_digit());
            (starts && number.parse::<f64>().is_ok())
                .then(|| Column::new("?column?", Type::NUMERIC, Some(number)))
        }
    }
}

/// Splits at `separator` outside of single quotes and parentheses.
fn split(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let mut quoted = false;
    let mut depth = 0_i32;
    text.split(move |c: char| {
        match c {
            '\'' => quoted = !quoted,
            '(' if !quoted => depth += 1,
            ')' if !quoted => depth -= 1,
            _ => {}
        }
        c == separator && !quoted && depth == 0
    })
}

fn one_row(columns: Vec<Column>) -> PgWireResult<QueryResponse> {
    let field = |column: &Column| {
        let (name, kind) = (column.name.clone(), column.kind.clone());
        FieldInfo::new(name, None, None, kind, FieldFormat::Text)
    };
    let schema = Arc::new(columns.iter().map(field).collect::<Vec<_>>());
    let mut encoder = DataRowEncoder::new(Arc::clone(&schema));
    for column in &columns {
        let text = FieldFormat::Text;
        let options = pgwire::types::format::FormatOptions::default();
        encoder.encode_field_with_type_and_format(&column.value, &Type::TEXT, text, &options)?;
    }
    let row = encoder.take_row();
    Ok(QueryResponse::new(schema, stream::iter([Ok(row)])))
}

/// feature_not_supported, as PostgreSQL's errcodes.txt names it.
fn not_here(statement: &str) -> PgWireError {
    let text = format!("gate's built-in server answers selects of constants, not: {statement}");
    PgWireError::UserError(Box::new(ErrorInfo::new(
        "ERROR".into(),
        "0A000".into(),
        text,
    )))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn selects_of_constants_are_understood() {
        let select = |text: &str| match parse(text) {
            Statement::Select(columns) => columns
                .into_iter()
                .map(|column| (column.name, column.value.unwrap_or("NULL".into())))
                .collect::<Vec<_>>(),
            other => panic!("{text}: {other:?}"),
        };
        let one = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
        assert_eq!(select("select 1"), one("?column?", "1"));
        assert_eq!(select("SELECT -2.5 AS half"), one("half", "-2.5"));
        assert_eq!(
            select("select 'it''s; a, b'"),
            one("?column?", "it's; a, b")
        );
        assert_eq!(select("select null"), one("?column?", "NULL"));
        assert_eq!(select("select pg_sleep(0.5)"), one("pg_sleep", ""));
        assert_eq!(select("select 1, true").len(), 2);
        assert_eq!(parse("begin"), Statement::Command("BEGIN".into()));
        for unknown in [
            "select a from b",
            "drop table x",
            "select 'a' 'b'",
            "select inf",
        ] {
            assert_eq!(parse(unknown), Statement::Unknown, "{unknown}");
        }
    }

    #[test]
    fn a_client_gets_its_row() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime
            .block_on(TcpListener::bind(("127.0.0.1", 0)))
            .unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        std::thread::spawn(move || runtime.block_on(serve(listener)));
        client
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        client
            .write_all(b"\0\0\0\x11\0\x03\0\0user\0app\0\0")
            .unwrap();
        client.write_all(b"Q\0\0\0\x10select 'row'\0").unwrap();
        client.write_all(b"X\0\0\0\x04").unwrap();
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).unwrap();
        let row = b"D\0\0\0\x0d\0\x01\0\0\0\x03row";
        assert!(
            answer.windows(row.len()).any(|window| window == row),
            "{answer:?}"
        );
    }
}
