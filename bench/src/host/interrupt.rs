//! Ctrl-C: a run ends in order, and puts the machine back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tokio::signal::unix::{SignalKind, signal};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// How often a pause looks up.
const LOOK_UP: Duration = Duration::from_millis(50);

/// From here on SIGINT, SIGTERM and SIGHUP end the run at the next [`pause`].
///
/// # Errors
/// No threads or descriptors are left.
pub fn note_signals() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    // Installed before anything is changed that has to be put back.
    let guard = runtime.enter();
    let mut signals = [
        signal(SignalKind::interrupt())?,
        signal(SignalKind::terminate())?,
        signal(SignalKind::hangup())?,
    ];
    drop(guard);
    let wait = move || {
        let mut next = || {
            runtime.block_on(async {
                let [interrupt, terminate, hangup] = &mut signals;
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    _ = hangup.recv() => {}
                }
            });
        };
        next();
        INTERRUPTED.store(true, Ordering::SeqCst);
        eprintln!("gate-bench: interrupted, putting everything back; once more ends it now");
        next();
        // Proxies end with us; what is noted as changed is put back by the next run.
        eprintln!("gate-bench: ended; the next run puts back what is still changed");
        std::process::exit(130);
    };
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(wait)?;
    Ok(())
}

/// Fails once a signal has come.
///
/// # Errors
/// A signal has come.
pub fn check() -> Result<()> {
    if INTERRUPTED.load(Ordering::SeqCst) {
        bail!("interrupted");
    }
    Ok(())
}

/// Lets time pass.
///
/// # Errors
/// A signal has come.
pub fn pause(time: Duration) -> Result<()> {
    let begin = Instant::now();
    loop {
        check()?;
        let left = time.saturating_sub(begin.elapsed());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(LOOK_UP));
    }
}
