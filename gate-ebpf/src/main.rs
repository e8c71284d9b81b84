//! gate's kernel programs.
//!
//! | program | hook | job |
//! |---|---|---|
//! | `gate_sockops` | sock_ops on a cgroup | one token of the listener's ceiling from ESTABLISHED to CLOSE |
//! | `gate_admit` | cgroup/setsockopt | takes the slots that a startup packet needs, all or none |
//! | `gate_release` | cgroup/sock_release | gives them back when the last fd is closed |
//! | `gate_steer` | sk_reuseport on gate's listeners | resets SYNs while far over the ceiling, else chooses the worker |
//!
//! A program reads, calls a rule of `gate-common`, and writes: nothing is
//! decided here that the host cannot test.
//!
//! Two links in nested cgroups run a program twice for one event, and two
//! instances in one cgroup both see each socket. So every program acts only on
//! sockets that carry its own instance's tag, and each is idempotent.
#![no_std]
#![no_main]
#![allow(
    missing_docs,
    reason = "the program macros drop the comments of what they wrap"
)]
#![allow(
    internal_features,
    reason = "core has no atomic read-modify-write for BPF"
)]
#![feature(asm_experimental_arch, core_intrinsics)]

mod maps;
mod word;

use core::arch::asm;

use aya_ebpf::EbpfContext as _;
use aya_ebpf::Global;
use aya_ebpf::bindings::{
    BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB, BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG,
    BPF_TCP_CLOSE, sk_action,
};
use aya_ebpf::cty::c_void;
use aya_ebpf::helpers::generated::bpf_set_retval;
use aya_ebpf::macros::{cgroup_sock, cgroup_sockopt, sk_reuseport, sock_ops};
use aya_ebpf::programs::{SkReuseportContext, SockContext, SockOpsContext, SockoptContext};
use aya_log_ebpf::warn;
use gate_common::abi::{AdmitRequest, SO_GATE_ADMIT, SOL_GATE};
use gate_common::errno::AdmitErrno;
use gate_common::record::{self, SocketRecord};
use gate_common::steer;
use gate_common::word::Word as _;

use crate::maps::{
    LISTENER_STATE, LISTENER_TAGS, ListenerCells, META, Maps, RECORDS, WORKER_LOADS,
    WORKER_SOCKETS, gate_ceiling,
};
use crate::word::MapWord;

/// Which listener this load of `gate_steer` serves; set by the loader.
#[unsafe(no_mangle)]
static STEER_LISTENER: Global<u32> = Global::new(0);

/// How many workers this load of `gate_steer` chooses from; fewer than two
/// leave the choice to the kernel. Set by the loader.
#[unsafe(no_mangle)]
static STEER_WORKERS: Global<u32> = Global::new(0);

/// Counts a socket of gate's listeners.
#[sock_ops]
pub fn gate_sockops(ctx: SockOpsContext) -> u32 {
    // SAFETY: the kernel passes a valid context; null for a request socket.
    let socket: *mut c_void = unsafe { (*ctx.ops).__bindgen_anon_2.sk.cast() };
    if !socket.is_null() {
        match ctx.op() {
            BPF_SOCK_OPS_PASSIVE_ESTABLISHED_CB => established(&ctx, socket),
            BPF_SOCK_OPS_STATE_CB if ctx.arg(1) == BPF_TCP_CLOSE => closed(socket),
            _ => {}
        }
    }
    1
}

#[inline(always)]
fn established(ctx: &SockOpsContext, socket: *mut c_void) {
    // SAFETY: a checked socket of a sock_ops context.
    let Some(tag) = (unsafe { LISTENER_TAGS.get(socket) }) else {
        return;
    };
    let Some(state) = LISTENER_STATE.get(tag.listener) else {
        return;
    };
    // SAFETY: as above.
    if unsafe { RECORDS.get(socket) }.is_some() {
        return;
    }
    let mut first = new_record(tag.listener);
    // SAFETY: as above.
    let Some(record) = (unsafe { RECORDS.get_or_create(socket, &mut first) }) else {
        state.unrecorded_total.fetch_add(1);
        state.over_total.fetch_add(1);
        warn!(
            ctx,
            "no memory for the record of a socket of listener {}: treated as over", tag.listener
        );
        return;
    };
    let flags = ctx.cb_flags() | BPF_SOCK_OPS_STATE_CB_FLAG;
    if ctx.set_cb_flags(flags.cast_signed()).is_err() {
        // Without the flag no close event would give a token back: it gets
        // none, and no gauge counts it.
        record.state.fetch_or(record::OVER);
        state.over_total.fetch_add(1);
        state.errors.fetch_add(1);
        return;
    }
    let cells = ListenerCells(tag.listener);
    record::established(record, state, &cells, || gate_ceiling(tag.listener));
}

#[inline(always)]
const fn new_record(listener: u32) -> SocketRecord<MapWord> {
    SocketRecord {
        state: MapWord::new(0),
        listener,
        reserved: 0,
        slots: [const { MapWord::new(0) }; 4],
    }
}

#[inline(always)]
fn closed(socket: *mut c_void) {
    // SAFETY: a checked socket of a sock_ops context.
    if let Some(record) = unsafe { RECORDS.get(socket) }
        && let Some(state) = LISTENER_STATE.get(record.listener)
    {
        record::closed(record, state, &ListenerCells(record.listener));
    }
}

/// Takes slots, under the socket's lock.
#[cgroup_sockopt(setsockopt)]
pub fn gate_admit(ctx: SockoptContext) -> i32 {
    const UNTOUCHED: i32 = 1;
    const REFUSED: i32 = 0;
    let Some(answer) = admit(&ctx) else {
        return UNTOUCHED;
    };
    // The option ends here: neither the protocol nor a second link's program
    // sees it.
    // SAFETY: the kernel passes a valid context, and this field is writable.
    unsafe { (*ctx.sockopt).optlen = -1 };
    match answer {
        Ok(()) => UNTOUCHED,
        Err(errno) => {
            // SAFETY: a helper that takes a number.
            unsafe { bpf_set_retval(-errno.code()) };
            REFUSED
        }
    }
}

/// `None` if the call is not for this instance or this socket is not its own.
#[inline(always)]
fn admit(ctx: &SockoptContext) -> Option<Result<(), AdmitErrno>> {
    // SAFETY: the kernel passes a valid context.
    let (level, option, length) = unsafe {
        (
            (*ctx.sockopt).level,
            (*ctx.sockopt).optname,
            (*ctx.sockopt).optlen,
        )
    };
    if level != SOL_GATE || option != SO_GATE_ADMIT || length != size_of::<AdmitRequest>() as i32 {
        return None;
    }
    let request = read_request(ctx)?;
    if request.instance == 0 || request.instance != META.get(0)?.instance {
        return None;
    }
    // SAFETY: the kernel passes a valid context, whose socket is never null.
    let socket: *mut c_void = unsafe { (*ctx.sockopt).__bindgen_anon_1.sk.cast() };
    // SAFETY: as above.
    let tag = unsafe { LISTENER_TAGS.get(socket) }?;
    // SAFETY: as above.
    let Some(record) = (unsafe { RECORDS.get(socket) }) else {
        return Some(Err(AdmitErrno::Over));
    };
    let state = LISTENER_STATE.get(tag.listener)?;
    Some(record::admit(record, state, &Maps, &request.slots).answer())
}

#[inline(always)]
fn read_request(ctx: &SockoptContext) -> Option<AdmitRequest> {
    let (start, end): (*const AdmitRequest, *const u8);
    // SAFETY: two loads from the context. By asm, because the compiler would
    // otherwise derive one address from the other, which the verifier refuses
    // ("dereference of modified ctx ptr").
    unsafe {
        asm!(
            "{start} = *(u64 *)({ctx} + 8)",
            "{end} = *(u64 *)({ctx} + 16)",
            ctx = in(reg) ctx.as_ptr(),
            start = out(reg) start,
            end = out(reg) end,
        );
    }
    if start.wrapping_add(1).cast::<u8>() > end {
        return None;
    }
    // SAFETY: just checked to lie inside the option's kernel copy, which no
    // other thread writes.
    Some(unsafe { start.read() })
}

/// Gives the slots back when the last fd is closed.
#[cgroup_sock(sock_release)]
pub fn gate_release(ctx: SockContext) -> i32 {
    // SAFETY: this program type passes its context as the socket.
    if let Some(record) = unsafe { RECORDS.get(ctx.as_ptr()) }
        && let Some(state) = LISTENER_STATE.get(record.listener)
    {
        record::released(record, state, &Maps);
    }
    1
}

/// Resets a SYN while too many sockets are over the ceiling; else sends it to
/// the less loaded of two workers.
#[sk_reuseport]
pub fn gate_steer(ctx: SkReuseportContext) -> u32 {
    if is_far_over(STEER_LISTENER.load()) {
        return sk_action::SK_DROP;
    }
    choose_worker(&ctx);
    // Without a choice of ours the kernel makes one.
    sk_action::SK_PASS
}

#[inline(always)]
fn is_far_over(listener: u32) -> bool {
    let Some(state) = LISTENER_STATE.get(listener) else {
        return false;
    };
    let Some(headroom) = Maps.over_headroom(listener) else {
        return false;
    };
    if state.over.load() < headroom {
        return false;
    }
    state.reset_total.fetch_add(1);
    true
}

#[inline(always)]
fn choose_worker(ctx: &SkReuseportContext) {
    let workers = STEER_WORKERS.load();
    if workers < 2 {
        return;
    }
    let [first, second] = steer::candidates(ctx.hash(), workers);
    let (Some(first_load), Some(second_load)) = (WORKER_LOADS.get(first), WORKER_LOADS.get(second))
    else {
        return;
    };
    if steer::takes_second(first_load.now(), second_load.now()) {
        if WORKER_SOCKETS.select_reuseport(ctx, second).is_ok() {
            second_load.send();
        }
    } else if WORKER_SOCKETS.select_reuseport(ctx, first).is_ok() {
        first_load.send();
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // The verifier refuses an endless loop: an object that loads has none.
    loop {}
}

/// No helper used here is reserved to GPL programs.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 18] = *b"MIT OR Apache-2.0\0";
