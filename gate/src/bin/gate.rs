//! The gate itself: command line, then [`gate::run`].
#![forbid(unsafe_code)]

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use gate::config::{Config, ConfigError, ConfigSource, Flags, render, settings::Settings};
use gate::{RunError, Start};

/// A connection gate in front of PostgreSQL: it decides, per connection, who
/// gets in, and relays the bytes of those who do.
///
/// Flags win over the environment (GATE_*), which wins over the configuration
/// file. SIGHUP reloads the limits; SIGTERM drains, then exits; SIGINT or a
/// second SIGTERM exits now. Exit codes: 0 done, 1 failure while running,
/// 2 usage or configuration, 3 the host refuses.
#[derive(Parser)]
#[command(name = "gate", version)]
struct Line {
    #[command(flatten)]
    flags: Flags,
    /// Validate the configuration and exit; whether the descriptors of a host are
    /// enough for its limits shows at the start on that host
    #[arg(long)]
    check: bool,
    /// Print the effective configuration (TOML, with its documentation) and exit
    #[arg(long)]
    print_config: bool,
    /// Take the place of the running gate of this instance without losing a
    /// connection: it hands over its sockets and ends with its last session.
    /// Starts as usual if none runs
    #[arg(long)]
    takeover: bool,
}

/// Failure while running.
const EXIT_FAILED: u8 = 1;
/// The host refuses.
const EXIT_HOST: u8 = 3;
/// Usage or configuration.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let line = Line::parse();
    let source = ConfigSource::new(line.flags);
    let (settings, config) = match load(&source) {
        Ok(loaded) => loaded,
        Err(error) => {
            eprintln!("gate: {error}");
            return ExitCode::from(EXIT_USAGE);
        }
    };
    if line.print_config {
        // A reader that has seen enough is no failure.
        let _ = std::io::stdout().write_all(render::to_toml(&settings).as_bytes());
        return ExitCode::SUCCESS;
    }
    if line.check {
        println!("the configuration is valid");
        return ExitCode::SUCCESS;
    }
    let start = if line.takeover {
        Start::TakeOver
    } else {
        Start::Fresh
    };
    match gate::run(config, source, start) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gate: {error}");
            ExitCode::from(match error {
                RunError::Failed(_) => EXIT_FAILED,
                RunError::Config(_) => EXIT_USAGE,
                RunError::Host(_) => EXIT_HOST,
            })
        }
    }
}

fn load(source: &ConfigSource) -> Result<(Settings, Config), ConfigError> {
    let settings = source.settings()?;
    let config = Config::from_settings(&settings)?;
    Ok((settings, config))
}
