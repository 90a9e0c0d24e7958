"""The folder of compiled kernels, which processes share."""

from __future__ import annotations

import os
import pathlib
import tempfile


def cache_folder() -> pathlib.Path:
    if folder := os.environ.get("LEGATO_KERNEL_CACHE"):
        return pathlib.Path(folder)
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "legato" / "kernels"


def store(path: pathlib.Path, code: bytes) -> None:
    """Write atomically; an unwritable cache is not an error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        pathlib.Path(file.name).replace(path)
    except OSError:
        return
