//! Tests as data: a name, the planes it runs on, one check function.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{self, AssertUnwindSafe};
use std::thread;

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};

use crate::host;
use crate::postgres::Postgres;

/// Where gate counts in a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plane {
    /// `--kernel=required`: the maps and programs of the kernel plane.
    Kernel,
    /// `--kernel=off`: the memory of one process.
    Local,
}

impl Plane {
    /// The value of `--kernel`.
    #[must_use]
    pub const fn flag(self) -> &'static str {
        match self {
            Self::Kernel => "required",
            Self::Local => "off",
        }
    }

    const fn label(self) -> &'static str {
        match self {
            Self::Kernel => "kernel",
            Self::Local => "local",
        }
    }
}

/// What a check gets.
#[derive(Clone, Copy)]
pub struct Stage {
    /// The plane to start gate with.
    pub plane: Plane,
    /// The cluster of this run.
    pub postgres: &'static Postgres,
}

/// A test. An error or a panic fails it.
pub type Check = fn(&Stage) -> Result<()>;

struct Test {
    name: String,
    plane: Plane,
    check: Check,
    /// What this machine lacks for it.
    missing: Option<String>,
}

/// A list of tests in the making.
#[derive(Default)]
pub struct Suite {
    tests: Vec<Test>,
    one_at_a_time: bool,
}

impl Suite {
    /// Tests that change the machine, or load it, must not meet each other.
    #[must_use]
    pub fn one_at_a_time() -> Self {
        Self {
            one_at_a_time: true,
            ..Self::default()
        }
    }

    /// A check that holds on both planes.
    pub fn both(&mut self, name: &str, check: Check) {
        self.kernel(name, check);
        self.local(name, check);
    }

    /// A check of the kernel plane.
    pub fn kernel(&mut self, name: &str, check: Check) {
        self.needing(None, Plane::Kernel, name, check);
    }

    /// A check of the local ledger.
    pub fn local(&mut self, name: &str, check: Check) {
        self.needing(None, Plane::Local, name, check);
    }

    /// A check that needs more than its plane does: `missing` is what this machine
    /// lacks of that.
    pub fn needing(&mut self, missing: Option<String>, plane: Plane, name: &str, check: Check) {
        self.tests.push(Test {
            name: name.into(),
            plane,
            check,
            missing,
        });
    }

    /// Runs the tests that the command line selects and ends the process.
    pub fn run(self) -> ! {
        let mut arguments = Arguments::from_args();
        // Most of a test is waiting, but gate and PostgreSQL need CPU too.
        let threads = if self.one_at_a_time { 1 } else { 3 };
        arguments.test_threads.get_or_insert(threads);
        panic::set_hook(Box::new(remember_panic));
        // SAFETY: no other thread runs yet. An error is to tell its place.
        unsafe { std::env::set_var("RUST_LIB_BACKTRACE", "1") };
        let kernel_missing = host::no_kernel_plane();
        if !arguments.list {
            host::remove_leftovers();
        }
        // The server dies with the thread that starts it: this one.
        let postgres = if arguments.list {
            Err("listing".into())
        } else {
            Postgres::shared().map_err(|error| format!("needs PostgreSQL: {error:#}"))
        };
        let trials = self.tests.into_iter().map(|mut test| {
            match (test.plane, &kernel_missing, &postgres) {
                (_, _, Err(reason)) | (Plane::Kernel, Some(reason), _) => {
                    test.missing = Some(reason.clone());
                }
                _ => {}
            }
            trial(test, postgres.as_ref().ok())
        });
        let conclusion = libtest_mimic::run(&arguments, trials.collect());
        if let Ok(postgres) = postgres {
            postgres.stop();
        }
        conclusion.exit();
    }
}

/// Adds a text to what is shown when the test on this thread fails.
pub fn attach(text: String) {
    ATTACHMENTS.with_borrow_mut(|all| all.push(text));
}

thread_local! {
    static ATTACHMENTS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    static PANIC_PLACE: RefCell<Option<String>> = const { RefCell::new(None) };
}

fn trial(test: Test, postgres: Option<&&'static Postgres>) -> Trial {
    let Test {
        name,
        plane,
        check,
        missing,
    } = test;
    let name = format!("{name} [{}]", plane.label());
    match (postgres, missing) {
        (Some(&postgres), None) => {
            Trial::test(name, move || run_one(&Stage { plane, postgres }, check))
        }
        (_, reason) => {
            let reason = reason.unwrap_or_default();
            let kind = reason.clone();
            Trial::test(name, move || {
                Err(Failed::from(format!("skipped: {reason}")))
            })
            .with_kind(kind)
            .with_ignored_flag(!host::in_ci())
        }
    }
}

fn run_one(stage: &Stage, check: Check) -> Result<(), Failed> {
    ATTACHMENTS.take();
    let message = match panic::catch_unwind(AssertUnwindSafe(|| check(stage))) {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => format!("{error:#}{}", places(&error)),
        Err(payload) => {
            let place = PANIC_PLACE.take().unwrap_or_default();
            format!("{}\n  at {place}", panic_text(&*payload))
        }
    };
    let mut all = vec![message];
    all.extend(ATTACHMENTS.take());
    Err(Failed::from(all.join("\n")))
}

/// The lines of the tests that an error came through.
fn places(error: &anyhow::Error) -> String {
    let trace = error.backtrace().to_string();
    let mut places = String::new();
    for line in trace
        .lines()
        .filter(|line| line.contains("/e2e/") || line.contains("/bench/"))
    {
        places.push_str("\n  ");
        places.push_str(line.trim());
    }
    places
}

fn panic_text(payload: &(dyn Any + Send)) -> String {
    payload
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string))
        .unwrap_or_else(|| "panic".into())
}

fn remember_panic(info: &panic::PanicHookInfo<'_>) {
    let place = info.location().map(ToString::to_string);
    PANIC_PLACE.set(place.clone());
    // A helper thread's panic reaches the test only as "a thread panicked".
    if let Some(name) = thread::current().name() {
        let place = place.unwrap_or_default();
        eprintln!("thread {name}: {} at {place}", panic_text(info.payload()));
    }
}
