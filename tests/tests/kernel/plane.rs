//! Loading, pinning, replacing, and the cgroups in between.

use std::fs;
use std::net::TcpStream;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use gate::kernel::{KernelError, Maps, Plane, PlaneOptions, unpin};
use gate_common::abi::{NameKey, NameKind, SCHEMA, SlotRef, map};
use gate_common::errno::AdmitErrno;
use gate_tests::kernel::counted::{Counted, Counts, TOTAL, admit, settles, start, used};
use gate_tests::kernel::jail;

use crate::Test;

pub const TESTS: &[Test] = &[
    ("plane_starts_and_its_probe_is_counted", starts),
    (
        "replacing_the_programs_with_30_open_connections_keeps_the_count",
        replaces,
    ),
    ("pins_count_and_release_while_no_gate_runs", outlives),
    (
        "unpinned_programs_are_gone_and_a_new_instance_is_new",
        unpins,
    ),
    ("a_pinned_map_of_another_shape_is_refused", other_shape),
    ("links_in_nested_cgroups_count_once", nested),
    (
        "a_gate_in_a_new_cgroup_keeps_the_old_one_counted_until_it_is_gone",
        moved,
    ),
    ("l8_a_gate_outside_the_cgroup_is_told_so", outside),
    (
        "bad_names_and_missing_instances_are_told_apart",
        names_of_instances,
    ),
    ("names_are_inserted_once_and_listed", names),
];

const ANY: &str = "127.0.0.1:0";
const ABSENT: SlotRef = SlotRef::ABSENT;

fn starts() -> Result<()> {
    let plane = start("first")?;
    plane.probe()?;
    let maps = Maps::open("first")?;
    ensure!(
        maps.meta() == plane.maps().meta(),
        "gatectl sees another instance"
    );
    ensure!(maps.meta().instance != 0, "the instance has no identity");
    Ok(())
}

fn pair_admitted(maps: &Maps, listener: &Counted) -> Result<(TcpStream, TcpStream)> {
    let (client, server) = listener.pair()?;
    admit(maps, server.as_fd(), [TOTAL, ABSENT, ABSENT, ABSENT])
        .map_err(|refusal| anyhow::anyhow!("refused: {refusal:?}"))?;
    Ok((client, server))
}

fn admitted(count: u32) -> Counts {
    Counts {
        sockets: i64::from(count),
        admitted: u64::from(count),
        ..Counts::NONE
    }
}

/// The pins of an instance that are links.
fn links(instance: &str) -> Result<Vec<String>> {
    let mut names: Vec<String> = fs::read_dir(pin_directory(instance))?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    names.retain(|name| name.starts_with("gate_"));
    names.sort();
    Ok(names)
}

fn pin_directory(instance: &str) -> PathBuf {
    PathBuf::from(format!("/sys/fs/bpf/gate/{instance}/v{SCHEMA}"))
}

fn replaces() -> Result<()> {
    let first = start("replaced")?;
    let maps = first.maps();
    let listener = Counted::new(&first, 0, ANY)?;
    let mut pairs = Vec::new();
    for _ in 0..30 {
        pairs.push(pair_admitted(&maps, &listener)?);
    }
    listener.settles(admitted(30))?;
    let before = links("replaced")?;
    drop(first);
    let second = start("replaced")?;
    ensure!(
        links("replaced")? == before,
        "{:?}, before {before:?}",
        links("replaced")?
    );
    ensure!(second.maps().meta() == maps.meta(), "another instance");
    listener.settles(admitted(30))?;
    pairs.truncate(20);
    listener.settles(admitted(20))?;
    for _ in 0..10 {
        pairs.push(pair_admitted(&second.maps(), &listener)?);
    }
    listener.settles(admitted(30))?;
    ensure!(used(&maps, 0) == 30, "{} slots", used(&maps, 0));
    drop(pairs);
    listener.settles(Counts::NONE)?;
    ensure!(used(&maps, 0) == 0, "{} slots", used(&maps, 0));
    Ok(())
}

fn outlives() -> Result<()> {
    let plane = start("outlives")?;
    let listener = Counted::new(&plane, 0, ANY)?;
    let maps = plane.maps();
    let old = pair_admitted(&maps, &listener)?;
    drop(plane);
    let new = pair_admitted(&maps, &listener)?;
    listener.settles(admitted(2))?;
    drop((old, new));
    listener.settles(Counts::NONE)
}

fn unpins() -> Result<()> {
    let plane = start("unpinned")?;
    let old_maps = plane.maps();
    let listener = Counted::new(&plane, 0, ANY)?;
    let _open = listener.pair()?;
    listener.settles(Counts::pending(1))?;
    drop(plane);
    unpin("unpinned")?;
    unpin("unpinned")?;
    ensure!(
        !Path::new("/sys/fs/bpf/gate").exists(),
        "directories are left"
    );
    ensure!(
        matches!(Maps::open("unpinned"), Err(KernelError::NoInstance { .. })),
        "an unpinned instance opens"
    );
    let plane = start("unpinned")?;
    let maps = plane.maps();
    ensure!(
        maps.meta().instance != old_maps.meta().instance,
        "the same identity"
    );
    // The old listener carries the old instance's tag only.
    let (_client, server) = listener.pair()?;
    let answer = admit(&maps, server.as_fd(), [TOTAL, ABSENT, ABSENT, ABSENT]);
    ensure!(answer == Err(AdmitErrno::NotOurs), "{answer:?}");
    settles(&maps, 0, Counts::NONE)
}

fn other_shape() -> Result<()> {
    let directory = pin_directory("shape");
    fs::create_dir_all(&directory)?;
    // As SLOTS is, with values of 16 bytes instead of 8.
    pin_array(&directory.join(map::SLOTS), 16, 16_384, 1 << 10)?;
    let refused = Plane::start(&PlaneOptions {
        instance: "shape".into(),
        cgroup: None,
    });
    let error = refused.err().context("a map of another shape was taken")?;
    ensure!(
        matches!(
            error,
            KernelError::Shape {
                map: map::SLOTS,
                ..
            }
        ),
        "{error}"
    );
    let text = error.to_string();
    for part in [
        "SLOTS",
        "16 value bytes",
        "8 value bytes",
        "/sys/fs/bpf/gate/shape",
    ] {
        ensure!(text.contains(part), "`{text}` does not name {part}");
    }
    ensure!(!error.is_unavailable(), "would go on without saying so");
    Ok(())
}

/// Makes an array map and pins it.
fn pin_array(path: &Path, value_bytes: u32, entries: u32, flags: u32) -> Result<()> {
    const BPF_MAP_CREATE: libc::c_long = 0;
    const BPF_OBJ_PIN: libc::c_long = 6;
    const BPF_MAP_TYPE_ARRAY: u32 = 2;
    let map = bpf(
        BPF_MAP_CREATE,
        &[BPF_MAP_TYPE_ARRAY, 4, value_bytes, entries, flags],
    )?;
    // SAFETY: a new descriptor that nobody else knows.
    let map = unsafe { OwnedFd::from_raw_fd(i32::try_from(map)?) };
    let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes())?;
    let pointer = path.as_ptr() as u64;
    let fd = u64::from(map.as_raw_fd().cast_unsigned());
    bpf(BPF_OBJ_PIN, &[pointer, fd]).map(drop)
}

fn bpf<T>(command: libc::c_long, attr: &[T]) -> Result<libc::c_long> {
    // SAFETY: the attributes and their size; both commands take this head.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attr.as_ptr(), size_of_val(attr)) };
    ensure!(
        result >= 0,
        "bpf({command}): {}",
        std::io::Error::last_os_error()
    );
    Ok(result)
}

fn cgroup_below(parent: &Path, name: &str) -> Result<PathBuf> {
    let path = parent.join(name);
    fs::create_dir(&path)?;
    Ok(path)
}

fn start_in(instance: &str, cgroup: &Path) -> Result<Plane> {
    Ok(Plane::start(&PlaneOptions {
        instance: instance.into(),
        cgroup: Some(cgroup.to_owned()),
    })?)
}

fn nested() -> Result<()> {
    let outer = jail::own_cgroup()?;
    let inner = cgroup_below(&outer, "inner")?;
    jail::join(&inner)?;
    drop(start_in("nested", &inner)?);
    let plane = start_in("nested", &outer)?;
    ensure!(links("nested")?.len() == 6, "{:?}", links("nested")?);
    let maps = plane.maps();
    let listener = Counted::new(&plane, 0, ANY)?;
    let mut pairs = Vec::new();
    for done in 1..=10 {
        pairs.push(pair_admitted(&maps, &listener)?);
        listener.settles(admitted(done))?;
        ensure!(
            used(&maps, 0) == done,
            "{} slots for {done}",
            used(&maps, 0)
        );
    }
    // A refusal by the inner link's program is not asked again by the outer's.
    let again = admit(&maps, pairs[0].1.as_fd(), [TOTAL, ABSENT, ABSENT, ABSENT]);
    ensure!(again == Err(AdmitErrno::Already), "{again:?}");
    drop(pairs);
    listener.settles(Counts::NONE)?;
    ensure!(used(&maps, 0) == 0, "{} slots", used(&maps, 0));
    Ok(())
}

fn moved() -> Result<()> {
    let parent = jail::own_cgroup()?;
    let (old, new) = (cgroup_below(&parent, "old")?, cgroup_below(&parent, "new")?);
    jail::join(&old)?;
    let plane = start("moved")?;
    let maps = plane.maps();
    let old_listener = Counted::new(&plane, 0, ANY)?;
    let old_pair = pair_admitted(&maps, &old_listener)?;
    jail::join(&new)?;
    let plane = start("moved")?;
    ensure!(links("moved")?.len() == 6, "{:?}", links("moved")?);
    let new_listener = Counted::new(&plane, 1, ANY)?;
    let _new_pair = pair_admitted(&maps, &new_listener)?;
    new_listener.settles(admitted(1))?;
    // The old cgroup is removed, its sockets live on and are counted.
    fs::remove_dir(&old)?;
    let plane = start("moved")?;
    let more = pair_admitted(&plane.maps(), &old_listener)?;
    old_listener.settles(admitted(2))?;
    drop((old_pair, more));
    old_listener.settles(Counts::NONE)?;
    drop(old_listener);
    // The kernel lets go of the cgroup a moment later.
    for _ in 0..20 {
        drop(start("moved")?);
        if links("moved")?.len() == 3 {
            return new_listener.settles(admitted(1));
        }
        thread::sleep(Duration::from_millis(100));
    }
    anyhow::bail!("links of a cgroup that is gone stay: {:?}", links("moved")?);
}

fn outside() -> Result<()> {
    let own = jail::own_cgroup()?;
    let elsewhere = cgroup_below(&own, "elsewhere")?;
    let inside = cgroup_below(&own, "inside")?;
    jail::join(&inside)?;
    let error = start_in("outside", &elsewhere)
        .err()
        .context("nobody noticed")?;
    let error = error.downcast::<KernelError>()?;
    ensure!(matches!(error, KernelError::Probe(_)), "{error}");
    ensure!(error.is_unavailable(), "auto could not go on");
    ensure!(
        !Path::new("/sys/fs/bpf/gate").exists(),
        "half an instance is left"
    );
    let missing = start_in("outside", Path::new("/proc"))
        .err()
        .context("no cgroup")?;
    let missing = missing.downcast::<KernelError>()?;
    ensure!(matches!(missing, KernelError::NotACgroup(_)), "{missing}");
    Ok(())
}

fn names_of_instances() -> Result<()> {
    for bad in ["", "a.b", "../x", "Ü"] {
        let error = start(bad).err().context("a bad name was taken")?;
        let error = error.downcast::<KernelError>()?;
        ensure!(matches!(error, KernelError::BadInstance(_)), "{error}");
    }
    let none = Maps::open("nobody").err().context("nobody's maps")?;
    ensure!(matches!(none, KernelError::NoInstance { .. }), "{none}");
    unpin("nobody")?;
    Ok(())
}

fn names() -> Result<()> {
    let plane = start("names")?;
    let (maps, other) = (plane.maps(), Maps::open("names")?);
    let key = NameKey::new(NameKind::User, b"app\xff");
    let (first, second) = (
        SlotRef {
            index: 16,
            generation: 1,
        },
        SlotRef {
            index: 17,
            generation: 1,
        },
    );
    ensure!(maps.name_get(&key)?.is_none(), "a name from nowhere");
    ensure!(maps.name_insert(&key, first)?, "the first is not inserted");
    ensure!(
        !other.name_insert(&key, second)?,
        "a name is inserted twice"
    );
    ensure!(other.name_get(&key)? == Some(first), "the second won");
    ensure!(other.names()? == [(key, first)], "{:?}", other.names()?);
    other.name_remove(&key)?;
    other.name_remove(&key)?;
    ensure!(maps.names()?.is_empty(), "a removed name stays");
    Ok(())
}
