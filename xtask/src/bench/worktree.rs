//! Another commit's files, beside this checkout.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::host;

/// A checkout of one commit; removed when dropped.
#[derive(Debug)]
pub struct Worktree {
    /// Its root.
    pub path: PathBuf,
    repository: PathBuf,
}

impl Worktree {
    /// Checks a commit out in `folder/<hash>`. One that a killed run left there is replaced.
    pub fn new(repository: &Path, folder: &Path, hash: &str) -> Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let worktree = Self {
            path: folder.join(hash),
            repository: repository.to_owned(),
        };
        worktree.remove();
        host::output(
            worktree
                .git()
                // By force: a note of it may have survived its files.
                .args(["worktree", "add", "--force", "--quiet", "--detach"])
                .arg(&worktree.path)
                .arg(hash),
        )?;
        Ok(worktree)
    }

    fn git(&self) -> Command {
        git(&self.repository)
    }

    /// Removes files and git's note of them. Not being there is no error.
    fn remove(&self) {
        if self.path.exists()
            && let Err(error) = fs::remove_dir_all(&self.path)
        {
            eprintln!("bench: {} stays behind: {error}", self.path.display());
        }
        // Files come first: git refuses a folder without its `.git`, but not one that is gone.
        // `worktree prune` would drop the note of every folder that is absent just now.
        let _ = host::output(
            self.git()
                .args(["worktree", "remove", "--force"])
                .arg(&self.path),
        );
    }
}

impl Drop for Worktree {
    fn drop(&mut self) {
        self.remove();
    }
}

/// The full hash of what a person calls a commit.
pub fn resolve(repository: &Path, name: &str) -> Result<String> {
    host::output(git(repository).args(["rev-parse", "--git-dir"]))
        .context("two commits are compared in a git checkout only")?;
    let commit = format!("{name}^{{commit}}");
    let hash = host::output(git(repository).args([
        "rev-parse",
        "--verify",
        "--quiet",
        "--end-of-options",
        &commit,
    ]))
    .ok()
    .with_context(|| {
        format!("{name} names no commit of this repository: give a hash, a branch or a tag")
    })?;
    Ok(hash.trim().to_owned())
}

fn git(repository: &Path) -> Command {
    let mut git = Command::new("git");
    git.current_dir(repository);
    git
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::scratch::Scratch;

    /// Makes a repository with one commit of one file, called `file`.
    pub fn repository(path: &Path) {
        fs::write(path.join("file"), "as committed").unwrap();
        let who = ["-c", "user.name=t", "-c", "user.email=t@example.org"];
        for words in [
            &["init", "--quiet"][..],
            &["add", "file"],
            &["commit", "--quiet", "--no-verify", "-m", "one"],
        ] {
            host::output(git(path).args(who).args(words)).unwrap();
        }
    }

    fn worktrees(path: &Path) -> usize {
        let listed = host::output(git(path).args(["worktree", "list"])).unwrap();
        listed.lines().count()
    }

    #[test]
    fn a_worktree_has_the_commit_and_leaves_nothing() {
        let scratch = Scratch::new("test-worktree").unwrap();
        let root = &scratch.path;
        repository(root);
        let hash = resolve(root, "HEAD").unwrap();
        let folder = root.join("compare");
        fs::write(root.join("file"), "changed").unwrap();

        let worktree = Worktree::new(root, &folder, &hash).unwrap();
        let text = fs::read_to_string(worktree.path.join("file")).unwrap();
        assert_eq!(text, "as committed");
        fs::write(worktree.path.join("built"), "not committed").unwrap();
        assert_eq!(worktrees(root), 2);
        drop(worktree);
        assert!(!folder.join(&hash).exists());
        assert_eq!(worktrees(root), 1);
    }

    #[test]
    fn what_a_killed_run_left_is_replaced() {
        let scratch = Scratch::new("test-stale").unwrap();
        let root = &scratch.path;
        repository(root);
        let hash = resolve(root, "HEAD").unwrap();
        let folder = root.join("compare");

        // Files and note, a note without files, files without a note.
        std::mem::forget(Worktree::new(root, &folder, &hash).unwrap());
        std::mem::forget(Worktree::new(root, &folder, &hash).unwrap());
        fs::remove_dir_all(folder.join(&hash)).unwrap();
        drop(Worktree::new(root, &folder, &hash).unwrap());
        fs::create_dir(folder.join(&hash)).unwrap();
        fs::write(folder.join(&hash).join("x"), "x").unwrap();
        drop(Worktree::new(root, &folder, &hash).unwrap());
        assert!(!folder.join(&hash).exists());
        assert_eq!(worktrees(root), 1);
    }

    #[test]
    fn the_note_of_another_worktree_stays() {
        let scratch = Scratch::new("test-others").unwrap();
        let root = &scratch.path;
        repository(root);
        let hash = resolve(root, "HEAD").unwrap();
        // As on a disk that is not mounted just now.
        let (others, away) = (root.join("others"), root.join("away"));
        let mut add = git(root);
        add.args(["worktree", "add", "--quiet", "--detach"]);
        host::output(add.arg(&others)).unwrap();
        fs::rename(&others, &away).unwrap();
        drop(Worktree::new(root, &root.join("compare"), &hash).unwrap());
        assert_eq!(worktrees(root), 2);
    }

    #[test]
    fn what_is_no_commit_is_told_by_name() {
        let scratch = Scratch::new("test-resolve").unwrap();
        let root = &scratch.path;
        let error = resolve(root, "HEAD").unwrap_err();
        assert!(format!("{error:#}").contains("git checkout"), "{error:#}");
        repository(root);
        assert_eq!(resolve(root, "HEAD").unwrap().len(), 40);
        for name in ["no-such", "--all", "HEAD:file", ""] {
            let error = resolve(root, name).unwrap_err().to_string();
            assert!(error.contains("names no commit"), "{name}: {error}");
        }
    }
}
