"""The waiting queue and who leaves it next."""

from __future__ import annotations

import dataclasses
from collections import deque
from itertools import islice

from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.launch import LaunchKind, Plan, Row
from legato_engine.sequence import Sequence


@dataclasses.dataclass(slots=True, eq=False)
class _Waiting:
    sequence: Sequence
    overtaken: int = 0


class PrefillPlanner:
    """First come, first served, with bounded skip-ahead.

    A sequence that does not fit right now may be overtaken by `max_overtakes` later ones; then it
    blocks all behind it until it fits, so it cannot starve. Nor is the queue searched deeper.
    """

    def __init__(
        self, manager: KVCacheManager, *, max_prefill_rows: int = 1, max_overtakes: int = 16
    ) -> None:
        self._manager = manager
        self._max_rows = max_prefill_rows
        self._max_overtakes = max_overtakes
        self._queue: deque[_Waiting] = deque()

    def __len__(self) -> int:
        """Sequences waiting."""
        return len(self._queue)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; the caller knows that it fits an empty pool."""
        self._queue.append(_Waiting(sequence))

    def remove(self, sequence: Sequence) -> None:
        """Forget a waiting sequence."""
        found = next(waiting for waiting in self._queue if waiting.sequence is sequence)
        self._queue.remove(found)

    def plan(self) -> Plan | None:
        """Admit what fits and plan its prefill; None when nothing fits or nothing waits.

        Admission takes the row and the pages, so a plan that is returned must be launched.
        """
        rows: list[Row] = []
        while len(rows) < self._max_rows and self._manager.rows_free > 0:
            waiting = self._next()
            if waiting is None:
                break
            rows.append(self._admit(waiting))
        return Plan(LaunchKind.PREFILL, tuple(rows)) if rows else None

    def _next(self) -> _Waiting | None:
        """The first that fits, unless one before it was overtaken often enough."""
        for waiting in islice(self._queue, self._max_overtakes + 1):
            if self._manager.can_admit(waiting.sequence):
                return waiting
            if waiting.overtaken >= self._max_overtakes:
                return None
        return None

    def _admit(self, admitted: _Waiting) -> Row:
        for waiting in self._queue:
            if waiting is admitted:
                break
            waiting.overtaken += 1
        self._queue.remove(admitted)
        sequence = admitted.sequence
        prefix = self._manager.admit(sequence)
        return Row(sequence, sequence.prefix_length, len(sequence.prompt), prefix)
