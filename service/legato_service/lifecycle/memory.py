"""Freed memory, given back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def give_back() -> None:
    """Return what the allocator keeps; milliseconds for a heap of hundreds of megabytes.

    glibc keeps freed memory below the highest block in use. Without effect under another allocator.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
