"""The contract's baseline and revision."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from release.build import ReleaseError, run


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
