"""Wheels and sdists, built twice and compared byte for byte."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from release import distributions
from release.distributions import Distribution
from release.process import ReleaseError, run

SUMS = "SHA256SUMS"


def build(root: Path, output: Path, version: str) -> None:
    """Fill `output`, emptied before, with all wheels and sdists and their SHA-256 sums.

    The second build is of a copy in another folder, with other file times and modes and in another
    time zone, and makes wheels from the tree where the first makes them from the sdist.

    Raises:
        ReleaseError: A build failed, or the builds differ.
    """
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    epoch = {"SOURCE_DATE_EPOCH": source_date_epoch(root)}
    with (
        tempfile.TemporaryDirectory(prefix="legato-build-") as folder,
        ThreadPoolExecutor() as pool,
    ):
        copy, again = Path(folder) / "copy", Path(folder) / "dist"
        copy_sources(root, copy)
        elsewhere = {**epoch, "TZ": "Asia/Kathmandu", "LC_ALL": "C"}
        builds = [
            pool.submit(build_one, where, each, into, options, environment)
            for each in distributions.ALL
            for where, into, options, environment in (
                (root, output, (), epoch),
                (copy, again, ("--sdist", "--wheel"), elsewhere),
            )
        ]
        for each in builds:
            each.result()
        if differing := differences(output, again):
            raise ReleaseError(f"a second build differs in {', '.join(differing)}")
    expected = distributions.file_names(version)
    if (built := sorted(path.name for path in output.iterdir())) != expected:
        raise ReleaseError(f"built {built}, expected {expected}")
    (output / SUMS).write_text(sums(output, expected))


def build_one(
    root: Path,
    distribution: Distribution,
    output: Path,
    options: tuple[str, ...],
    environment: Mapping[str, str],
) -> None:
    """Build a distribution with the hatchling of this interpreter's environment."""
    source = root / distribution.folder
    options = ("--no-isolation", *options, "--outdir", str(output))
    run([sys.executable, "-m", "build", *options, source], root, environment)


def source_date_epoch(root: Path) -> str:
    """Return the time of the commit, in seconds since 1970; $SOURCE_DATE_EPOCH overrides it."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    return given or run(["git", "log", "-1", "--format=%ct"], root).strip()


def copy_sources(root: Path, copy: Path) -> None:
    """Copy what distributions are built from, with other times and modes."""
    sources = sorted({source for each in distributions.ALL for source in each.sources})
    command = [
        "git",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
        "--",
        *sources,
    ]
    for name in run(command, root).split("\0"):
        if name and (root / name).is_file():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, target)
            target.chmod(0o600)


def differences(one: Path, other: Path) -> list[str]:
    """Return the names of files that only one folder has, or that differ."""
    names = {path.name for folder in (one, other) for path in folder.iterdir()}
    return sorted(name for name in names if _bytes(one / name) != _bytes(other / name))


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def sums(folder: Path, names: list[str]) -> str:
    """Return a file of sums that `sha256sum --check` reads."""
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    return "".join(f"{digest}  {name}\n" for name, digest in digests.items())


def check_sums(folder: Path, version: str) -> None:
    """Fail unless `folder` holds what `build` wrote for this version.

    Raises:
        ReleaseError: A file is missing or changed.
    """
    names = distributions.file_names(version)
    missing = [name for name in (*names, SUMS) if not (folder / name).is_file()]
    if missing:
        raise ReleaseError(f"{folder.name}/ lacks {', '.join(missing)}: run `make dist`")
    if (folder / SUMS).read_text() != sums(folder, names):
        raise ReleaseError(f"{folder.name}/{SUMS} is of other files: run `make dist`")
