"""Records of benchmarks: a JSON file for each run, with the facts to repeat it."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Describe the machine, the software and the commit.

    Raises:
        DirtyTreeError: The tree is not that of a commit.
    """
    import torch

    facts: dict[str, Any] = {
        "command": "python -m benchmarks " + " ".join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": recordable(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu(),
    }
    if torch.cuda.is_available():
        used = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"  # a host may have several
        query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem"
        facts["gpu"] = _output("nvidia-smi", used, query, "--format=csv,noheader")
    return facts


def write(name: str, title: str, figures: Mapping[str, Any], tables: Sequence[str]) -> Path:
    """Write `results/<name>.json`, and return its path.

    `LEGATO_RESULTS` names another folder than `results`. The tables are printed first, so that a
    refused record loses no figures.

    Raises:
        DirtyTreeError: The tree is not that of a commit.
    """
    print("\n".join(tables))
    folder = Path(os.environ.get("LEGATO_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    facts = environment()
    lines = "\n".join(tables).splitlines()
    document = {"title": title, "surroundings": facts, "tables": lines, "figures": figures}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written: {path.name}")
    return path


def quantiles(values: Sequence[float], n: int) -> list[float]:
    """Return the n - 1 cuts of values; of a single value, all are that value."""
    return statistics.quantiles(values, n=n) if len(values) > 1 else list(values) * (n - 1)


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


# ---------------------------------------------------------------- provenance
# The commit that a record belongs to.
#
# A working copy asks git. A tree without git, such as a copy on a machine with a GPU, reads
# `.legato-commit`, which `python -m benchmarks pack` writes: the commit, and the git blob id of
# every file, so that a file that was changed after packing is noticed there too.


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
