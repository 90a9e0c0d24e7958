"""Those who hold a row: how they grow, and who of them gives way when pages run out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.waiting import WaitingQueue
from legato_engine.sequence import Sequence, SequenceStatus


class Running:
    """Sequences with a row, in the order of their admission.

    When no page is free or idle, the lowest by `standing` gives all of its own to those above it
    and waits again, and whoever nobody stands below goes on without a token until somebody ends.
    A standing never changes, so the highest always gets its page and nobody preempts in a circle;
    and everybody gains a token each time, as none is preempted before its prefill is launched.
    """

    def __init__(self, manager: KVCacheManager, queue: WaitingQueue) -> None:
        self._manager = manager
        self._queue = queue
        self._members: dict[Sequence, None] = {}

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of their admission."""
        return iter(self._members)

    def __len__(self) -> int:
        """Sequences with a row, zombies left out."""
        return len(self._members)

    def add(self, sequence: Sequence) -> None:
        """It was admitted, and its first launch is enqueued."""
        self._members[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """It is finalized; what it holds is released now unless a launch in flight names it."""
        del self._members[sequence]
        if sequence.inflight_refs == 0:
            self._manager.release(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Nothing in flight names it any more: release it, or queue it again if it is preempted."""
        if sequence.finalized:
            self._manager.release(sequence)
            return
        del self._members[sequence]
        self._manager.preempt(sequence)
        sequence.preempted = False
        sequence.progress.last_position = -1
        sequence.status = SequenceStatus.WAITING
        self._queue.add(sequence)

    def grow(self, short: Iterable[Sequence]) -> None:
        """Give a page to each of these as far as there are any, the highest first."""
        for sequence in sorted(short, key=standing, reverse=True):
            while sequence in self._members and not sequence.preempted:
                if self._manager.grow(sequence) or not self._make_way(sequence):
                    break

    def _make_way(self, sequence: Sequence) -> bool:
        """Preempt whoever stands lowest, if that is below `sequence`; whether pages came free.

        A launch in flight may still name the victim; its pages come when that is committed, and
        until then nobody else is preempted.
        """
        if any(each.preempted for each in self._members):
            return False
        manager = self._manager
        victims = (
            s for s in self._members if s.progress.last_position >= 0 and manager.frees_pages(s)
        )
        victim = min(victims, key=standing, default=sequence)
        if standing(victim) >= standing(sequence):
            return False
        victim.preempted = True
        if victim.inflight_refs:
            return False
        self.settle(victim)
        return True


def standing(sequence: Sequence) -> tuple[int, float, int]:
    """Who keeps its pages: the higher priority, then the earlier arrival. No two are equal."""
    return (sequence.request.priority, -sequence.timing.arrival, -sequence.seq_id)
