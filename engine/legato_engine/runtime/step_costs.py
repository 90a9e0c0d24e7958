"""What decodes that verify proposals cost here, measured before anybody is served."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import accumulate

from legato_engine.device.base import Device
from legato_engine.megakernel.costs import CostTable
from legato_engine.runtime.backend import Backend
from legato_engine.runtime.decode_slot import DecodeSlot
from legato_engine.runtime.draft_state import DraftState

_TIMES = 5
_CONTEXT = 850  # positions that a row reads: a picture and a short answer, where there is room
_SLOT = 0


class StepCosts:
    """Times steps of a `program` over one slot's buffers; nothing may be in flight, or live.

    Rows stand behind as much context as an answer about a picture has. All of it is the scratch
    page's, so nobody's pages are written to.
    """

    def __init__(
        self,
        device: Device,
        program: Backend,
        slot: DecodeSlot,
        drafts: DraftState,
        *,
        num_rows: int,
        max_context: int,
    ) -> None:
        """`slot` is the program's first; `num_rows` can be live at once."""
        self._device = device
        self._backend = program
        self._slot = slot
        self._drafts = drafts
        self._num_rows = num_rows
        self._context = min(_CONTEXT, max_context // 2)

    def table(self) -> CostTable:
        """All of it, as the policies weigh by."""
        steps: list[tuple[int, float]] = []
        for bucket, seconds in self.steps():
            if steps and bucket > steps[-1][0] + 1:
                steps.append((steps[-1][0] + 1, seconds))  # a step is padded to its bucket
            steps.append((bucket, seconds))
        return CostTable(steps=tuple(steps), prefill=0.0, propose=self.propose())

    def steps(self) -> tuple[tuple[int, float], ...]:
        """Seconds of a step of so many tokens, by each size that there is.

        The tokens are those of all rows, as many of each, or of fewer rows if there are less. More
        tokens never take less, whatever the clock said.
        """
        buckets = self._backend.buckets
        seconds = accumulate((self._seconds(bucket) for bucket in buckets), max)
        return tuple(zip(buckets, seconds, strict=True))

    def propose(self) -> float:
        """Seconds of one more token of the longest block."""
        block, least = self._drafts.max_block, self._backend.buckets[0]
        return max(0.0, self._seconds(least, block) - self._seconds(least)) / block

    def _seconds(self, bucket: int, block: int = 0) -> float:
        """The median of steps over a full bucket, `block` tokens proposed in front of each."""
        lanes = self._lanes(bucket)
        staged = self._slot.staged.host
        staged["row"].fill(self._drafts.scratch_row)
        staged["draft_index"].fill(0)
        staged["row"][: len(lanes)] = [row for row, _ in lanes]
        staged["draft_index"][: len(lanes)] = [lane for _, lane in lanes]
        self._slot.num_drafts = block
        times = sorted(self._second_of_two(bucket, lanes[-1][0] + 1) for _ in range(_TIMES))
        self._device.compute.submit(self._drafts.clear)
        self._device.compute.record().wait()
        return statistics.median(times)

    def _lanes(self, bucket: int) -> Sequence[tuple[int, int]]:
        """Rows and their lanes, a row's beside each other."""
        rows = min(bucket, self._num_rows)
        counts = (bucket // rows + (row < bucket % rows) for row in range(rows))
        most = self._drafts.max_block + 1
        return [(row, lane) for row, n in enumerate(counts) for lane in range(min(n, most))]

    def _second_of_two(self, bucket: int, num_rows: int) -> float:
        """The host enqueues it while the first one runs, as it does in service."""
        compute = self._device.compute
        compute.submit(lambda: self._drafts.rehearse(self._context))
        self._step(bucket, num_rows)
        start = compute.record()
        self._step(bucket, num_rows)
        stop = compute.record()
        stop.wait()
        return (stop.time_ns() - start.time_ns()) / 1e9

    def _step(self, bucket: int, num_rows: int) -> None:
        self._slot.staged.upload(self._device.compute)
        self._backend.decode(_SLOT, bucket, 0, num_rows)
        self._backend.sample(_SLOT, bucket, sampled=False, payload=False)
