"""The waiting sequences, in the order in which they are served."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable
from itertools import count, islice
from operator import attrgetter

from legato_engine.sequence import Sequence


@dataclasses.dataclass(slots=True, eq=False)
class _Waiting:
    sequence: Sequence
    rank: tuple[float, int]  # ascending order of service; unique
    num_overtaken: int = 0  # by sequences of a higher rank that were taken first


_RANK = attrgetter("rank")


class WaitingQueue:
    """Ordered by priority and arrival, with bounded overtaking.

    One step of priority counts as much as arriving `priority_seconds` earlier. So ranks never
    change, and low priorities do not starve.

    A sequence that does not fit may be overtaken `max_overtakes` times; then it blocks all later
    ones. A search skips at most `max_overtakes` sequences.

    A sequence without an adapter slot is overtaken without limit by sequences without adapters, and
    does not count as skipped, because they do not keep slots in use.
    """

    def __init__(self, *, max_overtakes: int, priority_seconds: float) -> None:
        assert max_overtakes >= 0, f"{max_overtakes} overtakes"
        assert priority_seconds >= 0, f"{priority_seconds} seconds"
        self._max_overtakes = max_overtakes
        self._priority_seconds = priority_seconds
        self._queue: list[_Waiting] = []  # by rank
        self._num_by_tenant: Counter[str] = Counter()  # without zeros
        self._added = count()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; equal priorities and arrivals keep their order."""
        waiting = _Waiting(sequence, (self._time_of(sequence), next(self._added)))
        insort(self._queue, waiting, key=_RANK)
        self._num_by_tenant[sequence.request.tenant] += 1

    def remove(self, sequence: Sequence) -> None:
        """Remove a queued sequence; it overtakes none."""
        self._pop(self.position(sequence))

    def first(
        self,
        fits: Callable[[Sequence], bool],
        lacks_slot: Callable[[Sequence], bool] = lambda sequence: False,
    ) -> Sequence | None:
        """Return the first sequence that fits and is not blocked by an earlier one."""
        num_skipped, slots_blocked = 0, False
        for waiting in self._queue:
            sequence = waiting.sequence
            blocks = waiting.num_overtaken >= self._max_overtakes
            if lacks_slot(sequence):
                slots_blocked = slots_blocked or blocks
            elif slots_blocked and sequence.adapter.key:
                continue
            elif fits(sequence):
                return sequence
            elif blocks or num_skipped == self._max_overtakes:
                return None
            else:
                num_skipped += 1
        return None

    def take(self, sequence: Sequence) -> None:
        """Remove a queued sequence that overtakes all sequences before it."""
        index = self.position(sequence)
        for waiting in islice(self._queue, index):
            waiting.num_overtaken += 1
        self._pop(index)

    def position(self, sequence: Sequence) -> int:
        """Return how many sequences are before a queued one."""
        index = bisect_right(self._queue, (self._time_of(sequence), -1), key=_RANK)
        while self._queue[index].sequence is not sequence:
            index += 1
        return index

    def num_ahead(self, sequence: Sequence) -> int:
        """Return how many sequences would be before one that is not queued yet."""
        return bisect_right(self._queue, self._time_of(sequence), key=lambda each: each.rank[0])

    def num_of(self, tenant: str) -> int:
        """Return the number of a tenant's waiting sequences."""
        return self._num_by_tenant[tenant]

    def _pop(self, index: int) -> None:
        tenant = self._queue.pop(index).sequence.request.tenant
        self._num_by_tenant[tenant] -= 1
        if not self._num_by_tenant[tenant]:
            del self._num_by_tenant[tenant]

    def _time_of(self, sequence: Sequence) -> float:
        return sequence.timing.arrival - sequence.request.priority * self._priority_seconds
