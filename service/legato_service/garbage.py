"""Garbage collection, kept out of the way of calls."""

from __future__ import annotations

import gc

_THRESHOLD = 10_000  # containers made and not freed: few of an RPC's outlive it, none in cycles


def keep_out_of_the_way() -> None:
    """Never look again at what is imported by now, and seldom at the rest."""
    gc.freeze()
    gc.set_threshold(_THRESHOLD)
