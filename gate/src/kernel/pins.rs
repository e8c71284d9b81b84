//! Where an instance's maps and links are pinned, and what they must look like.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use aya::maps::{MapInfo, MapType};
use gate_common::abi::{
    self, ListenerState, ListenerTag, Meta, NameKey, SlotRef, SocketRecord, map,
};
use gate_common::limit::LimitWords;

use super::error::KernelError;
use super::host;

// include/uapi/linux/bpf.h, flags of BPF_MAP_CREATE.
const BPF_F_NO_PREALLOC: u32 = 1;
const BPF_F_CLONE: u32 = 1 << 9;
const BPF_F_MMAPABLE: u32 = 1 << 10;

/// The directory that holds the pins of one instance and schema.
#[derive(Clone, Debug)]
pub struct PinDirectory {
    instance: PathBuf,
    schema: PathBuf,
}

impl PinDirectory {
    /// The directory of an instance below a bpf file system.
    pub fn new(bpffs: &Path, instance: &str) -> Result<Self, KernelError> {
        if !is_instance_name(instance) {
            return Err(KernelError::BadInstance(instance.to_owned()));
        }
        let instance = bpffs.join("gate").join(instance);
        let schema = instance.join(format!("v{}", abi::SCHEMA));
        Ok(Self { instance, schema })
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.schema
    }

    /// The directory of the instance, over those of its schemas.
    pub fn instance(&self) -> &Path {
        &self.instance
    }

    /// Where a map or link is pinned.
    pub fn join(&self, name: &str) -> PathBuf {
        self.schema.join(name)
    }

    /// Whether a map or link is pinned.
    pub fn has(&self, name: &str) -> Result<bool, KernelError> {
        exists(&self.join(name))
    }

    /// Makes the directory, for root alone.
    pub fn create(&self) -> Result<(), KernelError> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.schema)
            .map_err(|error| KernelError::io(format!("create {}", self.schema.display()), error))
    }

    /// Removes this directory, and those over it that are empty then.
    pub fn remove_all(&self) -> io::Result<()> {
        fs::remove_dir_all(&self.schema)?;
        for above in self.schema.ancestors().skip(1).take(2) {
            fs::remove_dir(above)?;
        }
        Ok(())
    }

    /// Refuses pinned maps of another shape: the kernel and aya would take
    /// them silently. A map that is not pinned is no fault.
    pub fn check_shapes(&self) -> Result<(), KernelError> {
        for shape in SHAPES {
            let path = self.join(shape.map);
            if !exists(&path)? {
                continue;
            }
            let info =
                MapInfo::from_pin(&path).map_err(|error| KernelError::map(shape.map, &error))?;
            let found = Shape::of(shape.map, &info);
            if found != shape {
                return Err(KernelError::Shape {
                    map: shape.map,
                    expected: shape.to_string(),
                    found: found.to_string(),
                    pins: self.instance.clone(),
                });
            }
        }
        Ok(())
    }

    /// Names of the pins that begin with `prefix`.
    pub fn names(&self, prefix: &str) -> Result<Vec<String>, KernelError> {
        let reading = || format!("read {}", self.schema.display());
        let entries =
            fs::read_dir(&self.schema).map_err(|error| KernelError::io(reading(), error))?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|error| KernelError::io(reading(), error))?;
            if let Ok(name) = entry.file_name().into_string()
                && name.starts_with(prefix)
            {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Removes one pin.
    pub fn remove(&self, name: &str) -> Result<(), KernelError> {
        let path = self.join(name);
        fs::remove_file(&path)
            .map_err(|error| KernelError::io(format!("remove {}", path.display()), error))
    }
}

/// Removes all pins of an instance, of every schema: its programs are detached
/// and its counts are gone. No fault if there are none.
///
/// # Errors
/// A bad name, or a directory that cannot be removed.
pub fn unpin(instance: &str) -> Result<(), KernelError> {
    if !is_instance_name(instance) {
        return Err(KernelError::BadInstance(instance.to_owned()));
    }
    let Some(bpffs) = host::find_bpffs()? else {
        return Ok(());
    };
    let pins = PinDirectory::new(&bpffs, instance)?.instance;
    match fs::remove_dir_all(&pins) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(KernelError::io(format!("remove {}", pins.display()), error));
        }
        _ => {}
    }
    // Goes too if this was the last instance; stays if it was not.
    let _ = fs::remove_dir(bpffs.join("gate"));
    Ok(())
}

fn is_instance_name(name: &str) -> bool {
    let allowed = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_');
    (1..=32).contains(&name.len()) && name.bytes().all(allowed)
}

fn exists(path: &Path) -> Result<bool, KernelError> {
    path.try_exists()
        .map_err(|error| KernelError::io(format!("look at {}", path.display()), error))
}

/// What MapInfo must say of a map.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Shape {
    map: &'static str,
    kind: Option<MapType>,
    key_bytes: u32,
    value_bytes: u32,
    entries: u32,
    flags: u32,
}

impl Shape {
    const fn new(
        map: &'static str,
        kind: MapType,
        key_and_value_bytes: (usize, usize),
        entries: u32,
        flags: u32,
    ) -> Self {
        Self {
            map,
            kind: Some(kind),
            key_bytes: key_and_value_bytes.0 as u32,
            value_bytes: key_and_value_bytes.1 as u32,
            entries,
            flags,
        }
    }

    fn of(map: &'static str, info: &MapInfo) -> Self {
        Self {
            map,
            kind: info.map_type().ok(),
            key_bytes: info.key_size(),
            value_bytes: info.value_size(),
            entries: info.max_entries(),
            flags: info.map_flags(),
        }
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.kind {
            Some(kind) => write!(f, "type {kind:?}")?,
            None => write!(f, "an unknown type")?,
        }
        write!(
            f,
            ", {} key bytes, {} value bytes, {} entries, flags {:#x}",
            self.key_bytes, self.value_bytes, self.entries, self.flags
        )
    }
}

const SHAPES: [Shape; 9] = {
    use abi::{LISTENERS_MAX, SLOTS_MAX};
    const INDEX: usize = size_of::<u32>();
    const WORD: usize = size_of::<u64>();
    const LIMIT: usize = size_of::<LimitWords<u64>>();
    const STATE: usize = size_of::<ListenerState<u64>>();
    const RECORD: usize = size_of::<SocketRecord<u64>>();
    const TAG: usize = size_of::<ListenerTag>();
    const NAME: usize = size_of::<NameKey>();
    const SLOT: usize = size_of::<SlotRef>();
    const META: usize = size_of::<Meta>();
    const SOCKET: usize = size_of::<i32>();
    let mapped = BPF_F_MMAPABLE;
    let cloned = BPF_F_NO_PREALLOC | BPF_F_CLONE;
    let names = SLOTS_MAX + LISTENERS_MAX;
    [
        Shape::new(map::META, MapType::Array, (INDEX, META), 1, 0),
        Shape::new(map::NAMES, MapType::Hash, (NAME, SLOT), names, 0),
        Shape::new(
            map::LIMITS,
            MapType::Array,
            (INDEX, LIMIT),
            SLOTS_MAX,
            mapped,
        ),
        Shape::new(map::SLOTS, MapType::Array, (INDEX, WORD), SLOTS_MAX, mapped),
        Shape::new(
            map::LISTENER_LIMITS,
            MapType::Array,
            (INDEX, LIMIT),
            LISTENERS_MAX,
            mapped,
        ),
        Shape::new(
            map::LISTENER_STATE,
            MapType::Array,
            (INDEX, STATE),
            LISTENERS_MAX,
            mapped,
        ),
        Shape::new(
            map::CELLS,
            MapType::PerCpuArray,
            (INDEX, WORD),
            LISTENERS_MAX,
            0,
        ),
        Shape::new(
            map::RECORDS,
            MapType::SkStorage,
            (SOCKET, RECORD),
            0,
            BPF_F_NO_PREALLOC,
        ),
        Shape::new(
            map::LISTENER_TAGS,
            MapType::SkStorage,
            (SOCKET, TAG),
            0,
            cloned,
        ),
    ]
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pinned_map_has_a_shape() {
        let shaped: Vec<&str> = SHAPES.iter().map(|shape| shape.map).collect();
        assert_eq!(shaped, map::PINNED);
    }

    #[test]
    fn only_names_that_are_safe_in_a_path_are_taken() {
        for good in ["default", "a", "gate-2_x", &"x".repeat(32)] {
            assert!(is_instance_name(good), "{good}");
        }
        for bad in [
            "",
            ".",
            "..",
            "a/b",
            "a.b",
            "Gate",
            "é",
            "a b",
            &"x".repeat(33),
        ] {
            assert!(!is_instance_name(bad), "{bad}");
        }
    }
}
