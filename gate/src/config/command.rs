//! Flags and environment variables, and the file under them.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use clap::Args;

use super::settings::{BackendSettings, ListenerSettings, Settings};
use super::value::{AdminValue, CountValue, KernelMode, LogFormat};
use super::{Config, ConfigError, parse};

/// Settings of the command line. Each is also an environment variable; a flag
/// wins over the variable, which wins over the file.
#[derive(Args, Clone, Debug, Default)]
pub struct Flags {
    /// Configuration file (TOML); --print-config shows what can be in it
    #[arg(long, value_name = "FILE", env = "GATE_CONFIG")]
    pub config: Option<PathBuf>,
    /// Where clients connect: host:port or `[v6]:port`; may be repeated, and
    /// replaces the listeners of the file [default: 127.0.0.1:6432]
    #[arg(long, value_name = "ADDR", env = "GATE_LISTEN", value_delimiter = ',')]
    pub listen: Vec<String>,
    /// The PostgreSQL server, backend `default`: host:port or the path of a unix socket
    /// or of its directory [default: 127.0.0.1:5432]
    #[arg(long, value_name = "ADDR", env = "GATE_BACKEND")]
    pub backend: Option<String>,
    /// Worker threads: a number, or `auto` for one per CPU [default: auto]
    #[arg(
        long,
        value_name = "N|auto",
        env = "GATE_WORKERS",
        allow_negative_numbers = true
    )]
    pub workers: Option<CountValue>,
    /// Name of this instance: 1 to 32 of a-z, 0-9, `_`, `-` [default: default]
    #[arg(long, value_name = "NAME", env = "GATE_INSTANCE")]
    pub instance: Option<String>,
    /// The kernel plane: `auto` goes on without it and says why, `required` exits 3 [default: auto]
    #[arg(
        long,
        value_name = "MODE",
        env = "GATE_KERNEL",
        hide_possible_values = false
    )]
    pub kernel: Option<KernelMode>,
    /// Control socket for gatectl [default: /run/gate/INSTANCE/control.sock]
    #[arg(long, value_name = "PATH", env = "GATE_CONTROL")]
    pub control: Option<PathBuf>,
    /// Admin HTTP (/metrics, /healthz, /readyz, /connections), or `off` [default: 127.0.0.1:9632]
    #[arg(long, value_name = "ADDR|off", env = "GATE_ADMIN")]
    pub admin: Option<String>,
    /// How log lines look [default: text]
    #[arg(long, value_name = "FORMAT", env = "GATE_LOG_FORMAT")]
    pub log_format: Option<LogFormat>,
}

/// Where the configuration comes from, so that a reload can read it again.
#[derive(Clone, Debug, Default)]
pub struct ConfigSource {
    flags: Flags,
}

impl ConfigSource {
    /// The file, flags and variables of a command line.
    #[must_use]
    pub fn new(flags: Flags) -> Self {
        Self { flags }
    }

    /// The configuration file, if there is one.
    #[must_use]
    pub fn path(&self) -> Option<&std::path::Path> {
        self.flags.config.as_deref()
    }

    /// Reads the file and lays flags and variables over it.
    ///
    /// # Errors
    /// [`ConfigError::Read`] and [`ConfigError::Parse`].
    pub fn settings(&self) -> Result<Settings, ConfigError> {
        let mut settings = match &self.flags.config {
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(|error| ConfigError::Read {
                    path: path.clone(),
                    error,
                })?;
                parse(&text, &path.display().to_string())?
            }
            None => Settings::default(),
        };
        self.flags.lay_over(&mut settings);
        Ok(settings)
    }

    /// Reads the settings and validates them.
    ///
    /// # Errors
    /// Any [`ConfigError`].
    pub fn load(&self) -> Result<Config, ConfigError> {
        Config::from_settings(&self.settings()?)
    }
}

impl Flags {
    fn lay_over(&self, settings: &mut Settings) {
        if !self.listen.is_empty() {
            settings.listener = self.listeners_over(&settings.listener);
        }
        if let Some(address) = &self.backend {
            let default = settings.backend.entry("default".to_owned());
            let backend: &mut BackendSettings = default.or_default();
            backend.address = Some(address.clone());
            backend.addresses = None;
        }
        lay(&mut settings.workers.count, self.workers);
        lay(&mut settings.instance, self.instance.clone());
        lay(&mut settings.kernel, self.kernel);
        lay(&mut settings.log_format, self.log_format);
        lay(
            &mut settings.admin,
            self.admin.as_deref().map(AdminValue::from),
        );
        if self.control.is_some() {
            settings.control.clone_from(&self.control);
        }
    }

    /// The listeners of the command line. One that the file also names keeps
    /// its own settings.
    fn listeners_over(&self, file: &[ListenerSettings]) -> Vec<ListenerSettings> {
        let listener = |address: &String| {
            // A list in the environment may have blanks after its commas.
            let address = address.trim();
            let known = file.iter().find(|listener| listener.address == address);
            known.cloned().unwrap_or_else(|| ListenerSettings {
                address: address.to_owned(),
                ..ListenerSettings::default()
            })
        };
        self.listen.iter().map(listener).collect()
    }
}

fn lay<T>(setting: &mut T, over: Option<T>) {
    if let Some(value) = over {
        *setting = value;
    }
}
