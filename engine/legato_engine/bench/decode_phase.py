"""The decode phase of a workload, blocking and pipelined, with the cost model's prediction.

Every stream is prefilled before the first decode, and all end in the same step: the phase has full
batches only. It is timed from the commit of its first step to the last commit. At depth 2 this
includes a step in which all rows are zombies.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from legato_engine.bench.workload import Workload
from legato_engine.engine.assembly import Assembly
from legato_engine.scheduler.launch import LaunchKind
from legato_engine.scheduler.sink import SilentSink
from legato_engine.telemetry.cost_model import predicted_speedup, row_share, zombie_tax
from legato_engine.telemetry.step_stats import step_parts
from legato_engine.telemetry.timeline import Step, StepFeed, Timeline

DEPTHS = (1, 2)
MIN_LENGTH = 4  # tokens; shorter requests do not have two full steps
_NS_PER_MS = 1e6


@dataclasses.dataclass(frozen=True, slots=True)
class StepCost:
    """Medians over `num_steps` steps of one depth, in milliseconds; see `step_stats.StepParts`.

    `tick` is its `bookkeeping`, `blocking_estimate` its `blocking`, which at depth 1 should equal
    the period.
    """

    forward: float
    sampling: float
    period: float
    idle: float
    tick: float
    wait: float
    blocking_estimate: float
    num_steps: int


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of one number of streams, by depth.

    `seconds` is the median duration of the decode phase. `length` is in tokens per request,
    `context` the position of the first of them.
    """

    task: str
    streams: int
    length: int
    context: int
    costs: dict[int, StepCost]
    seconds: dict[int, float]

    @property
    def num_tokens(self) -> int:
        """Tokens committed in `seconds`: all but the prefill's and the first step's."""
        return self.streams * (self.length - 2)


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One row of the tables; `tokens_per_second` is by depth, `length` is L.

    `predicted` and `observed` are ratios of throughput in the decode phase, where zombies cost one
    whole step. `predicted_serving` is for requests that end one by one; their zombies cost rows.
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
    assembly: Assembly, *, task: str, streams: int, length: int, context: int, repeats: int
) -> Measurement:
    """Measure both depths in the order 1 2 2 1, after a warm-up run of each.

    Raises as `Workload`, `decode_phase` and `step_cost`.
    """
    workload = Workload(assembly, kind=task, count=streams, length=length, context=context)
    steps: dict[int, list[Step]] = {depth: [] for depth in DEPTHS}
    costs: dict[int, StepCost] = {}
    seconds: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for depth in DEPTHS:
        run(assembly, workload, depth)
    for repeat in range(repeats):
        for depth in DEPTHS if repeat % 2 == 0 else reversed(DEPTHS):
            phase = decode_phase(run(assembly, workload, depth), streams)
            steps[depth] += phase
            first, last = phase[0].record.commit_end, phase[-1].record.commit_end
            seconds[depth].append((last - first) / 1e9)
    for depth in DEPTHS:
        costs[depth] = step_cost(steps[depth], streams)
    return Measurement(
        task=task,
        streams=streams,
        length=length,
        context=workload.context,
        costs=costs,
        seconds={depth: statistics.median(seconds[depth]) for depth in DEPTHS},
    )


def run(assembly: Assembly, workload: Workload, depth: int) -> list[Step]:
    """Run a workload, all prefills first and unshared; return its launches."""
    sequences = workload.sequences()
    timeline = Timeline(capacity=4 * workload.num_tokens + len(sequences))
    feed = StepFeed(assembly.runner.times, (timeline,))
    scheduler = assembly.scheduler(
        SilentSink(),
        pipeline_depth=depth,
        prefills_per_decode=len(sequences),
        shares=False,
        observer=feed,
    )
    for sequence in sequences:
        scheduler.submit(sequence)
    scheduler.drain()
    return timeline.steps


def decode_phase(steps: Sequence[Step], streams: int) -> list[Step]:
    """Return the launches after the last prefill.

    Raises:
        ValueError: one of them does not have `streams` rows.
    """
    kinds = [step.record.launch.plan.kind for step in steps]
    num_others = max(i for i, kind in enumerate(kinds) if kind is LaunchKind.PREFILL) + 1
    phase = list(steps[num_others:])
    if LaunchKind.DECODE in kinds[:num_others] or not all(_is_full(s, streams) for s in phase):
        raise ValueError("the streams did not decode together: too few pages for all of them")
    return phase


def step_cost(steps: Sequence[Step], streams: int) -> StepCost:
    """Return medians over pairs of consecutive decode launches of `streams` rows.

    Raises:
        ValueError: there is no such pair.
    """
    parts = [
        step_parts(previous, step)
        for previous, step in itertools.pairwise(steps)
        if _is_full(previous, streams) and _is_full(step, streams) and _follows(previous, step)
    ]
    if not parts:
        raise ValueError(f"no two full steps of {streams} rows in a row; use longer requests")
    period, forward, sampling, bookkeeping, wait, idle, blocking = (
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


def compare(measurement: Measurement, forward_single: float) -> Comparison:
    """Return prediction and observation; `forward_single` is one stream's forward in ms."""
    blocking, pipelined = (measurement.costs[depth] for depth in DEPTHS)
    share = row_share(pipelined.forward, forward_single, measurement.streams)
    num_steps = measurement.length - 1  # timed at depth 2, with the step of zombies

    def predicted(tax: float) -> float:
        return predicted_speedup(blocking.period, pipelined.period, tax)

    return Comparison(
        task=measurement.task,
        streams=measurement.streams,
        length=measurement.length,
        context=measurement.context,
        blocking=blocking,
        pipelined=pipelined,
        tokens_per_second={d: measurement.num_tokens / measurement.seconds[d] for d in DEPTHS},
        predicted=predicted(zombie_tax(num_steps, 1.0)),
        predicted_serving=predicted(zombie_tax(measurement.length, share)),
        observed=measurement.seconds[1] / measurement.seconds[2],
    )
