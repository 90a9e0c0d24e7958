"""Every place that repeats the version of a release or the revision of the contract."""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from release.build import ReleaseError, run

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


# ---------------------------------------------------------------- tags
# The tags of a release: one of the repository, one of the Go module within it.


GO_FOLDER = "clients/go"
GO_MODULE = f"github.com/legato-vlm/legato/{GO_FOLDER}"
MODULE = Place(f"{GO_FOLDER}/go.mod", r"^module (\S+)$")


def names(version: str) -> tuple[str, str]:
    """Return the tag of the repository, and the one that `go get` looks for."""
    return f"v{version}", f"{GO_FOLDER}/v{version}"


def check_module(root: Path, version: str) -> None:
    """Fail if `go get` would refuse the tag.

    Raises:
        ReleaseError: The module's path is not its folder's with its major version's suffix.
    """
    major = parse(version)[0]
    expected = GO_MODULE if major < 2 else f"{GO_MODULE}/v{major}"
    if (path := MODULE.read(root)) != expected:
        raise ReleaseError(f"{MODULE.path}: the module of v{version} is {expected}, not {path}")


def existing(root: Path, version: str) -> list[str]:
    """Return those tags of the version that the repository has."""
    return run(["git", "tag", "--list", *names(version)], root).split()


def create(repository: Path, version: str, commit: str, notes: str) -> None:
    """Make both tags, annotated with the notes.

    Raises:
        ReleaseError: One exists.
    """
    for name in names(version):
        message = f"Legato {version}\n\n{notes}"
        verbatim = ["--annotate", "--cleanup", "verbatim", "--message", message]
        run(["git", "tag", *verbatim, name, commit], repository)


def rehearse(root: Path, folder: Path, version: str, notes: str) -> Path:
    """Make the tags in a bare clone, which shares this repository's objects; return the clone."""
    clone = folder / "clone.git"
    run(["git", "clone", "--quiet", "--bare", "--shared", "--no-tags", root, clone], folder)
    identity = {"user.name": "rehearsal", "user.email": "rehearsal@localhost"}
    for key, value in identity.items():
        run(["git", "config", key, value], clone)
    create(clone, version, "HEAD", notes)
    return clone


# ---------------------------------------------------------------- contract
# The contract's baseline and revision.


def check(root: Path) -> str:
    """Fail if the contract breaks clients of the last release; return what it was compared with."""
    return run([sys.executable, root / "proto" / "breaking.py"], root).strip()


def write_baseline(root: Path, revision: int) -> None:
    """Make this tree's contract the one that later trees are compared with."""
    run([sys.executable, root / "proto" / "breaking.py", "--write", str(revision)], root)


def baseline(root: Path) -> tuple[int, bytes]:
    """Return the revision and the image of the last release's contract.

    Raises:
        ReleaseError: There is none, or more than one.
    """
    found = list((root / "proto" / "baseline").glob("revision-*.binpb"))
    if len(found) != 1:
        raise ReleaseError("proto/baseline has not one revision-N.binpb")
    return int(found[0].stem.removeprefix("revision-")), found[0].read_bytes()


def image(root: Path) -> bytes:
    """Return the image of this tree's contract, without comments."""
    buf = Path(sys.executable).with_name("buf")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "tree.binpb"
        run([buf, "build", "--exclude-source-info", "--output", output], root)
        return output.read_bytes()


def check_revision(root: Path, revision: int, is_first: bool) -> None:
    """Fail unless `revision` is the last release's, plus one if the contract grew since.

    Until the first release the contract grows within its first revision.

    Raises:
        ReleaseError: The revision is another.
    """
    released, released_image = baseline(root)
    grew = image(root) != released_image and not is_first
    if revision != released + grew:
        grown = "has grown since" if grew else "is that of"
        raise ReleaseError(
            f"contract_revision is {revision} and must be {released + grew}: the contract {grown} "
            f"the last release, whose revision is {released}"
        )


def check_baseline(root: Path, revision: int) -> None:
    """Fail unless the committed baseline is this tree's contract.

    Raises:
        ReleaseError: It is another.
    """
    if baseline(root) != (revision, image(root)):
        raise ReleaseError("proto/baseline is not this contract: run `make release-prepare`")
