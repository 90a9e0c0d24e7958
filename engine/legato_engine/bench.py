"""What pipelining buys: `python -m legato_engine.bench --device cpu --model legato-tiny`.

The same requests run through the same loaded model at pipeline depth 1 (blocking) and 2, repeats of
the two interleaved. Each step's parts are steady-state medians over full decode batches; what the
cost model predicts from them stands beside the throughput that was observed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from legato_engine.assembly import Assembly, SilentSink, assemble
from legato_engine.config import EngineConfig
from legato_engine.costs import predicted_speedup, row_share, zombie_tax
from legato_engine.scheduler.launch import LaunchKind
from legato_engine.timeline import Step, Timeline
from legato_engine.workload import KINDS, Workload

DEPTHS = (1, 2)
_TABLE_WIDTH = 120


@dataclasses.dataclass(frozen=True, slots=True)
class StepCost:
    """Medians over the steps of one depth, in milliseconds.

    `sampling` includes the copy back. `idle` is the device's: between the end of one step's
    sampling and the next forward, and between a forward and its sampling. `tick` is host work:
    plan, launch, finalize, commit. `num_steps` says how many steps stand behind the medians.
    """

    forward: float
    sampling: float
    period: float
    idle: float
    tick: float
    num_steps: int


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One row of the tables; `tokens_per_second` is by depth, `length` is L.

    `predicted` and `observed` are ratios of throughput, 1.0 meaning no gain.
    """

    streams: int
    length: int
    blocking: StepCost
    pipelined: StepCost
    tokens_per_second: dict[int, float]
    predicted: float
    observed: float


def step_cost(steps: Sequence[Step], streams: int) -> StepCost:
    """Medians over pairs of consecutive decode launches that both carry `streams` rows.

    Raises `ValueError` when there is no such pair.
    """
    pairs = [
        (previous, step)
        for previous, step in itertools.pairwise(steps)
        if _is_full(previous, streams) and _is_full(step, streams)
    ]
    if not pairs:
        raise ValueError(f"no two full steps of {streams} rows in a row; use longer requests")

    def median(part: Callable[[Step, Step], int]) -> float:
        return statistics.median(part(a, b) for a, b in pairs) / 1e6

    return StepCost(
        forward=median(lambda _, b: b.times.forward_end - b.times.forward_start),
        sampling=median(lambda _, b: b.times.copy_end - b.times.sample_start),
        period=median(lambda a, b: b.record.commit_end - a.record.commit_end),
        idle=median(
            lambda a, b: (
                (b.times.forward_start - a.times.sample_end)
                + (b.times.sample_start - b.times.forward_end)
            )
        ),
        tick=median(
            lambda _, b: (
                b.record.plan_ns + b.record.launch_ns + b.record.finalize_ns + b.record.commit_ns
            )
        ),
        num_steps=len(pairs),
    )


def _is_full(step: Step, streams: int) -> bool:
    plan = step.record.launch.plan
    return plan.kind is LaunchKind.DECODE and len(plan.rows) == streams


def run(assembly: Assembly, workload: Workload, depth: int) -> tuple[Timeline, float]:
    """Run a workload to its end; all of its steps, and the seconds it took."""
    sequences = workload.sequences()
    timeline = Timeline(assembly.runner.times, capacity=4 * workload.num_tokens + len(sequences))
    scheduler = assembly.scheduler(SilentSink(), pipeline_depth=depth, observer=timeline)
    start = time.perf_counter()
    for sequence in sequences:
        scheduler.submit(sequence)
    scheduler.drain()
    return timeline, time.perf_counter() - start


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """The raw figures of one number of streams, by depth; `seconds` for all `num_tokens`."""

    streams: int
    length: int
    num_tokens: int
    costs: dict[int, StepCost]
    seconds: dict[int, float]


def measure(assembly: Assembly, arguments: argparse.Namespace, streams: int) -> Measurement:
    """Both depths on one workload; a first run of each is thrown away."""
    sized = assembly.resized(streams)
    count = streams * arguments.rounds
    workload = Workload(sized, kind=arguments.task, count=count, length=arguments.length)
    steps: dict[int, list[Step]] = {depth: [] for depth in DEPTHS}
    seconds: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for depth in DEPTHS:
        run(sized, workload, depth)
    for repeat in range(arguments.repeats):
        for depth in DEPTHS if repeat % 2 == 0 else reversed(DEPTHS):
            timeline, took = run(sized, workload, depth)
            steps[depth] += timeline.steps
            seconds[depth].append(took)
    return Measurement(
        streams=streams,
        length=arguments.length,
        num_tokens=workload.num_tokens,
        costs={depth: step_cost(steps[depth], streams) for depth in DEPTHS},
        seconds={depth: statistics.median(seconds[depth]) for depth in DEPTHS},
    )


def compare(measurement: Measurement, forward_single: float) -> Comparison:
    """Prediction beside observation; `forward_single` is the forward of one stream, in ms."""
    blocking, pipelined = (measurement.costs[depth] for depth in DEPTHS)
    share = row_share(pipelined.forward, forward_single, measurement.streams)
    tax = zombie_tax(measurement.length, share)
    return Comparison(
        streams=measurement.streams,
        length=measurement.length,
        blocking=blocking,
        pipelined=pipelined,
        tokens_per_second={d: measurement.num_tokens / measurement.seconds[d] for d in DEPTHS},
        predicted=predicted_speedup(blocking.period, pipelined.period, tax),
        observed=measurement.seconds[1] / measurement.seconds[2],
    )


def step_table(rows: Sequence[Comparison], title: str) -> Table:
    """The parts of a pipelined step, and what is left over."""
    table = Table(title=f"A pipelined step: {title}")
    for head in ("streams", "forward ms", "sampling ms", "period ms", "idle ms", "tick ms"):
        table.add_column(head, justify="right")
    for row in rows:
        cost = row.pipelined
        parts = (cost.forward, cost.sampling, cost.period, cost.idle, cost.tick)
        table.add_row(str(row.streams), *(f"{part:.3f}" for part in parts))
    return table


def speedup_table(rows: Sequence[Comparison], title: str) -> Table:
    """Blocking against pipelined, predicted against observed."""
    table = Table(title=f"Blocking and pipelined: {title}")
    heads = (
        *("streams", "blocking ms", "pipelined ms", "L", "predicted", "observed"),
        *("blocking tok/s", "pipelined tok/s", "blocking idle ms"),
    )
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            str(row.streams),
            f"{row.blocking.period:.3f}",
            f"{row.pipelined.period:.3f}",
            str(row.length),
            f"{row.predicted - 1:+.1%}",
            f"{row.observed - 1:+.1%}",
            *(f"{row.tokens_per_second[depth]:.0f}" for depth in DEPTHS),
            f"{row.blocking.idle:.3f}",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, then print the two tables or their figures as JSON."""
    arguments = _parse(argv)
    streams = sorted({1, *arguments.streams})  # the zombie tax is read against one stream
    config = model_config(arguments)
    max_waiting = max(streams) * arguments.rounds
    assembly = assemble(msgspec.structs.replace(config, max_running=1, max_waiting=max_waiting))
    measured = [measure(assembly, arguments, count) for count in streams]
    forward_single = measured[0].costs[2].forward
    rows = [compare(one, forward_single) for one in measured if one.streams in arguments.streams]
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)  # a pipe would fold the columns
    if arguments.json:
        figures = {
            "model": msgspec.to_builtins(assembly.info),
            "task": arguments.task,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        console.print_json(json.dumps(figures))
    else:
        title = f"{assembly.info.name}, {assembly.info.dtype}, {assembly.info.device}"
        console.print(step_table(rows, title), speedup_table(rows, title))
    assembly.device.close()
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="legato_engine.bench", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--streams", default=[1, 8], type=_numbers, help="e.g. 1,8,32")
    parser.add_argument("--length", default=110, type=int, help="tokens per request")
    parser.add_argument("--rounds", default=2, type=int, help="requests per stream")
    parser.add_argument("--repeats", default=3, type=int, help="timed runs per depth")
    parser.add_argument("--json", action="store_true", help="figures instead of tables")
    return parser.parse_args(argv)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """What to run it on, for this and other tools."""
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N")
    parser.add_argument("--model", default="legato-tiny")
    parser.add_argument("--weights", default="")
    parser.add_argument("--tokenizer", default="")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--dtype", default="auto", help="auto, f32, bf16")
    parser.add_argument("--threads", default=0, type=int, help="CPU cores; 0: all")
    parser.add_argument("--task", default="query", choices=KINDS)
    parser.add_argument("--no-cuda-graphs", action="store_true")


def model_config(arguments: argparse.Namespace) -> EngineConfig:
    """What those arguments say; the rest as a server has it."""
    return EngineConfig(
        model=arguments.model,
        weights=arguments.weights,
        tokenizer=arguments.tokenizer,
        random_weights=arguments.random_weights,
        device=arguments.device,
        dtype=arguments.dtype,
        threads=arguments.threads,
        cuda_graphs=not arguments.no_cuda_graphs,
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
