"""Who leaves the waiting queue next, and whose picture is being encoded."""

from __future__ import annotations

import dataclasses

from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.kv_cache.prefix_work import PrefixWork
from legato_engine.scheduler.launch import LaunchKind, Plan, Row
from legato_engine.scheduler.waiting import WaitingQueue
from legato_engine.sequence import Sequence


@dataclasses.dataclass(slots=True, eq=False)
class _Encoding:
    """An admitted sequence with a part of its picture encoded."""

    sequence: Sequence
    work: PrefixWork  # its `first_crop` is the next to encode


class PrefillPlanner:
    """Admits those who wait, in the order of their `WaitingQueue`, as far as they fit.

    Once a part of a picture is encoded, its sequence is the only one planned until its prefill: the
    device has one feature buffer.
    """

    def __init__(
        self, manager: KVCacheManager, queue: WaitingQueue, *, max_prefill_rows: int = 1
    ) -> None:
        self._manager = manager
        self._max_rows = max_prefill_rows
        self._queue = queue
        self._encoding: _Encoding | None = None

    def __len__(self) -> int:
        """Sequences waiting; one whose picture is being encoded waits no more."""
        return len(self._queue)

    @property
    def due(self) -> bool:
        """Whether `plan` has anything to look at."""
        return bool(self._queue) or self._encoding is not None

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; the caller knows that it fits an empty pool."""
        self._queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence whose prefill is not planned yet; what it holds is the caller's."""
        if self._encoding is not None and self._encoding.sequence is sequence:
            self._encoding = None
            return
        self._queue.remove(sequence)

    def plan(self, max_crops: int = 0) -> Plan | None:
        """Admit what fits and plan its prefill; None when nothing fits or nothing waits.

        A picture of more than `max_crops` crops that nobody has computed is encoded first, that
        many crops at a time; 0 never splits, and lets the prefill encode what is left of a picture
        already begun. Admission takes the row and the pages, so a plan that is returned must be
        launched.
        """
        if self._encoding is not None:
            return self._continue(self._encoding, max_crops)
        rows: list[Row] = []
        while len(rows) < self._max_rows and self._manager.rows_free > 0:
            sequence = self._queue.first(self._manager.can_admit, self._manager.lacks_adapter_slot)
            if sequence is None:
                break
            large = 0 < max_crops < sequence.num_crops
            if large and rows:
                break  # an encode is a launch of its own
            self._queue.take(sequence)
            work = self._manager.admit(sequence)
            if large and work.compute_pages:
                return self._continue(_Encoding(sequence, work), max_crops)
            rows.append(_prefill_row(sequence, work))
        return Plan(LaunchKind.PREFILL, tuple(rows)) if rows else None

    def _continue(self, encoding: _Encoding, max_crops: int) -> Plan:
        """The next crops of a picture, or its prefill when all are encoded or may be at once."""
        sequence, work = encoding.sequence, encoding.work
        if max_crops == 0 or work.first_crop == sequence.num_crops:
            self._encoding = None
            return Plan(LaunchKind.PREFILL, (_prefill_row(sequence, work),))
        self._encoding = encoding
        stop = min(work.first_crop + max_crops, sequence.num_crops)
        encoding.work = dataclasses.replace(work, first_crop=stop)
        part = dataclasses.replace(work, stop_crop=stop)
        return Plan(LaunchKind.ENCODE, (Row(sequence, sequence.prefix_length, 0, part),))


def _prefill_row(sequence: Sequence, work: PrefixWork) -> Row:
    """Feed what is not found: the rest of the prompt, and of the answer after a preemption."""
    position = max(sequence.num_cached, sequence.prefix_length)
    return Row(sequence, position, sequence.length - position, work)
