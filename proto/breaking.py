"""Fail if the contract breaks the clients of the last release.

Compares the working tree, by buf's strictest rules (buf.yaml), with the committed baseline: the
contract of the last release, which every clone has. Where git has the tag of a release, the tree is
compared with the nearest one too, so that no rewritten baseline hides a break. Run by
`make proto-breaking` at the root of the repository, with the Python of the venv that has buf;
`--write REVISION` makes the working tree the baseline, a step of preparing a release.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

BUF = Path(sys.executable).with_name("buf")
BASELINES = Path("proto/baseline")
# Images have no buf.yaml; its rules for them.
RULES = '{"version": "v2", "breaking": {"use": ["FILE"]}}'


def baseline() -> Path | None:
    """Return the one image in proto/baseline, named by its contract revision."""
    found = list(BASELINES.glob("revision-*.binpb"))
    return found[0] if len(found) == 1 else None


def last_release() -> str | None:
    """Return the nearest release tag among the ancestors of HEAD, or None."""
    command = ["git", "describe", "--tags", "--abbrev=0", "--match", "v*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def breaks(name: str, *arguments: str | Path) -> bool:
    """Whether `buf breaking` finds a break, which it prints."""
    compared = subprocess.run([BUF, "breaking", *arguments], check=False)
    if compared.returncode:
        print(f"proto-breaking: this breaks clients of {name}; see the rules in proto/README.md")
    else:
        print(f"proto-breaking: nothing breaks clients of {name}")
    return compared.returncode != 0


def check() -> int:
    """Compare, and say with what; 0 if nothing breaks."""
    image, tag = baseline(), last_release()
    if image is None:
        print(f"proto-breaking: {BASELINES} has not one revision-N.binpb, so nothing is compared")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree.binpb"
        if not build(tree):
            return 1
        broken = breaks(image.stem, tree, "--against", image, "--config", RULES)
    if tag is not None:
        broken |= breaks(tag, "--against", f".git#tag={tag}")
    return int(broken)


def write(revision: int) -> None:
    """Replace the baseline by the contract of the working tree, without comments."""
    BASELINES.mkdir(exist_ok=True)
    for stale in BASELINES.glob("revision-*.binpb"):
        stale.unlink()
    if not build(BASELINES / f"revision-{revision}.binpb", "--exclude-source-info"):
        raise SystemExit(1)


def build(image: Path, *options: str) -> bool:
    """Write the working tree's contract as buf's image; False if it does not compile."""
    return subprocess.run([BUF, "build", *options, "--output", image], check=False).returncode == 0


def main() -> int:
    """Check, or write the baseline."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=int, metavar="REVISION")
    revision = parser.parse_args().write
    if revision is None:
        return check()
    write(revision)
    return 0


if __name__ == "__main__":
    sys.exit(main())
