"""Those who wait, in the order in which they are served."""

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
    rank: tuple[float, int]  # served in ascending order; no two are equal
    overtaken: int = 0  # by sequences of a higher rank that were taken first


_RANK = attrgetter("rank")


class WaitingQueue:
    """By priority, then first come, first served, with bounded skip-ahead.

    A step of priority is worth `priority_seconds` seconds of waiting: a sequence is served before
    another one if it arrived earlier, both times put back by what their priorities are worth. So a
    rank never changes, and a low priority does not starve: whoever is `n` steps above it passes it
    only by arriving less than `n * priority_seconds` after it.

    A sequence that does not fit right now may be overtaken by `max_overtakes` sequences that rank
    behind it; then it blocks all of those until it fits. Nor is the queue searched deeper.

    A sequence that lacks an adapter slot blocks only those behind it that have adapters, as only
    they can keep the slots held; others pass it however often, and do not count as searched.
    """

    def __init__(self, *, max_overtakes: int, priority_seconds: float) -> None:
        assert max_overtakes >= 0, f"{max_overtakes} overtakes"
        assert priority_seconds >= 0, f"{priority_seconds} seconds"
        self._max_overtakes = max_overtakes
        self._priority_seconds = priority_seconds
        self._queue: list[_Waiting] = []  # by rank
        self._of_tenant: Counter[str] = Counter()  # none that is 0
        self._added = count()

    def __len__(self) -> int:
        """Sequences waiting."""
        return len(self._queue)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; of two that rank alike the one added first goes first."""
        waiting = _Waiting(sequence, (self._time_of(sequence), next(self._added)))
        insort(self._queue, waiting, key=_RANK)
        self._of_tenant[sequence.request.tenant] += 1

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that is queued; nobody counts as overtaken."""
        self._pop(self.position(sequence))

    def first(
        self,
        fits: Callable[[Sequence], bool],
        lacks_slot: Callable[[Sequence], bool] = lambda sequence: False,
    ) -> Sequence | None:
        """The first that fits, unless one before it was overtaken often enough."""
        depth, slots_are_due = 0, False
        for waiting in self._queue:
            sequence = waiting.sequence
            patient = waiting.overtaken < self._max_overtakes
            if lacks_slot(sequence):
                slots_are_due = slots_are_due or not patient
            elif slots_are_due and sequence.adapter.key:
                continue
            elif fits(sequence):
                return sequence
            elif not patient or depth == self._max_overtakes:
                return None
            else:
                depth += 1
        return None

    def take(self, sequence: Sequence) -> None:
        """Let a sequence go that is queued; it has overtaken those before it."""
        index = self.position(sequence)
        for waiting in islice(self._queue, index):
            waiting.overtaken += 1
        self._pop(index)

    def position(self, sequence: Sequence) -> int:
        """How many are served before a sequence that is queued."""
        index = bisect_right(self._queue, (self._time_of(sequence), -1), key=_RANK)
        while self._queue[index].sequence is not sequence:
            index += 1
        return index

    def num_ahead(self, sequence: Sequence) -> int:
        """How many would be served before a sequence that is not queued yet."""
        return bisect_right(self._queue, self._time_of(sequence), key=lambda each: each.rank[0])

    def num_of(self, tenant: str) -> int:
        """Sequences of a tenant that wait."""
        return self._of_tenant[tenant]

    def _pop(self, index: int) -> None:
        tenant = self._queue.pop(index).sequence.request.tenant
        self._of_tenant[tenant] -= 1
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]

    def _time_of(self, sequence: Sequence) -> float:
        return sequence.timing.arrival - sequence.request.priority * self._priority_seconds
