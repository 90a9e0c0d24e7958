"""Requests of fixed length, for benchmarks and traces."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
from PIL import Image

from legato_engine.assembly import Assembly
from legato_engine.core import (
    CachedImage,
    CaptionTask,
    Event,
    FinishReason,
    ImageInfo,
    QueryTask,
    Request,
    SamplingParams,
    TaskResult,
)
from legato_engine.engine import make_sequence
from legato_engine.models.model import PreparedImage
from legato_engine.sequence import Sequence
from legato_engine.tasks import SampledToken, Task

KINDS = ("query", "caption")
_PICTURE = (480, 640)  # height, width
_UNFORESEEN = 2  # tokens that a task could still sample behind its end: as many as are in flight


class FixedLengthTask:
    """A task that ends itself with its `length`-th token; its inner task reads them until its end.

    The scheduler cannot foresee the end, as with a stop token, so each request leaves a zombie.
    """

    def __init__(self, inner: Task, length: int) -> None:
        self._inner = inner
        self._remaining = length
        self.prompt = inner.prompt
        self.sampling = inner.sampling
        self.max_tokens = length + _UNFORESEEN
        self.constrained = False
        self.has_payload = inner.has_payload
        self.finish_reason: FinishReason | None = None
        self._constraint = inner.constraint()

    def constraint(self) -> int:
        """The inner task's first."""
        return self._constraint

    def consume(self, token: SampledToken) -> Many[Event]:
        """What the inner task makes of the token."""
        self._remaining -= 1
        if self._remaining == 0:
            self.finish_reason = FinishReason.STOP
        return self._inner.consume(token) if self._inner.finish_reason is None else ()

    def result(self, finish_reason: FinishReason) -> TaskResult:
        """The inner task's result."""
        return self._inner.result(finish_reason)

    @property
    def reasoning_tokens(self) -> int:
        """The inner task's."""
        return self._inner.reasoning_tokens


class Workload:
    """`count` equal requests of `length` tokens; `kind` is one of `KINDS`."""

    def __init__(self, assembly: Assembly, *, kind: str, count: int, length: int) -> None:
        self._frontend = assembly.frontend
        self._count = count
        self._length = length
        sampling = SamplingParams(temperature=0.0, max_tokens=length, seed=0)
        self._image: PreparedImage | None = None
        if kind == "query":
            self._request = Request(
                request_id="query", task=QueryTask(question="What is there?"), sampling=sampling
            )
        else:
            info = ImageInfo(image_id="bench", width=640, height=480, cache_hit=False)
            pixels = np.random.default_rng(0).integers(0, 256, (*_PICTURE, 3), dtype=np.uint8)
            self._image = self._frontend.prepare_image(Image.fromarray(pixels), "bench", info)
            self._request = Request(
                request_id="caption",
                task=CaptionTask(),
                image=CachedImage(image_id=info.image_id),
                sampling=sampling,
            )

    @property
    def num_tokens(self) -> int:
        """Tokens that all requests together generate."""
        return self._count * self._length

    def sequences(self) -> list[Sequence]:
        """Fresh sequences, in the order to submit."""
        return [self._sequence(index) for index in range(self._count)]

    def _sequence(self, index: int) -> Sequence:
        request = Request(
            request_id=f"{self._request.request_id}-{index}",
            task=self._request.task,
            image=self._request.image,
            sampling=self._request.sampling,
        )
        sequence = make_sequence(self._frontend, request, self._image)
        sequence.task = FixedLengthTask(sequence.task, self._length)
        return sequence
