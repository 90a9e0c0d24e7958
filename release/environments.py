"""Clean virtual environments that a release's wheels are installed into."""

from __future__ import annotations

import email.parser
import importlib.metadata
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release.process import ReleaseError, run


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
