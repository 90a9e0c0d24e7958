"""What one process of a run of the tests makes for all of them."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

_FOLDER = "LEGATO_TESTS_SHARED"


def begin() -> None:
    """Make the folder, in the process that starts the others."""
    os.environ[_FOLDER] = tempfile.mkdtemp(prefix="tests-of-legato-")


def end() -> None:
    """Remove it."""
    shutil.rmtree(os.environ.pop(_FOLDER))


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """The file of this name, which `make` has written, in this process or in another one."""
    path = Path(os.environ[_FOLDER]) / name
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = path.with_suffix(".part")
            make(part)
            part.rename(path)
    return path
