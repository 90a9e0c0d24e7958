"""Fakes around the scheduler: a task, a clock and a sink.

They check their callers: the task that it reads no token after its end, the sink that events come
in order.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from legato_engine.errors import LegatoError
from legato_engine.scheduler.interfaces import Clock
from legato_engine.sequence import (
    Constraint,
    HostInputs,
    ImageSpan,
    SampledToken,
    SequenceAdapter,
    Task,
    Timing,
    VisualInputs,
    VisualPrompt,
)
from legato_engine.sequence import Sequence as EngineSequence
from legato_engine.types import (
    Event,
    FinishReason,
    PromptToken,
    QueryOutput,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
    TextEvent,
)

VOCABULARY = 97
STOP_EVERY = 13  # token ids divisible by it end a task
SILENT_EVERY = 5  # token ids divisible by it give no event
LISTS = 8
TABLE = (
    *[Constraint()] * LISTS,
    Constraint(then=LISTS + 1),
    Constraint(then=LISTS + 2),
    Constraint(then=LISTS, on=7),
)
"""The constraints of fake tasks; those from `LISTS` on follow one another."""


def successor(constraints: Sequence[Constraint], constraint: int, token_id: int) -> int:
    """Return the constraint that follows when `token_id` was sampled under `constraint`."""
    current = constraints[constraint]
    if current.then is None or current.on not in (None, token_id):
        return constraint
    return current.then


def sample_token(seed: int, position: int, constraint: int) -> int:
    """Return the token that the fake device samples; depends on all inputs."""
    return zlib.crc32(f"{seed} {position} {constraint}".encode()) % VOCABULARY


class FakeClock(Clock):
    """A clock that advances by hand."""

    def __init__(self, now: float = 100.0) -> None:
        self._now = now

    def now(self) -> float:
        """Seconds."""
        return self._now

    def perf_ns(self) -> int:
        """The same time in nanoseconds."""
        return round(self._now * 1e9)

    def advance(self, seconds: float) -> None:
        """Advance by `seconds`."""
        self._now += seconds


class FakeTask:
    """Reads tokens until a stop token; when constrained, its constraint depends on all of them.

    With `uses_transition_table` by `TABLE`, which a device can do.
    """

    grammar = None

    def __init__(
        self,
        *,
        seed: int = 0,
        num_prompt: int = 1,
        max_tokens: int = 8,
        constrained: bool = False,
        uses_transition_table: bool = False,
        fails_at: int | None = None,
    ) -> None:
        self.prompt = tuple(PromptToken(token_id) for token_id in range(num_prompt))
        self.sampling = SamplingParams(seed=seed)
        self.max_tokens = max_tokens
        self.constrained = constrained
        self.uses_transition_table = uses_transition_table
        self._listed = LISTS
        self.has_payload = constrained
        self.fails_at = fails_at
        self.tokens: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.is_over: Callable[[], bool] = lambda: False

    def constraint(self) -> int:
        """Return a constraint that is never 0; an unconstrained task's never changes."""
        assert self.sampling.seed is not None
        if self.uses_transition_table:
            return self._listed
        return 1 + (sum(self.tokens) % 7 if self.constrained else self.sampling.seed % 3)

    def consume(self, token: SampledToken) -> Sequence[Event]:
        """Record the token; some tokens give no event."""
        assert self.finish_reason is None, "reads a token after its last one"
        assert not self.is_over(), "a zombie committed a token"
        if len(self.tokens) == self.fails_at:
            raise ValueError("this task cannot read its token")
        self.tokens.append(token.token_id)
        self._listed = successor(TABLE, self._listed, token.token_id)
        if token.token_id % STOP_EVERY == 0:
            self.finish_reason = FinishReason.STOP
        return () if token.token_id % SILENT_EVERY == 0 else (TextEvent(text=str(token.token_id)),)

    def result(self, finish_reason: FinishReason) -> QueryOutput:
        """Return all tokens as text."""
        return QueryOutput(answer=" ".join(map(str, self.tokens)))

    @property
    def reasoning_tokens(self) -> int:
        """None."""
        return 0

    def expected_tokens(self, prompt_length: int) -> list[int]:
        """Return the tokens that this task reads when it runs alone."""
        alone = FakeTask(
            max_tokens=self.max_tokens,
            constrained=self.constrained,
            uses_transition_table=self.uses_transition_table,
        )
        alone.sampling = self.sampling
        while alone.finish_reason is None and len(alone.tokens) < self.max_tokens:
            position = prompt_length + len(alone.tokens)
            token = sample_token(self.sampling.seed or 0, position, alone.constraint())
            alone.consume(SampledToken(token, (0.0, 0.0)))
        return alone.tokens


def make_sequence(
    seq_id: int,
    task: Task | None = None,
    *,
    prefix_key: str | None = None,
    prefix_length: int = 1,
    num_crops: int = 0,
    deadline: float | None = None,
    arrival: float = 0.0,
    priority: int = 0,
    tenant: str = "",
    adapter: str = "",
    images: Sequence[tuple[int, int]] = (),
) -> EngineSequence:
    """Return a waiting sequence of request `r<seq_id>`; its adapter changes its prefix too.

    `images` are the first position and the length of each in the prompt, in two pieces each.
    """
    task = task if task is not None else FakeTask(seed=seq_id)
    request = Request(
        request_id=RequestKey(f"r{seq_id}", tenant),
        task=QuerySpec(question="?"),
        deadline=deadline,
        priority=priority,
    )
    if prefix_key is not None and adapter:
        prefix_key = f"{prefix_key} {adapter}"
    sequence = EngineSequence(
        seq_id,
        request,
        task,
        prefix_key,
        prefix_length,
        task.prompt,
        num_crops,
        HostInputs(object(), object() if adapter else None, _visual(images)),
        SequenceAdapter(adapter, 8 if adapter else 0),
        Timing(arrival),
    )
    if isinstance(task, FakeTask):
        task.is_over = lambda: sequence.finalized
    return sequence


def _visual(images: Sequence[tuple[int, int]]) -> VisualInputs | None:
    spans = tuple(ImageSpan(*each, index) for index, each in enumerate(images))
    return VisualInputs(VisualPrompt(spans, None, 0, 2), spans) if spans else None


class FakeSink:
    """Collects events and checks their order; calls `on_delta` on a delta."""

    def __init__(self) -> None:
        self.started_ids: list[RequestKey] = []
        self.texts: dict[RequestKey, list[str]] = {}
        self.ended: dict[RequestKey, FinishReason | LegatoError] = {}
        self.on_delta: Callable[[EngineSequence], None] = lambda sequence: None

    def started(self, sequence: EngineSequence) -> None:
        """Record the first event."""
        assert not sequence.finalized, "started after its end"
        self.started_ids.append(sequence.request.request_id)
        assert sequence.request.request_id not in self.texts, "started twice"
        self.texts[sequence.request.request_id] = []

    def delta(self, sequence: EngineSequence, events: Sequence[Event]) -> None:
        """Record text."""
        request_id = sequence.request.request_id
        assert request_id not in self.ended, "an event after the end"
        assert events, "an empty delta"
        for event in events:
            assert isinstance(event, TextEvent)
            self.texts[request_id].append(event.text)
        self.on_delta(sequence)

    def done(self, sequence: EngineSequence, finish_reason: FinishReason) -> None:
        """Record the last event."""
        assert sequence.request.request_id in self.texts, "done before it started"
        self._end(sequence, finish_reason)

    def failed(self, sequence: EngineSequence, error: LegatoError) -> None:
        """Record the last event."""
        self._end(sequence, error)

    def _end(self, sequence: EngineSequence, how: FinishReason | LegatoError) -> None:
        assert sequence.finalized, "ended but not finalized"
        assert sequence.request.request_id not in self.ended, "ended twice"
        self.ended[sequence.request.request_id] = how


# ---------------------------------------------------------------- work
# How much work Python code does, counted, so that a slow machine changes nothing.


@contextmanager
def lines_run() -> Iterator[Callable[[], int]]:
    """Yield what tells how many lines of Python this thread has run in the block."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: count
    finally:
        sys.settrace(before)
