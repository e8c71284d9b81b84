//! What is wrong when gate does not start, by exit code.

use crate::config::ConfigError;
use crate::control::ControlError;
use crate::host::InstanceLockError;
use crate::kernel::KernelError;
use crate::ledger::NamesError;
use crate::placement::PlacementError;
use crate::ring::RingError;
use crate::takeover::TakeoverError;

/// Why gate did not start, or ended badly.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The host refuses what gate needs: exit code 3.
    #[error("{0}")]
    Host(String),
    /// This host cannot run the configuration: exit code 2.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// Anything else: exit code 1.
    #[error("{0:#}")]
    Failed(#[from] anyhow::Error),
}

impl From<RingError> for RunError {
    fn from(error: RingError) -> Self {
        Self::Host(error.to_string())
    }
}

impl From<KernelError> for RunError {
    fn from(error: KernelError) -> Self {
        Self::Host(error.to_string())
    }
}

impl From<PlacementError> for RunError {
    fn from(error: PlacementError) -> Self {
        Self::Host(error.to_string())
    }
}

impl From<InstanceLockError> for RunError {
    fn from(error: InstanceLockError) -> Self {
        if error.is_host() {
            Self::Host(error.to_string())
        } else {
            Self::Failed(error.into())
        }
    }
}

impl From<NamesError> for RunError {
    fn from(error: NamesError) -> Self {
        Self::Failed(error.into())
    }
}

impl From<ControlError> for RunError {
    fn from(error: ControlError) -> Self {
        if error.is_host() {
            Self::Host(error.to_string())
        } else {
            Self::Failed(error.into())
        }
    }
}

impl From<TakeoverError> for RunError {
    fn from(error: TakeoverError) -> Self {
        Self::Failed(error.into())
    }
}
