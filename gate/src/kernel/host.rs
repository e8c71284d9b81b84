//! What the host offers: its kernel, its cgroup2 and its bpf file system.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::error::KernelError;
use super::sys;

/// Where bpffs is mounted when there is none.
const BPFFS_DEFAULT: &str = "/sys/fs/bpf";
/// `bpf_map_lookup_percpu_elem` (5.19) and `bpf_set_retval` (5.18) would be
/// enough; older kernels than this are not tested.
const KERNEL_MIN: (u32, u32) = (6, 1);
const KERNEL_MIN_TEXT: &str = "6.1";
/// `CGROUP2_SUPER_MAGIC`, include/uapi/linux/magic.h.
const CGROUP2_MAGIC: i64 = 0x6367_7270;

/// Refuses a kernel that lacks what the programs use.
pub fn check_kernel() -> Result<(), KernelError> {
    let found = read("/proc/sys/kernel/osrelease")?;
    let found = found.trim();
    if release(found).is_some_and(|release| release < KERNEL_MIN) {
        return Err(KernelError::KernelTooOld {
            found: found.to_owned(),
            needed: KERNEL_MIN_TEXT,
        });
    }
    Ok(())
}

/// The mount point of a bpf file system, if there is one.
pub fn find_bpffs() -> Result<Option<PathBuf>, KernelError> {
    Ok(bpffs_of(&read("/proc/self/mountinfo")?))
}

/// The mount point of a bpf file system; mounts one if there is none.
pub fn find_or_mount_bpffs() -> Result<PathBuf, KernelError> {
    if let Some(found) = find_bpffs()? {
        return Ok(found);
    }
    let target = Path::new(BPFFS_DEFAULT);
    sys::mount_bpffs(target).map_err(KernelError::NoBpffs)?;
    Ok(target.to_owned())
}

/// The cgroup2 directory of this process, on unified and hybrid hosts.
pub fn own_cgroup() -> Result<PathBuf, KernelError> {
    let mounts = read("/proc/self/mountinfo")?;
    let membership = read("/proc/self/cgroup")?;
    cgroup_of(&mounts, &membership)
}

/// Refuses a directory that is no cgroup2.
pub fn check_cgroup(path: &Path) -> Result<(), KernelError> {
    match sys::file_system_magic(path) {
        Ok(CGROUP2_MAGIC) => Ok(()),
        _ => Err(KernelError::NotACgroup(path.to_owned())),
    }
}

/// The identity of this boot of the machine.
pub fn boot_id() -> Result<[u8; 16], KernelError> {
    const PATH: &str = "/proc/sys/kernel/random/boot_id";
    let text = read(PATH)?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    u128::from_str_radix(&digits, 16)
        .map(u128::to_be_bytes)
        .map_err(|error| KernelError::io(format!("read {PATH}"), io::Error::other(error)))
}

fn read(path: &str) -> Result<String, KernelError> {
    fs::read_to_string(path).map_err(|error| KernelError::io(format!("read {path}"), error))
}

fn release(text: &str) -> Option<(u32, u32)> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// One line of mountinfo (proc_pid_mountinfo(5)): root, mount point, type.
struct Mount {
    root: String,
    point: PathBuf,
    kind: String,
}

fn mounts(mountinfo: &str) -> impl Iterator<Item = Mount> + '_ {
    mountinfo.lines().filter_map(|line| {
        let (head, tail) = line.split_once(" - ")?;
        let mut head = head.split(' ').skip(3);
        let root = unescape(head.next()?);
        let point = PathBuf::from(unescape(head.next()?));
        let kind = tail.split(' ').next()?.to_owned();
        Some(Mount { root, point, kind })
    })
}

/// Space, tab, newline and backslash come as `\` and three octal digits.
fn unescape(field: &str) -> String {
    ["\\040", "\\011", "\\012", "\\134"]
        .iter()
        .zip([" ", "\t", "\n", "\\"])
        .fold(field.to_owned(), |text, (code, plain)| {
            text.replace(code, plain)
        })
}

fn bpffs_of(mountinfo: &str) -> Option<PathBuf> {
    let all: Vec<PathBuf> = mounts(mountinfo)
        .filter(|mount| mount.kind == "bpf")
        .map(|mount| mount.point)
        .collect();
    let usual = all.iter().find(|point| *point == Path::new(BPFFS_DEFAULT));
    usual.or(all.first()).cloned()
}

fn cgroup_of(mountinfo: &str, membership: &str) -> Result<PathBuf, KernelError> {
    let all: Vec<Mount> = mounts(mountinfo)
        .filter(|mount| mount.kind == "cgroup2")
        .collect();
    // cgroups(7): the line of the v2 hierarchy has number 0 and no controllers.
    let path = membership
        .lines()
        .find_map(|line| line.strip_prefix("0::"))
        .ok_or(KernelError::NoCgroup2)?;
    if all.is_empty() {
        return Err(KernelError::NoCgroup2);
    }
    // A removed cgroup is still named, with this suffix.
    let path = path.strip_suffix(" (deleted)").unwrap_or(path);
    all.iter()
        .find_map(|mount| {
            let below = Path::new(path).strip_prefix(&mount.root).ok()?;
            // "/../x" is a cgroup outside the cgroup namespace.
            let inside = !below.components().any(|part| part.as_os_str() == "..");
            inside.then(|| mount.point.join(below))
        })
        .ok_or_else(|| KernelError::CgroupHidden {
            path: path.to_owned(),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIFIED: &str = "\
25 1 0:24 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate
26 1 0:25 / /sys/fs/bpf rw,nosuid shared:5 - bpf bpf rw,mode=700
";
    const HYBRID: &str = "\
30 29 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
31 29 0:27 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
";
    const CONTAINER: &str = "40 1 0:24 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw\n";

    #[test]
    fn own_cgroup_is_found_on_unified_hybrid_and_container_hosts() {
        let table = [
            (
                UNIFIED,
                "0::/system.slice/gate.service\n",
                "/sys/fs/cgroup/system.slice/gate.service",
            ),
            (UNIFIED, "0::/\n", "/sys/fs/cgroup"),
            (HYBRID, "4:memory:/x\n0::/y\n", "/sys/fs/cgroup/unified/y"),
            (CONTAINER, "0::/docker/abc/sub\n", "/sys/fs/cgroup/sub"),
        ];
        for (mounts, membership, expected) in table {
            let found = cgroup_of(mounts, membership).expect(membership);
            assert_eq!(found, Path::new(expected));
        }
    }

    #[test]
    fn a_cgroup_that_no_mount_shows_is_said_so() {
        let hidden = [(CONTAINER, "0::/other\n"), (UNIFIED, "0::/../other\n")];
        for (mounts, membership) in hidden {
            let found = cgroup_of(mounts, membership);
            assert!(
                matches!(found, Err(KernelError::CgroupHidden { .. })),
                "{found:?}"
            );
        }
        let v1 = cgroup_of("1 1 0:1 / /c rw - cgroup c rw\n", "1:cpu:/\n");
        assert!(matches!(v1, Err(KernelError::NoCgroup2)));
    }

    #[test]
    fn the_usual_bpffs_wins_over_others() {
        assert_eq!(bpffs_of(UNIFIED), Some(PathBuf::from("/sys/fs/bpf")));
        assert_eq!(bpffs_of(HYBRID), None);
        let other = "50 1 0:30 / /my\\040bpf rw - bpf none rw\n";
        assert_eq!(bpffs_of(other), Some(PathBuf::from("/my bpf")));
        let both = format!("{other}{UNIFIED}");
        assert_eq!(bpffs_of(&both), Some(PathBuf::from("/sys/fs/bpf")));
    }

    #[test]
    fn releases_are_compared_as_numbers() {
        assert_eq!(release("6.18.44-fc"), Some((6, 18)));
        assert_eq!(release("5.10.0-21-amd64"), Some((5, 10)));
        assert!(release("6.1.0").is_some_and(|found| found >= KERNEL_MIN));
        assert_eq!(release("unknown"), None);
    }
}
