"""Measured costs of steps that verify draft tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from legato_engine.runtime.backend import Backend
from legato_engine.runtime.request_descriptors import EXACT
from legato_engine.runtime.resources import Resources
from legato_engine.speculative.costs import CostTable

Progress = Callable[[float], None]

_TIMES = 5
_PAIRS = 3
_ENOUGH = 0.1  # seconds of measuring one shape, after which it is not measured again
_LONG = 0.1  # seconds of a step, after which larger ones may be estimated
_STEEP = 4  # if it takes so many times the first, so that positions take its time, not weights
_CONTEXT = 850  # positions: an image and a short answer
_SLOT = 0


class StepCosts:
    """Times a backend's steps over the first slot's buffers; nothing may be in flight.

    A start waits for these steps, so long ones are timed fewer times, as what disturbs a short one
    hardly shows in them, and on a CPU alone, as they do not overlap there. The shortest time of a
    shape counts, because other load, and what is cold at first, only lengthen it.

    The context that rows read is the scratch page, so no sequence's pages are written to.
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

    def table(self, progress: Progress = lambda fraction: None) -> CostTable:
        """Measure all costs; `progress` is called with the fraction done."""
        steps: list[tuple[int, float]] = []
        for bucket, seconds in self.steps(progress):
            if steps and bucket > steps[-1][0] + 1:
                steps.append((steps[-1][0] + 1, seconds))  # a step is padded to its bucket
            steps.append((bucket, seconds))
        return CostTable(steps=tuple(steps), prefill=0.0, propose=self.propose())

    def steps(self, progress: Progress = lambda fraction: None) -> tuple[tuple[int, float], ...]:
        """Seconds of a step by bucket, made monotonic.

        Beyond a long step they are on the line from the first step through that one.
        """
        buckets = self._backend.buckets
        seconds: list[float] = []
        for done, bucket in enumerate(buckets):
            progress(done / (len(buckets) + 1))
            seconds.append(self._seconds(bucket))
            if seconds[-1] > max(_LONG, _STEEP * seconds[0]):
                break
        measured = tuple(zip(buckets, accumulate(seconds, max), strict=False))
        return (*measured, *_on_line(measured[0], measured[-1], buckets[len(measured) :]))

    def propose(self) -> float:
        """Seconds of one more draft token in the longest block.

        It is the small difference of two steps, so both are timed in turn.
        """
        block, least = self._drafts.max_block, self._backend.buckets[0]
        pairs = [
            (self._seconds(least, block, times=1), self._seconds(least, times=1))
            for _ in range(_PAIRS)
        ]
        proposing, plain = (min(each) for each in zip(*pairs, strict=True))
        seconds: float = max(0.0, proposing - plain) / block
        return seconds

    def _seconds(self, bucket: int, block: int = 0, *, times: int = _TIMES) -> float:
        """The shortest of full steps after a proposal of `block` tokens."""
        rooms = self._rooms(bucket)
        staged = self._slot.staged.host
        staged["scheduled_row"].fill(self._drafts.scratch_row)
        staged["scheduled_row"][: len(rooms)] = range(len(rooms))
        staged["room"][: len(rooms)] = rooms
        staged["control"][:] = EXACT, self._drafts.proposal_for(block)
        seconds: list[float] = []
        end = time.monotonic() + _ENOUGH
        while not seconds or (len(seconds) < times and time.monotonic() < end):
            seconds.append(self._timed(bucket, len(rooms)))
        staged["scheduled_row"].fill(self._drafts.scratch_row)
        staged["control"].fill(0)
        self._device.compute.submit(self._drafts.clear)
        self._device.compute.record().wait()
        return min(seconds)

    def _rooms(self, bucket: int) -> Sequence[int]:
        """Draft tokens of each row, so that all rows together fill the bucket."""
        rows = min(bucket, self._num_rows)
        counts = (bucket // rows + (row < bucket % rows) for row in range(rows))
        return [min(count - 1, self._drafts.max_block) for count in counts]

    def _timed(self, bucket: int, num_rows: int) -> float:
        """Time a step; on a GPU one that is enqueued while another runs, as in service."""
        compute = self._device.compute
        spare = 2 * self._drafts.max_block + 2
        compute.submit(lambda: self._drafts.rehearse(self._context, spare=spare))
        if self._device.torch_device.type != "cpu":
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


def _on_line(
    first: tuple[int, float], last: tuple[int, float], buckets: Sequence[int]
) -> Iterator[tuple[int, float]]:
    (least, fastest), (most, slowest) = first, last
    for bucket in buckets:
        yield bucket, fastest + (slowest - fastest) * (bucket - least) / (most - least)
