"""Sums over engines."""

from __future__ import annotations

from collections.abc import Sequence

from legato_engine.ipc.figures import Load


def total_load(loads: Sequence[Load]) -> Load:
    """Add up the loads of engines; what is measured over a window is of a single engine only."""
    if len(loads) == 1:
        return loads[0]
    return Load(
        running=sum(each.running for each in loads),
        waiting=sum(each.waiting for each in loads),
        preparing=sum(each.preparing for each in loads),
        inflight=sum(each.inflight for each in loads),
        rows_used=sum(each.rows_used for each in loads),
        pages_used=sum(each.pages_used for each in loads),
        prefix_pages=sum(each.prefix_pages for each in loads),
        pages_total=sum(each.pages_total for each in loads),
        adapters_used=sum(each.adapters_used for each in loads),
        images_cached=sum(each.images_cached for each in loads),
    )
