"""Every place that repeats the version of a release or the revision of the contract."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from release.build import ReleaseError

VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")


@dataclass(frozen=True)
class Place:
    """The one match of a pattern in a file; its group is the value."""

    path: str
    pattern: str

    def read(self, root: Path) -> str:
        """Return the value.

        Raises:
            ReleaseError: The pattern matches nothing, or more than once.
        """
        return self._match((root / self.path).read_text()).group(1)

    def write(self, root: Path, value: str) -> None:
        """Replace the value.

        Raises:
            ReleaseError: As `read`.
        """
        text = (root / self.path).read_text()
        match = self._match(text)
        (root / self.path).write_text(text[: match.start(1)] + value + text[match.end(1) :])

    def _match(self, text: str) -> re.Match[str]:
        found = list(re.finditer(self.pattern, text, re.MULTILINE))
        if len(found) != 1:
            raise ReleaseError(f"{self.path} has {len(found)} matches of {self.pattern}, not one")
        return found[0]


OWN = r'^version = "([^"]+)"$'
VERSIONS = (
    Place("pyproject.toml", OWN),
    Place("pyproject.toml", r'"legato-server==([^"]+)"'),
    Place("service/pyproject.toml", OWN),
    Place("service/pyproject.toml", r'"legato==([^"]+)"'),
    Place("service/pyproject.toml", r'"legato-tiny==([^"]+)"'),
    Place("engine/tiny/pyproject.toml", OWN),
    Place("clients/go/legato/dial.go", r'^const Version = "([^"]+)"$'),
    Place("clients/cpp/CMakeLists.txt", r"^project\(legato VERSION ([^ ]+) "),
    Place("ros2/legato_msgs/package.xml", r"^  <version>([^<]+)</version>$"),
    Place("ros2/legato_ros/package.xml", r"^  <version>([^<]+)</version>$"),
)
REVISIONS = (
    Place("service/legato_service/version.py", r"^CONTRACT_REVISION = (\d+)\b"),
    Place("clients/python/legato_client/_version.py", r"^CONTRACT_REVISION = (\d+)\b"),
)
MINIMUM = Place(REVISIONS[0].path, r"^MINIMUM_CLIENT_REVISION = (\d+)\b")


def version(root: Path) -> str:
    """Return the version that every place has.

    Raises:
        ReleaseError: Places differ, or it is not X.Y.Z.
    """
    found = _same(root, VERSIONS)
    parse(found)
    return found


def revision(root: Path) -> int:
    """Return the contract's revision.

    Raises:
        ReleaseError: Places differ, or clients of this revision would be refused.
    """
    found = int(_same(root, REVISIONS))
    if (minimum := int(MINIMUM.read(root))) > found:
        raise ReleaseError(f"minimum_client_revision {minimum} is above contract_revision {found}")
    return found


def parse(text: str) -> tuple[int, ...]:
    """Return a version's numbers, which sort as versions do.

    Raises:
        ReleaseError: It is not X.Y.Z.
    """
    match = VERSION.fullmatch(text)
    if match is None:
        raise ReleaseError(f"version {text!r} is not X.Y.Z")
    return tuple(int(part) for part in match.groups())


def write(root: Path, value: str) -> None:
    """Write a version into every place."""
    parse(value)
    for place in VERSIONS:
        place.write(root, value)


def _same(root: Path, places: tuple[Place, ...]) -> str:
    values = {place: place.read(root) for place in places}
    if len(set(values.values())) != 1:
        lines = [f"{place.path}: {place.pattern} is {value}" for place, value in values.items()]
        raise ReleaseError("these must be equal:\n" + "\n".join(lines))
    return next(iter(values.values()))
