//! What a process has spent.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

/// CPU time of a process so far, user and system, all of its threads (the dead
/// ones too). Work that the kernel does for it in interrupts is not in it.
///
/// # Errors
/// No such process.
pub fn spent(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let ticks = ticks(&stat).with_context(|| format!("{path} has another form than proc(5)"))?;
    // SAFETY: sysconf takes a number and returns one.
    let per_second = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    Ok(Duration::from_secs_f64(ticks as f64 / per_second as f64))
}

/// `utime + stime`, fields 14 and 15 of proc(5). The command's name before
/// them may itself hold blanks and brackets.
fn ticks(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_ascii_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_may_look_like_fields() {
        let stat = "42 (a) S 9 (b) R 1 2 3 4 5 6 7 8 9 10 70 8 0 0 20";
        assert_eq!(ticks(stat), Some(78));
        assert_eq!(ticks("42 (a) R 1"), None);
    }

    #[test]
    fn this_process_has_spent_what_it_burned() {
        let before = spent(std::process::id()).unwrap();
        let mut waste = 1_u64;
        while spent(std::process::id()).unwrap() - before < Duration::from_millis(20) {
            waste = waste.wrapping_mul(3);
        }
        assert_ne!(waste, 0);
    }
}
