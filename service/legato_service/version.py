"""The version of the distribution."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def version() -> str:
    """Return "0" in a folder that was never installed."""
    try:
        return importlib.metadata.version("legato")
    except importlib.metadata.PackageNotFoundError:
        return "0"
