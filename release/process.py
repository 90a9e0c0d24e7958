"""Programs that a release runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


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
