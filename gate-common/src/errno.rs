//! How the answer to an [`AdmitRequest`](crate::abi::AdmitRequest) crosses
//! from the kernel: as the errno of the `setsockopt` call.

use crate::abi::SlotKind;
use crate::record::Verdict;
use crate::slots::Denial;

/// Why `SO_GATE_ADMIT` took no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdmitErrno {
    /// The socket is over its listener's ceiling, or has no record.
    Over,
    /// The limit of this kind is reached.
    Full(SlotKind),
    /// A slot has another owner by now: look the name up again.
    Stale,
    /// The socket holds slots already.
    Already,
    /// The request names a slot that does not exist.
    Unknown,
    /// Too many lost exchanges: ask again.
    Contended,
    /// No program of this instance acts on this socket.
    NotOurs,
    /// An errno that gate's program never gives.
    Other(i32),
}

// asm-generic/errno-base.h and errno.h: the numbers of every architecture
// that gate runs on. This crate has no libc, and BPF has none either.
const EINTR: i32 = 4;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const ENFILE: i32 = 23;
const EUSERS: i32 = 87;
const ENOPROTOOPT: i32 = 92;
const ENOBUFS: i32 = 105;
const EALREADY: i32 = 114;
const ESTALE: i32 = 116;
const EDQUOT: i32 = 122;

impl AdmitErrno {
    /// The positive errno.
    #[inline(always)]
    #[must_use]
    pub const fn code(self) -> i32 {
        match self {
            Self::Over => EUSERS,
            Self::Full(SlotKind::Total) => ENFILE,
            Self::Full(SlotKind::User) => EBUSY,
            // Not EAGAIN: io_uring would run the request a second time on a
            // worker thread (io_uring/io_uring.c, io_queue_async).
            Self::Full(SlotKind::Database) => EDQUOT,
            Self::Full(SlotKind::Backend) => ENOBUFS,
            Self::Stale => ESTALE,
            Self::Already => EALREADY,
            Self::Unknown => EINVAL,
            Self::Contended => EINTR,
            Self::NotOurs => ENOPROTOOPT,
            Self::Other(code) => code,
        }
    }

    /// What a positive errno of the call means.
    #[must_use]
    pub const fn from_code(code: i32) -> Self {
        match code {
            EUSERS => Self::Over,
            ENFILE => Self::Full(SlotKind::Total),
            EBUSY => Self::Full(SlotKind::User),
            EDQUOT => Self::Full(SlotKind::Database),
            ENOBUFS => Self::Full(SlotKind::Backend),
            ESTALE => Self::Stale,
            EALREADY => Self::Already,
            EINVAL => Self::Unknown,
            EINTR => Self::Contended,
            ENOPROTOOPT => Self::NotOurs,
            other => Self::Other(other),
        }
    }
}

impl From<Result<(), AdmitErrno>> for Verdict {
    /// The verdict that userspace acts on. A socket that no program owns is
    /// not counted by anybody, so it must not be let in: it is over.
    fn from(answer: Result<(), AdmitErrno>) -> Self {
        match answer {
            Ok(()) => Self::Admitted,
            Err(AdmitErrno::Over | AdmitErrno::NotOurs | AdmitErrno::Other(_)) => Self::Over,
            Err(AdmitErrno::Already) => Self::Already,
            Err(AdmitErrno::Full(kind)) => Self::Denied(Denial::Full(kind)),
            Err(AdmitErrno::Stale) => Self::Denied(Denial::Stale),
            Err(AdmitErrno::Unknown) => Self::Denied(Denial::Unknown),
            Err(AdmitErrno::Contended) => Self::Denied(Denial::Contended),
        }
    }
}

impl Verdict {
    /// The verdict as the `setsockopt` call answers it.
    ///
    /// # Errors
    /// Everything but [`Verdict::Admitted`].
    #[inline(always)]
    pub const fn answer(self) -> Result<(), AdmitErrno> {
        match self {
            Self::Admitted => Ok(()),
            Self::Over => Err(AdmitErrno::Over),
            Self::Already => Err(AdmitErrno::Already),
            Self::Denied(Denial::Full(kind)) => Err(AdmitErrno::Full(kind)),
            Self::Denied(Denial::Stale) => Err(AdmitErrno::Stale),
            Self::Denied(Denial::Unknown) => Err(AdmitErrno::Unknown),
            Self::Denied(Denial::Contended) => Err(AdmitErrno::Contended),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: [(AdmitErrno, i32); 10] = [
        (AdmitErrno::Over, 87),
        (AdmitErrno::Full(SlotKind::Total), 23),
        (AdmitErrno::Full(SlotKind::User), 16),
        (AdmitErrno::Full(SlotKind::Database), 122),
        (AdmitErrno::Full(SlotKind::Backend), 105),
        (AdmitErrno::Stale, 116),
        (AdmitErrno::Already, 114),
        (AdmitErrno::Unknown, 22),
        (AdmitErrno::Contended, 4),
        (AdmitErrno::NotOurs, 92),
    ];

    #[test]
    fn each_answer_has_its_own_errno_and_comes_back_as_itself() {
        for (answer, code) in TABLE {
            assert_eq!(answer.code(), code, "{answer:?}");
            assert_eq!(AdmitErrno::from_code(code), answer, "errno {code}");
        }
        assert_eq!(AdmitErrno::from_code(1), AdmitErrno::Other(1));
    }

    #[test]
    fn a_verdict_survives_the_crossing() {
        let verdicts = [
            Verdict::Admitted,
            Verdict::Over,
            Verdict::Already,
            Verdict::Denied(Denial::Full(SlotKind::Total)),
            Verdict::Denied(Denial::Full(SlotKind::User)),
            Verdict::Denied(Denial::Full(SlotKind::Database)),
            Verdict::Denied(Denial::Full(SlotKind::Backend)),
            Verdict::Denied(Denial::Stale),
            Verdict::Denied(Denial::Unknown),
            Verdict::Denied(Denial::Contended),
        ];
        for verdict in verdicts {
            let code = verdict.answer().map_err(AdmitErrno::code);
            let back = code.map_err(AdmitErrno::from_code);
            assert_eq!(Verdict::from(back), verdict);
        }
    }

    #[test]
    fn no_answer_makes_io_uring_retry_on_a_worker_thread() {
        const EAGAIN: i32 = 11;
        assert!(TABLE.iter().all(|(answer, _)| answer.code() != EAGAIN));
    }
}
