"""The tags of a release: one of the repository, one of the Go module within it."""

from __future__ import annotations

from pathlib import Path

from release import versions
from release.build import ReleaseError, run
from release.versions import Place

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
    major = versions.parse(version)[0]
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
