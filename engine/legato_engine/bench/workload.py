"""Requests of a fixed length, for benchmarks and traces."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence as Many

import numpy as np
from PIL import Image

from legato_engine.core.events import Event
from legato_engine.core.images import CachedImage, ImageInfo
from legato_engine.core.request_key import RequestKey
from legato_engine.core.requests import Request, SamplingParams
from legato_engine.core.results import FinishReason, TaskResult
from legato_engine.core.task_specs import CaptionTask, DetectTask, QueryTask, TaskSpec
from legato_engine.core.tokens import PromptToken
from legato_engine.engine.assembly import Assembly
from legato_engine.engine.sequences import make_sequence
from legato_engine.errors import InvalidField
from legato_engine.models.frontend import PreparedImage
from legato_engine.sequence import Sequence
from legato_engine.tasks import Constraint, SampledToken, Task

_IMAGE_SIZE = (480, 640)  # height, width
_IN_FLIGHT = 2  # tokens that a task may still sample after its end


class FixedLengthTask:
    """Ends with its `length`-th token; the inner task reads tokens until its own end.

    The scheduler cannot foresee the end, so each request leaves a zombie. `constraints` replace
    those of the inner task.
    """

    def __init__(
        self, inner: Task, length: int, prompt: tuple[PromptToken, ...], constraints: Many[int]
    ) -> None:
        self._inner = inner
        self._remaining = length
        self._constraints = constraints
        self.prompt = prompt
        self.sampling = inner.sampling
        self.max_tokens = length + _IN_FLIGHT
        self.constrained = inner.constrained
        self.follows_table = False  # goes on where the inner task's list ends
        self.has_payload = inner.has_payload
        self.finish_reason: FinishReason | None = None

    def constraint(self) -> int:
        return self._constraints[self._inner.constraint()]

    def consume(self, token: SampledToken) -> Many[Event]:
        self._remaining -= 1
        if self._remaining == 0:
            self.finish_reason = FinishReason.STOP
        return self._inner.consume(token) if self._inner.finish_reason is None else ()

    def result(self, finish_reason: FinishReason) -> TaskResult:
        return self._inner.result(finish_reason)

    @property
    def reasoning_tokens(self) -> int:
        return self._inner.reasoning_tokens


def fixed_length(sequence: Sequence, length: int, context: int, constraints: Many[int]) -> Sequence:
    missing = max(0, context - sequence.prompt_length)
    prompt = (*itertools.islice(itertools.cycle(sequence.prompt), missing), *sequence.prompt)
    task = FixedLengthTask(sequence.task, length, prompt, constraints)
    return dataclasses.replace(sequence, task=task, prompt=prompt)


class Workload:
    """`count` equal requests of `length` tokens, their prompt repeated up to position `context`.

    Requests share no page, so a step reads every row's context.

    Raises:
        InvalidField: the prompt alone is longer than `context`, or no task can be made of it.
    """

    def __init__(
        self, assembly: Assembly, *, kind: str, count: int, length: int, context: int = 0
    ) -> None:
        self._frontend = assembly.frontend
        self._kind = kind
        self._count = count
        self._length = length
        self._constraints = endless(self._frontend.constraints)
        self._image: PreparedImage | None = None
        if kind != "query":
            info = ImageInfo(image_id="bench", width=640, height=480, cache_hit=False)
            pixels = np.random.default_rng(0).integers(0, 256, (*_IMAGE_SIZE, 3), dtype=np.uint8)
            self._image = self._frontend.prepare_image(Image.fromarray(pixels), "bench", info)
        natural = self._natural(0).prompt_length
        if context and context < natural:
            raise InvalidField(f"a {kind} has a context of {natural} tokens", field="context")
        self.context = context or natural

    @property
    def num_tokens(self) -> int:
        return self._count * self._length

    def sequences(self) -> list[Sequence]:
        return [self._sequence(index) for index in range(self._count)]

    def _sequence(self, index: int) -> Sequence:
        return fixed_length(self._natural(index), self._length, self.context, self._constraints)

    def _natural(self, index: int) -> Sequence:
        request = Request(
            request_id=RequestKey(f"{self._kind}-{index}"),
            task=self._task(),
            image=None if self._image is None else CachedImage(image_id="bench"),
            sampling=SamplingParams(temperature=0.0, max_tokens=self._length, seed=0),
            cache_image=False,
        )
        return make_sequence(self._frontend, request, self._image)

    def _task(self) -> TaskSpec:
        if self._kind == "query":
            return QueryTask(question="What is there?")
        if self._kind == "caption":
            return CaptionTask()
        return DetectTask(
            object="cat", max_objects=self._length
        )  # more than its tokens suffice for


def endless(constraints: Many[Constraint]) -> tuple[int, ...]:
    """Replace each constraint by the widest that allows a proper subset of its tokens.

    A list then never ends.
    """
    return tuple(_narrowed(constraints, index) for index in range(len(constraints)))


def _narrowed(constraints: Many[Constraint], index: int) -> int:
    allowed = set(constraints[index].allowed or ())
    narrower = [
        (len(other.allowed), -number)
        for number, other in enumerate(constraints)
        if other.allowed and set(other.allowed) < allowed
    ]
    return -max(narrower)[1] if narrower else index
