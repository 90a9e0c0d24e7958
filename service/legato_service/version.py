"""The versions of the distribution and of the contract."""

from __future__ import annotations

import functools
import importlib.metadata

CONTRACT_REVISION = 1  # grows by one with each released addition
MINIMUM_CLIENT_REVISION = 1


@functools.cache
def version() -> str:
    """Return "0" in a folder that was never installed."""
    try:
        return importlib.metadata.version("legato")
    except importlib.metadata.PackageNotFoundError:
        return "0"
