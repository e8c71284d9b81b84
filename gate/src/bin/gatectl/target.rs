//! The instance that is meant, and the two ways to it: its control socket, if
//! a gate runs, and its pinned maps, if it has a kernel plane.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use gate::config;
use gate::control::api::{self, Status};
use gate::control::status;
use gate::host::PinsLock;
use gate::kernel::{KernelError, Maps};
use gate::ledger::Ledger;
use gate::state::{KernelState, ListenerInfo};
use gate_common::abi::NameKind;
use hyper::Method;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::client::{self, Answer};

/// Refused or failed.
pub const EXIT_FAILED: u8 = 1;
/// A command line that cannot be.
pub const EXIT_USAGE: u8 = 2;
/// No such instance.
pub const EXIT_NO_INSTANCE: u8 = 4;

/// For an answer that gate has at hand: a gate that is slower is taken for
/// stuck, and its maps are read instead.
const PATIENCE: Duration = Duration::from_secs(1);
/// For an answer that needs files and name servers.
const LONG_PATIENCE: Duration = Duration::from_secs(30);

/// The state of a gate that runs, but not at this control socket.
pub const UNREACHABLE: &str = "unreachable";

/// Why a command failed.
#[derive(Debug)]
pub struct Failure {
    pub exit: u8,
    pub message: String,
}

impl Failure {
    pub fn new(message: impl ToString) -> Self {
        Self {
            exit: EXIT_FAILED,
            message: message.to_string(),
        }
    }
}

/// An instance.
pub struct Target {
    instance: String,
    control: PathBuf,
    /// What the command line or the environment named.
    names: Names,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Names {
    /// The instance, or nothing: the control socket is where it has it by default.
    Instance,
    /// The control socket only: its gate tells which instance it is.
    Control,
    Both,
}

/// Where a command found the instance.
pub enum Reached<T> {
    /// A running gate answered.
    Gate(T),
    /// No gate answers, but its maps are there.
    Maps(Ledger),
}

impl Target {
    pub fn new(instance: Option<String>, control: Option<PathBuf>) -> Self {
        let names = match (&instance, &control) {
            (_, None) => Names::Instance,
            (None, Some(_)) => Names::Control,
            (Some(_), Some(_)) => Names::Both,
        };
        let instance = instance.unwrap_or_else(|| config::DEFAULT_INSTANCE.to_owned());
        let control = control.unwrap_or_else(|| config::control_path(&instance));
        Self {
            instance,
            control,
            names,
        }
    }

    /// Whether a control socket and an instance that were both named belong
    /// together: one of them may be left over in the environment, and a drain of
    /// the other gate cannot be taken back. Without an answer only the pinned maps
    /// are used, which are those of the instance that was named.
    pub fn check(&self) -> Result<(), Failure> {
        self.check_within(PATIENCE).map(drop)
    }

    /// The same; returns why the gate did not answer, if both were named.
    fn check_within(&self, patience: Duration) -> Result<Option<io::Error>, Failure> {
        if self.names != Names::Both {
            return Ok(None);
        }
        let answer = match client::ask(&self.control, Method::GET, "/status", None, patience) {
            Ok(answer) => checked(answer)?,
            Err(silence) => return Ok(Some(silence)),
        };
        let status: Status = decode(&answer.body)?;
        if status.instance == self.instance {
            return Ok(None);
        }
        Err(Failure {
            exit: EXIT_USAGE,
            message: format!(
                "the gate at {} is instance `{}`, not `{}`; name one of the two only, by --control (GATE_CONTROL) \
                 or by --instance (GATE_INSTANCE)",
                self.control.display(),
                status.instance,
                self.instance
            ),
        })
    }

    /// Reads something: from the running gate, else from `read` on the maps.
    pub fn read<T: DeserializeOwned>(
        &self,
        path: &str,
        read: impl FnOnce(&Ledger) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        match self.get(path)? {
            Reached::Gate(answer) => decode(&answer.body),
            Reached::Maps(ledger) => read(&ledger),
        }
    }

    /// The status; from the maps if nobody answers.
    pub fn status(&self) -> Result<Status, Failure> {
        match client::ask(&self.control, Method::GET, "/status", None, PATIENCE) {
            Ok(answer) => decode(&checked(answer)?.body),
            Err(silence) => {
                let (ledger, runs) = self.maps_and_gate(&silence)?;
                let listeners = listeners(&ledger)?;
                let kernel = KernelState::Active;
                let mut status = status::of_ledger(&self.instance, &ledger, &listeners, &kernel)
                    .map_err(Failure::new)?;
                if silence.kind() == io::ErrorKind::TimedOut {
                    "unresponsive".clone_into(&mut status.state);
                } else if runs {
                    UNREACHABLE.clone_into(&mut status.state);
                }
                Ok(status)
            }
        }
    }

    /// Gets something from the running gate, else opens the maps.
    pub fn get(&self, path: &str) -> Result<Reached<Answer>, Failure> {
        match client::ask(&self.control, Method::GET, path, None, PATIENCE) {
            Ok(answer) => checked(answer).map(Reached::Gate),
            Err(silence) => self.maps(&silence).map(Reached::Maps),
        }
    }

    /// Where limits are written: the pinned maps of the gate that runs, so that
    /// it works while it is busy; its control socket if it has no kernel plane
    /// (an earlier gate may have left maps that nobody reads); without an
    /// answer the maps that are there.
    pub fn for_limits(&self) -> Result<Reached<()>, Failure> {
        match client::ask(&self.control, Method::GET, "/status", None, PATIENCE) {
            Ok(answer) => {
                let status: Status = decode(&checked(answer)?.body)?;
                if status.connections.kernel.state != "active" {
                    return Ok(Reached::Gate(()));
                }
                // Whoever may use the socket may not open the maps.
                Ok(match Maps::open(&status.instance) {
                    Ok(maps) => Reached::Maps(Ledger::kernel(Arc::new(maps))),
                    Err(_) => Reached::Gate(()),
                })
            }
            Err(silence) => self.maps(&silence).map(Reached::Maps),
        }
    }

    /// Asks the running gate to do something.
    pub fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, Failure> {
        let body = body
            .map(serde_json::to_string)
            .transpose()
            .map_err(Failure::new)?;
        // One that is slow may be another one, and would do it later.
        if let Some(silence) = self.check_within(LONG_PATIENCE)? {
            return Err(self.no_answer(&silence)?);
        }
        self.only_gate(Method::POST, path, body)
    }

    /// Reads something that only the running gate knows.
    pub fn ask_gate<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        self.only_gate(Method::GET, path, None)
    }

    fn only_gate<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<String>,
    ) -> Result<T, Failure> {
        match client::ask(&self.control, method, path, body, LONG_PATIENCE) {
            Ok(answer) => decode(&checked(answer)?.body),
            Err(silence) => Err(self.no_answer(&silence)?),
        }
    }

    /// What to say of a gate that does not answer, though its maps are there.
    fn no_answer(&self, silence: &io::Error) -> Result<Failure, Failure> {
        let (_, runs) = self.maps_and_gate(silence)?;
        let cure = if runs && silence.kind() != io::ErrorKind::TimedOut {
            "but one runs: name its control socket with --control"
        } else {
            "its pinned maps are there, so `gatectl limits` and `gatectl status` work without it"
        };
        Ok(Failure::new(format!(
            "no gate `{}` answers at {}: {silence}; {cure}",
            self.instance,
            self.control.display()
        )))
    }

    fn maps(&self, silence: &io::Error) -> Result<Ledger, Failure> {
        self.maps_and_gate(silence).map(|(ledger, _)| ledger)
    }

    /// The maps, and whether a gate runs on them: it may have its control socket
    /// elsewhere.
    fn maps_and_gate(&self, silence: &io::Error) -> Result<(Ledger, bool), Failure> {
        if self.names == Names::Control {
            return Err(Failure {
                exit: if is_nobody(silence) {
                    EXIT_NO_INSTANCE
                } else {
                    EXIT_FAILED
                },
                message: format!(
                    "no gate answers at {}: {silence}; to use its pinned maps all the same, name its instance with --instance",
                    self.control.display()
                ),
            });
        }
        match Maps::open(&self.instance) {
            Ok(maps) => {
                let runs = PinsLock::is_held(maps.directory());
                Ok((Ledger::kernel(Arc::new(maps)), runs))
            }
            Err(error) => Err(self.unreachable(&error, silence)),
        }
    }

    fn unreachable(&self, error: &KernelError, silence: &io::Error) -> Failure {
        let socket = self.control.display();
        let nobody = is_nobody(silence);
        let no_maps = matches!(error, KernelError::NoInstance { .. });
        if nobody && no_maps {
            return Failure {
                exit: EXIT_NO_INSTANCE,
                message: format!(
                    "no gate instance `{0}`: neither pinned maps under <bpffs>/gate/{0}/ nor a control socket \
                     that answers at {socket}; start gate, or name another with --instance or --control",
                    self.instance
                ),
            };
        }
        Failure::new(format!(
            "gate instance `{}` cannot be reached: control socket {socket}: {silence}; pinned maps: {error}",
            self.instance
        ))
    }
}

/// Whether nothing is behind a control socket.
fn is_nobody(silence: &io::Error) -> bool {
    matches!(
        silence.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
    )
}

/// The listeners that the maps know.
pub fn listeners(ledger: &Ledger) -> Result<Vec<ListenerInfo>, Failure> {
    let names = ledger.all_names().map_err(Failure::new)?;
    let listener = |(key, slot): &(gate_common::abi::NameKey, gate_common::abi::SlotRef)| {
        let text = std::str::from_utf8(key.name()).ok()?;
        let address: SocketAddr = text.parse().ok()?;
        (key.kind == NameKind::Listener as u8).then_some(ListenerInfo {
            address,
            index: slot.index,
        })
    };
    Ok(names.iter().filter_map(listener).collect())
}

fn checked(answer: Answer) -> Result<Answer, Failure> {
    if answer.success {
        return Ok(answer);
    }
    let said: Result<api::Failure, _> = serde_json::from_slice(&answer.body);
    Err(Failure::new(match said {
        Ok(failure) => failure.error,
        Err(_) => String::from_utf8_lossy(&answer.body).trim().to_owned(),
    }))
}

fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|error| {
        Failure::new(format!(
            "the answer of gate cannot be read: {error}; are gate and gatectl of the same version?"
        ))
    })
}
