"""Batches the sequences that can take one more token."""

from __future__ import annotations

from itertools import repeat

from legato_engine.kv_cache.prefix_work import NO_PREFIX_WORK
from legato_engine.scheduler.launch import LaunchKind, Plan, Row
from legato_engine.scheduler.running import Running
from legato_engine.sequence import Sequence


class DecodePlanner:
    """Every running sequence decodes together; each holds a batch row, so all of them fit.

    A sequence may be planned before its last token is committed: the forward reads that token on
    the device, at the position where its sampling put it. Whoever has no page for that position,
    and gets none now, is left out.
    """

    def __init__(self, running: Running) -> None:
        self._running = running

    def plan(self) -> Plan | None:
        """The next decode batch, None when no sequence can take one more token."""
        batch = self._ready()
        if len(batch) < len(self._running) and (short := self._short()):
            self._running.grow(short)
            batch = self._ready()
        if not batch:
            return None
        positions = [sequence.last_position for sequence in batch]
        # Every tick makes all rows anew, and `_make` costs half of a call that fills defaults in.
        rows = map(Row._make, zip(batch, positions, repeat(1), repeat(NO_PREFIX_WORK)))
        return Plan(LaunchKind.DECODE, tuple(rows))

    def _ready(self) -> list[Sequence]:
        """Those prefilled, with a page, whose tokens are not all planned, and not too far ahead."""
        return [
            sequence
            for sequence in self._running
            if 0 <= sequence.last_position < sequence.capacity
            and sequence.num_launched < sequence.task.max_tokens
            and sequence.inflight_refs < 2
            and not sequence.preempted
        ]

    def _short(self) -> list[Sequence]:
        """Those whose next token has no page."""
        return [
            sequence
            for sequence in self._running
            if sequence.last_position >= sequence.capacity
            and sequence.num_launched < sequence.task.max_tokens
            and not sequence.preempted
        ]
