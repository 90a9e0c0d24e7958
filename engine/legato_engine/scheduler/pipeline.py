"""The launches in flight."""

from __future__ import annotations

from collections import deque

from legato_engine.scheduler.launch import Launch, Phase, Plan
from legato_engine.sequence import Sequence

NUM_SLOTS = 2


class Pipeline:
    """Launches in flight, first in, first out, at most `depth`, which `resize` changes.

    A launch has a slot from `launch` to `commit`, and a reference on each of its sequences. At most
    one is not sampled yet.
    """

    def __init__(self, depth: int) -> None:
        self.depth = _checked(depth)
        self._free_slots = deque(range(NUM_SLOTS))
        self._inflight: deque[Launch] = deque()
        self._num_launched = 0

    def __len__(self) -> int:
        return len(self._inflight)

    def resize(self, depth: int) -> None:
        assert len(self) < _checked(depth), f"depth {depth} leaves no slot beside {len(self)}"
        self.depth = depth

    def can_launch(self) -> bool:
        return len(self._inflight) < self.depth and self.unsampled() is None

    def launch(self, plan: Plan) -> Launch:
        assert self.can_launch(), f"{len(self)} of {self.depth} in flight, or unsampled"
        used = NUM_SLOTS - len(self._free_slots)
        assert used == len(self._inflight), f"{used} slots used by {len(self._inflight)} launches"
        launch = Launch(self._num_launched, self._free_slots.popleft(), plan, self.depth)
        self._num_launched += 1
        self._inflight.append(launch)
        for row in plan.rows:
            sequence = row.sequence
            assert not sequence.finalized, f"sequence {sequence.seq_id} launched when finalized"
            sequence.inflight_refs += 1
            assert sequence.inflight_refs <= self.depth, (
                f"sequence {sequence.seq_id} is in {sequence.inflight_refs} launches"
            )
        return launch

    def oldest(self) -> Launch | None:
        return self._inflight[0] if self._inflight else None

    def unsampled(self) -> Launch | None:
        """Always the newest launch."""
        if self._inflight and self._inflight[-1].phase is Phase.FORWARD:
            return self._inflight[-1]
        return None

    def mark_sampled(self, launch: Launch) -> None:
        assert launch is self.unsampled(), f"launch {launch.launch_id} is not the unsampled one"
        launch.phase = Phase.SAMPLED

    def commit(self, launch: Launch) -> list[Sequence]:
        """Free the slot; return finalized or preempted sequences that no launch names any more."""
        assert launch is self.oldest(), f"launch {launch.launch_id} is not the oldest in flight"
        assert launch.phase is Phase.SAMPLED, f"launch {launch.launch_id} commits unsampled"
        self._inflight.popleft()
        self._free_slots.append(launch.slot)
        launch.phase = Phase.COMMITTED
        releasable = []
        for row in launch.plan.rows:
            sequence = row.sequence
            sequence.inflight_refs -= 1
            assert sequence.inflight_refs >= 0, f"sequence {sequence.seq_id} has negative refs"
            if sequence.inflight_refs == 0 and (sequence.finalized or sequence.preempted):
                releasable.append(sequence)
        return releasable


def _checked(depth: int) -> int:
    assert 1 <= depth <= NUM_SLOTS, f"depth {depth} is not 1 (blocking) or 2 (pipelined)"
    return depth
