//! Another program that takes CPU time while the bench measures.

use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::Result;

pub const FLAG: &str = "--burn-seconds";

/// Not longer, whatever becomes of the test.
const SECONDS_MAX: &str = "60";

/// One process for each CPU; ended when dropped.
pub struct Burners(Vec<Child>);

impl Burners {
    pub fn start() -> Result<Self> {
        let count = std::thread::available_parallelism()?.get();
        let mut burners = Self(Vec::new());
        for _ in 0..count {
            let mut command = Command::new(std::env::current_exe()?);
            command
                .args([FLAG, SECONDS_MAX])
                .stdin(Stdio::null())
                .stdout(Stdio::null());
            burners.0.push(command.spawn()?);
        }
        Ok(burners)
    }
}

impl Drop for Burners {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The burner's own life.
pub fn play(seconds: &str) -> ExitCode {
    let Ok(seconds) = seconds.parse() else {
        return ExitCode::FAILURE;
    };
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(seconds) {
        std::hint::spin_loop();
    }
    ExitCode::SUCCESS
}
