"""Fail if the contract breaks the clients of the last release.

Compares the working tree with the nearest tag `v*`, by buf's strictest rules (buf.yaml). Run by
`make proto-breaking` at the root of the repository, with the Python of the venv that has buf.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BUF = Path(sys.executable).with_name("buf")


def last_release() -> str | None:
    """The nearest release tag among the ancestors of HEAD; None if there is none."""
    command = ["git", "describe", "--tags", "--abbrev=0", "--match", "v*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def is_left_out() -> bool:
    """Whether there is a release that this clone lacks, because it is a shallow one."""
    command = ["git", "rev-parse", "--is-shallow-repository"]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    if told.stdout.strip() != "true":
        return False
    command = ["git", "ls-remote", "--exit-code", "--tags", "origin", "v*"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def main() -> int:
    """Compare, and say with what; 0 if nothing breaks or nothing was released."""
    tag = last_release()
    if tag is None and is_left_out():
        print("proto-breaking: this shallow clone lacks the releases: git fetch --unshallow --tags")
        return 1
    if tag is None:
        print("proto-breaking: no release yet (no tag v*), so there is no client to break")
        return 0
    compared = subprocess.run([BUF, "breaking", "--against", f".git#tag={tag}"], check=False)
    if compared.returncode:
        print(f"proto-breaking: this breaks clients of {tag}; see the rules in proto/README.md")
    else:
        print(f"proto-breaking: nothing breaks clients of {tag}")
    return compared.returncode


if __name__ == "__main__":
    sys.exit(main())
