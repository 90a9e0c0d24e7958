"""Wheels and sdists, built twice and compared byte for byte."""

from __future__ import annotations

import email.parser
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
            for each in ALL
            for where, into, options, environment in (
                (root, output, (), epoch),
                (copy, again, ("--sdist", "--wheel"), elsewhere),
            )
        ]
        for each in builds:
            each.result()
        if differing := differences(output, again):
            raise ReleaseError(f"a second build differs in {', '.join(differing)}")
    expected = file_names(version)
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
    sources = sorted({source for each in ALL for source in each.sources})
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
    names = file_names(version)
    missing = [name for name in (*names, SUMS) if not (folder / name).is_file()]
    if missing:
        raise ReleaseError(f"{folder.name}/ lacks {', '.join(missing)}: run `make dist`")
    if (folder / SUMS).read_text() != sums(folder, names):
        raise ReleaseError(f"{folder.name}/{SUMS} is of other files: run `make dist`")


# ---------------------------------------------------------------- distributions
# The distributions of a release.


ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Distribution:
    """One name on the package index: a wheel and an sdist."""

    name: str
    folder: str  # of its pyproject.toml, from the repository's root
    sources: tuple[str, ...]  # what its wheel and sdist are made from, files and folders

    @property
    def stem(self) -> str:
        """The name as it begins file names."""
        return self.name.replace("-", "_")

    def wheel(self, version: str) -> str:
        return f"{self.stem}-{version}-py3-none-any.whl"

    def sdist(self, version: str) -> str:
        return f"{self.stem}-{version}.tar.gz"


CLIENT = Distribution(
    "legato",
    ".",
    (
        ".gitignore",
        "CHANGELOG.md",
        "LICENSE",
        "README.md",
        "buf.yaml",
        "clients/python",
        "proto",
        "pyproject.toml",
    ),
)
SERVER = Distribution("legato-server", "service", (".gitignore", "engine/legato_engine", "service"))
TINY = Distribution("legato-tiny", "engine/tiny", (".gitignore", "engine/tiny"))
ALL = (CLIENT, SERVER, TINY)


def file_names(version: str) -> list[str]:
    """All that is uploaded, sorted."""
    return sorted(name for each in ALL for name in (each.wheel(version), each.sdist(version)))


# ---------------------------------------------------------------- environments
# Clean virtual environments that a release's wheels are installed into.


class Environment:
    """A venv without pip, which this interpreter's pip fills."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.folder = folder
        self.bin = folder / "bin"
        self.python = self.bin / "python"

    @property
    def site_packages(self) -> Path:
        root = str(self.folder)
        return Path(sysconfig.get_path("purelib", "venv", vars={"base": root, "platbase": root}))

    def install(self, *arguments: str | Path) -> None:
        """Run `pip install`.

        Raises:
            ReleaseError: pip failed.
        """
        pip: list[str | Path] = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.python,
            "--disable-pip-version-check",
        ]
        run([*pip, "install", "--quiet", *arguments], self.folder)

    def run(self, *command: str | Path) -> str:
        """Run a program from the venv's folder, where no source tree is."""
        return run(command, self.folder, {"VIRTUAL_ENV": str(self.folder)})

    def lend(self, names: Sequence[str]) -> None:
        """Let the venv import distributions that are installed beside this interpreter.

        Only their own files are linked: every other distribution stays out of reach, and so does a
        dependency that is not declared.
        """
        lent = self.folder / "lent"
        lent.mkdir()
        for name in names:
            distribution = importlib.metadata.distribution(name)
            for part in {path.parts[0] for path in distribution.files or ()}:
                link, target = lent / part, Path(str(distribution.locate_file(part)))
                if part != ".." and not part.endswith(".pth") and not link.exists():
                    link.symlink_to(target)
        (self.site_packages / "lent.pth").write_text(f"{lent}\n")


def dependencies(wheels: Sequence[Path], root: str) -> list[str]:
    """Return the names of all distributions, but those of `wheels`, that `root` needs.

    `root` is a requirement of one of the wheels, with extras.

    Raises:
        ReleaseError: A dependency is not installed beside this interpreter.
    """
    built = dict(map(_required_by_wheel, wheels))
    seen: set[tuple[str, str]] = set()
    todo = [Requirement(root)]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {extra for other, extra in seen if other == name}:
            seen.add((name, extra))
            declared = built[name] if name in built else _required_by_installed(name)
            todo += _applying(declared, extra)
    return sorted({name for name, _ in seen} - set(built))


def _required_by_wheel(wheel: Path) -> tuple[str, list[str]]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.parser.Parser().parsestr(archive.read(name).decode())
    return canonicalize_name(metadata["Name"]), metadata.get_all("Requires-Dist", [])


def _required_by_installed(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        raise ReleaseError(f"{name} is not installed beside {sys.executable}") from None


def _applying(declared: Sequence[str], extra: str) -> Iterator[Requirement]:
    """Yield the requirements of one extra, or those of none, on this platform."""
    for text in declared:
        requirement = Requirement(text)
        if extra:
            applies = requirement.marker is not None and (
                requirement.marker.evaluate({"extra": extra})
                and not requirement.marker.evaluate({"extra": ""})
            )
        else:
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies:
            yield requirement


# ---------------------------------------------------------------- process
# Programs that a release runs.


class ReleaseError(Exception):
    """Something must be put right before a release; the message says what."""


def run(
    command: Sequence[str | Path], cwd: Path, environment: Mapping[str, str] | None = None
) -> str:
    """Return what the command printed.

    `environment` is added to this process's without PYTHONPATH, which would bring a source tree.

    Raises:
        ReleaseError: The command failed; the message has its output.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=inherited | dict(environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        line = " ".join(str(part) for part in command)
        raise ReleaseError(f"`{line}` exits with {done.returncode}:\n{done.stdout}")
    return done.stdout
