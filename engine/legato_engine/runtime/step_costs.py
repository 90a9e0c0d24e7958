"""Measured costs of decode steps that verify draft tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import accumulate

from legato_engine.runtime.backend import Backend
from legato_engine.runtime.resources import Resources
from legato_engine.speculative.costs import CostTable

_TIMES = 5
_CONTEXT = 850  # positions that a row reads, if it may: an image and a short answer
_SLOT = 0


class StepCosts:
    """Times a backend's steps over the first slot's buffers; nothing may be in flight or running.

    Rows read the context of an answer about an image. All of it is the scratch page, so no
    sequence's pages are written to.
    """

    def __init__(self, resources: Resources, backend: Backend) -> None:
        state = resources.state
        assert state.drafts is not None, "costs are of speculation, which is off"
        self._device = resources.device
        self._backend = backend
        self._slot = resources.slots[_SLOT]
        self._drafts = state.drafts
        self._num_rows = state.scratch_row
        self._context = min(_CONTEXT, resources.model.max_context // 2)

    def table(self) -> CostTable:
        """Measure the table that policies weigh draft lengths by."""
        steps: list[tuple[int, float]] = []
        for bucket, seconds in self.steps():
            if steps and bucket > steps[-1][0] + 1:
                steps.append((steps[-1][0] + 1, seconds))  # a step is padded to its bucket
            steps.append((bucket, seconds))
        return CostTable(steps=tuple(steps), prefill=0.0, propose=self.propose())

    def steps(self) -> tuple[tuple[int, float], ...]:
        """Measure the seconds of a step for each bucket, made monotonic in its tokens.

        The tokens are spread evenly over as many rows as there are, or over one row each.
        """
        buckets = self._backend.buckets
        seconds = accumulate((self._seconds(bucket) for bucket in buckets), max)
        return tuple(zip(buckets, seconds, strict=True))

    def propose(self) -> float:
        """Measure the seconds of proposing one more draft token, in the longest block."""
        block, least = self._drafts.max_block, self._backend.buckets[0]
        return max(0.0, self._seconds(least, block) - self._seconds(least)) / block

    def _seconds(self, bucket: int, block: int = 0) -> float:
        """Take the median of full steps, each after a proposal of `block` draft tokens."""
        tokens = self._tokens(bucket)
        staged = self._slot.staged.host
        staged["row"].fill(self._drafts.scratch_row)
        staged["draft_index"].fill(0)
        staged["row"][: len(tokens)] = [row for row, _ in tokens]
        staged["draft_index"][: len(tokens)] = [index for _, index in tokens]
        self._slot.num_drafts = block
        times = sorted(self._second_of_two(bucket, tokens[-1][0] + 1) for _ in range(_TIMES))
        self._device.compute.submit(self._drafts.clear)
        self._device.compute.record().wait()
        return statistics.median(times)

    def _tokens(self, bucket: int) -> Sequence[tuple[int, int]]:
        """Row and draft index of each token, those of a row adjacent."""
        rows = min(bucket, self._num_rows)
        counts = (bucket // rows + (row < bucket % rows) for row in range(rows))
        most = self._drafts.max_block + 1
        return [(row, index) for row, n in enumerate(counts) for index in range(min(n, most))]

    def _second_of_two(self, bucket: int, num_rows: int) -> float:
        """Time a step that the host enqueues while another one runs, as in service."""
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
