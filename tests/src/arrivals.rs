//! Clients that keep coming.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::session::{OpenError, Session};

/// Clients that come at the same time.
const THREADS: u32 = 16;

/// A stream of short sessions: connect, log in, leave.
#[derive(Debug)]
pub struct Arrivals {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Seen>>,
}

/// What the clients of a stream saw.
#[derive(Debug, Default)]
pub struct Seen {
    /// Sessions that went well.
    pub served: usize,
    /// How the others ended.
    pub failures: Vec<OpenError>,
}

impl Arrivals {
    /// Begins with so many clients a second. One that is late does not make the
    /// next ones come faster.
    #[must_use]
    pub fn begin(address: SocketAddr, per_second: u32) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let pause = Duration::from_secs(1) * THREADS / per_second;
        let threads = (0..THREADS).map(|_| {
            let over = Arc::clone(&over);
            thread::spawn(move || come(address, pause, &over))
        });
        Self {
            threads: threads.collect(),
            over,
        }
    }

    /// Ends the stream and says what was seen.
    #[must_use]
    pub fn end(self) -> Seen {
        self.over.store(true, Ordering::Relaxed);
        let mut all = Seen::default();
        for thread in self.threads {
            let seen = thread.join().unwrap_or_default();
            all.served += seen.served;
            all.failures.extend(seen.failures);
        }
        all
    }
}

fn come(address: SocketAddr, pause: Duration, over: &AtomicBool) -> Seen {
    let mut seen = Seen::default();
    while !over.load(Ordering::Relaxed) {
        let next = Instant::now() + pause;
        let session = Session::open(address, "app", "prod");
        match session.and_then(|session| Ok(session.close()?)) {
            Ok(()) => seen.served += 1,
            Err(failure) => seen.failures.push(failure),
        }
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    seen
}
