"""Garbage collection, kept out of the way of calls."""

from __future__ import annotations

import gc

_THRESHOLD = 1_000
"""Containers made and not freed. gRPC leaves five of each call in a cycle, this server none.

A collection costs by what it frees, so many small ones cost what few large ones would. But they
hold up the event loop for a tenth as long, and what they free is still in the processor's caches
when the next call takes it."""


def keep_out_of_the_way() -> None:
    """Never look again at what is imported by now, and seldom at the rest."""
    gc.freeze()
    gc.set_threshold(_THRESHOLD)
