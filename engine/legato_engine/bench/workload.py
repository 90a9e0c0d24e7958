"""Workloads of fixed length, and the measurement of their decode phase."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import abc
from collections.abc import Mapping
from collections.abc import Sequence as Many

import numpy as np
from PIL import Image

from legato_engine.core.assembly import Assembly
from legato_engine.core.requests import make_sequence
from legato_engine.errors import InvalidField
from legato_engine.models.frontend import ModelFrontend, PreparedImage
from legato_engine.scheduler.batch import LaunchKind
from legato_engine.scheduler.interfaces import Step
from legato_engine.scheduler.output import SilentSink
from legato_engine.sequence import Constraint, Grammar, SampledToken, Sequence, Task
from legato_engine.telemetry import (
    Timeline,
    predicted_speedup,
    row_share,
    step_feed,
    step_parts,
    zombie_tax,
)
from legato_engine.types import (
    AnswerFormat,
    CachedImageRef,
    CaptionSpec,
    DetectSpec,
    Event,
    FinishReason,
    ImageProperties,
    PromptToken,
    QuerySpec,
    Request,
    RequestKey,
    SamplingParams,
    TaskOutput,
    TaskSpec,
)

_IN_FLIGHT = 2  # tokens that a task may still sample after its end


class FixedLengthTask:
    """Task that ends with its `length`-th token; the inner task reads tokens until its own end.

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
        self.uses_transition_table = False  # continues after the inner task's list
        self.has_payload = inner.has_payload
        self.finish_reason: FinishReason | None = None

    @property
    def grammar(self) -> Grammar | None:
        return self._inner.grammar

    def constraint(self) -> int:
        return self._constraints[self._inner.constraint()]

    def consume(self, token: SampledToken) -> Many[Event]:
        self._remaining -= 1
        if self._remaining == 0:
            self.finish_reason = FinishReason.STOP
        return self._inner.consume(token) if self._inner.finish_reason is None else ()

    def result(self, finish_reason: FinishReason) -> TaskOutput:
        return self._inner.result(finish_reason)

    @property
    def reasoning_tokens(self) -> int:
        return self._inner.reasoning_tokens


def fixed_length(sequence: Sequence, length: int, context: int, constraints: Many[int]) -> Sequence:
    missing = max(0, context - sequence.prompt_length)
    prompt = (*itertools.islice(itertools.cycle(sequence.prompt), missing), *sequence.prompt)
    task = FixedLengthTask(sequence.task, length, prompt, constraints)
    return dataclasses.replace(sequence, task=task, prompt=prompt)


def noise(
    frontend: ModelFrontend, name: str, width: int, height: int, random: np.random.Generator
) -> PreparedImage:
    info = ImageProperties(image_id=name, width=width, height=height, cache_hit=False)
    pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return frontend.prepare_image(Image.fromarray(pixels), name, info)


_ENDLESS = """{"type": "array", "minItems": 500, "items": {"type": "object",
"properties": {"name": {"type": "string", "maxLength": 24}, "seen": {"type": "boolean"}},
"required": ["name", "seen"], "additionalProperties": false}}"""
"""A schema whose answers are longer than any measured request."""


class Workload:
    """Workload of `count` equal requests of `length` tokens.

    The prompt is repeated up to position `context`.

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
        if kind not in ("query", "json"):
            self._image = noise(self._frontend, "bench", 640, 480, np.random.default_rng(0))
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
            image=None if self._image is None else CachedImageRef(image_id="bench"),
            sampling=SamplingParams(temperature=0.0, max_tokens=self._length, seed=0),
            cache_image=False,
        )
        return make_sequence(self._frontend, request, self._image)

    def _task(self) -> TaskSpec:
        if self._kind in ("query", "json"):
            wanted = AnswerFormat(json_schema=_ENDLESS) if self._kind == "json" else None
            return QuerySpec(question="What is there?", response_format=wanted)
        if self._kind == "caption":
            return CaptionSpec()
        # Of more objects than its tokens suffice for.
        return DetectSpec(object="cat", max_objects=self._length)


def endless(constraints: Many[Constraint]) -> tuple[int, ...]:
    """Replace each constraint by the widest that allows a proper subset of its tokens.

    A list then never ends.
    """
    return tuple(_narrow(constraints, index) for index in range(len(constraints)))


def _narrow(constraints: Many[Constraint], index: int) -> int:
    allowed = set(constraints[index].allowed or ())
    narrower = [
        (len(other.allowed), -number)
        for number, other in enumerate(constraints)
        if other.allowed and set(other.allowed) < allowed
    ]
    return -max(narrower)[1] if narrower else index


# ---------------------------------------------------------------- decode phase

# Every stream is prefilled before the first decode, and all end in the same step, so batches are
# full. The phase is timed from its first commit to its last. At depth 2 this includes a step in
# which all rows are zombies.

DEPTHS = (1, 2)
MIN_LENGTH = 4  # shorter requests do not have two full steps
_NS_PER_MS = 1e6


@dataclasses.dataclass(frozen=True, slots=True)
class StepCost:
    """Medians over `num_steps` steps of one depth, in milliseconds; see `steps.StepParts`."""

    forward: float
    sampling: float
    period: float
    idle: float
    tick: float
    wait: float
    blocking_estimate: float
    num_steps: int


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Measurement of one number of streams: a row of the tables.

    `context` is the position of the first token. `predicted` and `observed` are ratios of
    throughput in the decode phase, where zombies cost one whole step. `predicted_serving` is for
    requests that end one by one; their zombies cost rows.
    """

    task: str
    streams: int
    length: int
    context: int
    blocking: StepCost
    pipelined: StepCost
    tokens_per_second: dict[int, float]
    predicted: float
    predicted_serving: float
    observed: float


def measure(
    assembly: Assembly,
    *,
    task: str,
    streams: int,
    length: int,
    context: int,
    repeats: int,
    forward_single: float,
) -> Comparison:
    """Measure both depths in the order 1 2 2 1, after a warm-up of each; see `compare`."""
    workload = Workload(assembly, kind=task, count=streams, length=length, context=context)
    steps: dict[int, list[Step]] = {depth: [] for depth in DEPTHS}
    seconds: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for depth in DEPTHS:
        run(assembly, workload, depth)
    for repeat in range(repeats):
        for depth in DEPTHS if repeat % 2 == 0 else reversed(DEPTHS):
            phase = decode_phase(run(assembly, workload, depth), streams)
            steps[depth] += phase
            first, last = phase[0].record.commit_end, phase[-1].record.commit_end
            seconds[depth].append((last - first) / 1e9)
    return compare(
        task=task,
        streams=streams,
        length=length,
        context=workload.context,
        costs={depth: step_cost(steps[depth], streams) for depth in DEPTHS},
        seconds={depth: statistics.median(seconds[depth]) for depth in DEPTHS},
        forward_single=forward_single,
    )


def run(assembly: Assembly, workload: Workload, depth: int) -> list[Step]:
    """Run a workload, all prefills first and unshared."""
    sequences = workload.sequences()
    timeline = Timeline(capacity=4 * workload.num_tokens + len(sequences))
    scheduler = assembly.scheduler(
        SilentSink(),
        pipeline_depth=depth,
        prefills_per_decode=len(sequences),
        shares=False,
        observer=step_feed(assembly.runner.times, (timeline.add,)),
    )
    for sequence in sequences:
        scheduler.submit(sequence)
    scheduler.drain()
    return timeline.steps


def decode_phase(steps: abc.Sequence[Step], streams: int) -> list[Step]:
    """Return the launches after the last prefill, all of `streams` rows."""
    kinds = [step.record.launch.plan.kind for step in steps]
    num_others = max(i for i, kind in enumerate(kinds) if kind is LaunchKind.PREFILL) + 1
    phase = list(steps[num_others:])
    if LaunchKind.DECODE in kinds[:num_others] or not all(_is_full(s, streams) for s in phase):
        raise ValueError("the streams did not decode together: too few pages for all of them")
    return phase


def step_cost(steps: abc.Sequence[Step], streams: int) -> StepCost:
    """Return medians over pairs of consecutive decode launches of `streams` rows."""
    parts = [
        step_parts(previous, step)
        for previous, step in itertools.pairwise(steps)
        if _is_full(previous, streams) and _is_full(step, streams) and _follows(previous, step)
    ]
    if not parts:
        raise ValueError(f"no two full steps of {streams} rows in a row; use longer requests")
    period, forward, sampling, bookkeeping, wait, idle, blocking, _ = (
        statistics.median(column) / _NS_PER_MS for column in zip(*parts, strict=True)
    )
    return StepCost(
        forward=forward,
        sampling=sampling,
        period=period,
        idle=idle,
        tick=bookkeeping,
        wait=wait,
        blocking_estimate=blocking,
        num_steps=len(parts),
    )


def _is_full(step: Step, streams: int) -> bool:
    plan = step.record.launch.plan
    return plan.kind is LaunchKind.DECODE and len(plan.rows) == streams


def _follows(previous: Step, step: Step) -> bool:
    return step.record.launch.launch_id == previous.record.launch.launch_id + 1


def compare(
    *,
    task: str,
    streams: int,
    length: int,
    context: int,
    costs: Mapping[int, StepCost],
    seconds: Mapping[int, float],
    forward_single: float,
) -> Comparison:
    """Compare with the prediction.

    `costs` and `seconds`, of the decode phase, are by depth. `forward_single` is one stream's
    forward in ms, ignored if this is it.
    """
    blocking, pipelined = (costs[depth] for depth in DEPTHS)
    share = row_share(pipelined.forward, forward_single, streams)
    num_steps = length - 1  # timed at depth 2, with the step of zombies
    num_tokens = streams * (length - 2)  # all but the prefill's and the first step's

    def predicted(tax: float) -> float:
        return predicted_speedup(blocking.period, pipelined.period, tax)

    return Comparison(
        task=task,
        streams=streams,
        length=length,
        context=context,
        blocking=blocking,
        pipelined=pipelined,
        tokens_per_second={depth: num_tokens / seconds[depth] for depth in DEPTHS},
        predicted=predicted(zombie_tax(num_steps, 1.0)),
        predicted_serving=predicted(zombie_tax(length, share)),
        observed=seconds[1] / seconds[2],
    )
