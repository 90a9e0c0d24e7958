"""Running sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from legato_engine.kv_cache.manager import KVCacheManager
from legato_engine.scheduler.waiting_queue import WaitingQueue
from legato_engine.sequence import Sequence, SequenceStatus


class RunningSequences:
    """Sequences with a row, zombies excluded. Those that begin with the same page are neighbours,
    as attention of the resident kernel reads leading pages once for neighbours that have them in
    common; otherwise in order of admission.

    When no page is available, the sequence with the lowest `preemption_rank` gives up its pages and
    waits again. One with no lower-ranked victim stalls until another finishes.

    There is no livelock: ranks never change, and each admission gains a token because a sequence is
    preempted only after its prefill is launched.
    """

    def __init__(self, manager: KVCacheManager, queue: WaitingQueue[Sequence]) -> None:
        self._manager = manager
        self._queue = queue
        self._members: dict[Sequence, None] = {}

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def add(self, sequence: Sequence) -> None:
        """Insert it behind the last sequence that begins with the same page, or at the end."""
        members = list(self._members)
        first = sequence.pages.ids[:1]
        same = [i for i, each in enumerate(members) if each.pages.ids[:1] == first]
        members.insert(same[-1] + 1 if same else len(members), sequence)
        self._members = dict.fromkeys(members)

    def remove(self, sequence: Sequence) -> None:
        """Release the sequence unless a launch in flight names it."""
        del self._members[sequence]
        if sequence.inflight_refs == 0:
            self._manager.release(sequence)

    def settle(self, sequence: Sequence) -> None:
        """Release a sequence that no launch in flight names any more."""
        if sequence.finalized:
            self._manager.release(sequence)
        else:
            self._requeue(sequence)

    def grow(self, short: Iterable[Sequence]) -> None:
        """Give each a page while pages last, highest rank first."""
        for sequence in sorted(short, key=preemption_rank, reverse=True):
            while sequence in self._members and not sequence.preempted:
                if self._manager.grow(sequence) or not self._preempt_for(sequence):
                    break

    def _preempt_for(self, sequence: Sequence) -> bool:
        """Preempt the lowest-ranked sequence below `sequence`; whether pages became free.

        While launches in flight name the victim, no other is preempted.
        """
        if any(each.preempted for each in self._members):
            return False
        victim = min(self._victims(), key=preemption_rank, default=sequence)
        if preemption_rank(victim) >= preemption_rank(sequence):
            return False
        victim.preempted = True
        if victim.inflight_refs:
            return False
        self._requeue(victim)
        return True

    def _victims(self) -> Iterator[Sequence]:
        for sequence in self._members:
            if sequence.progress.last_position >= 0 and self._manager.frees_pages(sequence):
                yield sequence

    def _requeue(self, sequence: Sequence) -> None:
        del self._members[sequence]
        self._manager.preempt(sequence)
        sequence.preempted = False
        sequence.progress.last_position = -1
        sequence.status = SequenceStatus.WAITING
        self._queue.add(sequence)


def preemption_rank(sequence: Sequence) -> tuple[int, float, int]:
    """Unique; the lowest is preempted first."""
    return (sequence.request.priority, -sequence.timing.arrival, -sequence.seq_id)
