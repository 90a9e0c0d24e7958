"""The commit that a record belongs to.

A working copy asks git. A tree without git, such as a copy on a machine with a GPU, reads
`.legato-commit`, which `python -m benchmarks pack` writes: the commit, and the git blob id of every
file, so that a file that was changed after packing is noticed there too.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
STAMP = ".legato-commit"
ALLOW_DIRTY = "LEGATO_DIRTY"  # environment variable; `python -m benchmarks --dirty` sets it
_RESULTS = "benchmarks/results"  # records say nothing about the code, so they may change
_NAMED = 5  # changed files that a message names


class DirtyTreeError(RuntimeError):
    """The tree is no commit's, and `--dirty` was not given."""


@dataclasses.dataclass(frozen=True, slots=True)
class Provenance:
    """A commit, empty if unknown, and the first changed files of the tree."""

    commit: str
    changed: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.commit:
            return "unknown-dirty"
        return f"{self.commit}-dirty" if self.changed else self.commit

    @property
    def is_clean(self) -> bool:
        """Whether the tree is exactly that of a known commit."""
        return bool(self.commit) and not self.changed


def of_tree(root: Path = ROOT) -> Provenance:
    """Find the commit of the tree at `root`, by git or by its stamp."""
    if (root / ".git").exists():
        provenance = _by_git(root)
        if provenance.commit:  # a copied .git file may point to a repository that is not here
            return provenance
    stamp = root / STAMP
    return _by_stamp(root, stamp.read_text()) if stamp.exists() else Provenance("")


def recordable(root: Path = ROOT) -> str:
    """Return what a record says of its commit.

    Raises:
        DirtyTreeError: The tree is not clean and `LEGATO_DIRTY` is not set.
    """
    provenance = of_tree(root)
    if provenance.is_clean or os.environ.get(ALLOW_DIRTY):
        return str(provenance)
    if not provenance.commit:
        reason = f"no git here and no {STAMP}: run `python -m benchmarks pack` before copying"
    else:
        reason = f"changed since {provenance.commit}: {', '.join(provenance.changed)}"
    raise DirtyTreeError(f"a record needs a clean tree or --dirty; {reason}")


def main(argv: Sequence[str]) -> int:
    """Write the stamp, and with --archive a tar.gz of the tree with it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks pack", description=__doc__)
    parser.add_argument("--archive", type=Path, help="also write the tree to this .tar.gz")
    arguments = parser.parse_args(argv)
    try:
        pack(ROOT, arguments.archive)
    except DirtyTreeError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{STAMP}: {of_tree(ROOT).commit}")
    return 0


def pack(root: Path, archive: Path | None = None) -> None:
    """Write the stamp of a clean working copy.

    Raises:
        DirtyTreeError: A file is changed or untracked; a stamp would claim otherwise.
    """
    provenance = _by_git(root)
    if not provenance.is_clean:
        changed = ", ".join(provenance.changed) or "no commit"
        raise DirtyTreeError(f"only a clean tree can be packed; changed: {changed}")
    blobs = _git(root, "ls-tree", "-r", "HEAD", "--format=%(objectname) %(path)")
    (root / STAMP).write_text(f"{provenance.commit}\n{blobs}\n")
    if archive is not None:
        archive.parent.mkdir(parents=True, exist_ok=True)
        options = ("--format=tar.gz", "--prefix=legato/", f"--output={archive.resolve()}")
        _git(root, "archive", *options, f"--add-file={root / STAMP}", "HEAD")


def _by_git(root: Path) -> Provenance:
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    status = _git(root, "status", "--porcelain", "--", ".", f":(exclude){_RESULTS}")
    return Provenance(commit, tuple(line[2:].strip() for line in status.splitlines()[:_NAMED]))


def _by_stamp(root: Path, stamp: str) -> Provenance:
    commit, *blobs = stamp.splitlines()
    listed = (line.partition(" ") for line in blobs)
    changed = (
        path
        for blob, _, path in listed
        if not path.startswith(_RESULTS) and _blob(root / path) != blob
    )
    return Provenance(commit, tuple(itertools.islice(changed, _NAMED)))


def _blob(path: Path) -> str:
    """Compute git's id of a file; empty if there is none."""
    if path.is_symlink():
        data = os.fsencode(path.readlink())
    elif path.is_file():
        data = path.read_bytes()
    else:
        return ""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _git(root: Path, *command: str) -> str:
    done = subprocess.run(
        ("git", "-C", str(root), *command), capture_output=True, text=True, check=False, timeout=60
    )
    return done.stdout.rstrip("\n") if done.returncode == 0 else ""
