"""The two ping-pong slots and the launches in flight in them."""

from __future__ import annotations

from collections import deque

from legato_engine.scheduler.launch import Launch, Phase, Plan
from legato_engine.sequence import Sequence

NUM_SLOTS = 2


class Pipeline:
    """First in, first out, at most `depth` launches in flight; it knows no kind of work.

    A slot is taken at `launch` and free again only after the `commit` of its launch. At most one
    launch waits for its sampling. Every launch holds one reference on each of its sequences.
    """

    def __init__(self, depth: int) -> None:
        assert 1 <= depth <= NUM_SLOTS, f"depth {depth} is not 1 (blocking) or 2 (pipelined)"
        self.depth = depth
        self._free_slots = deque(range(NUM_SLOTS))
        self._inflight: deque[Launch] = deque()
        self._num_launched = 0

    def __len__(self) -> int:
        """Launches in flight."""
        return len(self._inflight)

    def can_launch(self) -> bool:
        """Whether a slot is free and no launch waits for its sampling."""
        return len(self._inflight) < self.depth and self.unsampled() is None

    def launch(self, plan: Plan) -> Launch:
        """Put a plan into a free slot; the caller has asked `can_launch`."""
        assert self.can_launch(), "launched into a full pipeline or ahead of an unsampled launch"
        held = NUM_SLOTS - len(self._free_slots)
        assert held == len(self._inflight), f"{held} slots held by {len(self._inflight)} launches"
        launch = Launch(self._num_launched, self._free_slots.popleft(), plan)
        self._num_launched += 1
        self._inflight.append(launch)
        for row in plan.rows:
            sequence = row.sequence
            assert not sequence.finalized, f"sequence {sequence.seq_id} launched when finalized"
            sequence.inflight_refs += 1
            assert sequence.inflight_refs <= self.depth, (
                f"sequence {sequence.seq_id} is too far ahead"
            )
        return launch

    def oldest(self) -> Launch | None:
        """The launch to commit next."""
        return self._inflight[0] if self._inflight else None

    def unsampled(self) -> Launch | None:
        """The launch whose sampling is not enqueued yet; only the newest can be."""
        if self._inflight and self._inflight[-1].phase is Phase.FORWARD:
            return self._inflight[-1]
        return None

    def mark_sampled(self, launch: Launch) -> None:
        """Its sampling and its copy back are enqueued."""
        assert launch is self.unsampled(), f"launch {launch.launch_id} is not the unsampled one"
        launch.phase = Phase.SAMPLED

    def commit(self, launch: Launch) -> list[Sequence]:
        """Its tokens have been read: free the slot, drop the references.

        Returns the sequences that nothing in flight names any more and that are finalized or
        preempted: their resources are the caller's to release, now.
        """
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
