"""Batches the sequences that can take one more token."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

from legato_engine.kv_cache.prefix_work import NO_PREFIX_WORK
from legato_engine.scheduler.launch import LaunchKind, Plan, Row
from legato_engine.sequence import Sequence


class DecodePlanner:
    """Every running sequence decodes together; each holds a batch row, so all of them fit.

    A sequence may be planned before its last token is committed: the forward reads that token on
    the device, at the position where its sampling put it.
    """

    def plan(self, running: Iterable[Sequence]) -> Plan | None:
        """The next decode batch, None when no sequence can take one more token."""
        batch = [
            sequence
            for sequence in running
            if 0 < sequence.num_launched < sequence.task.max_tokens
            and sequence.inflight_refs < 2
            and not sequence.finalized
        ]
        if not batch:
            return None
        positions = [sequence.last_position for sequence in batch]
        # Every tick makes all rows anew, and `_make` costs half of a call that fills defaults in.
        rows = map(Row._make, zip(batch, positions, repeat(1), repeat(NO_PREFIX_WORK)))
        return Plan(LaunchKind.DECODE, tuple(rows))
