"""The decode step's kernels: checked against torch in float32, and timed as graphs by part.

A shape of a step is written as rows x tokens: `32x1` is one token of each of 32 rows, `1x8` the
verification of eight tokens of one row, `1x19` a prompt; `4x1@16384` is at another position than
the other shapes. Names of models that end in kv8 have keys and values in e4m3.

Shape legend: B tokens, D text width, V vocabulary; L layers, K experts that a token chose.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
from legato_engine.device.cuda import CudaDevice, elapsed_ms, timing_event
from legato_engine.kernels.cuda.decoder import DEFAULT_STAGES
from legato_engine.kernels.cuda.skinny_gemm import tiles_for
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.model import MoondreamModel

from benchmarks import record
from benchmarks.decode.step_bench import DEVICE, Bench, context_bytes, experts_touched, floor_ms
from benchmarks.decode.step_checks import bad, check

SHAPES = "1x1,8x1,16x1,32x1,1x2,1x4,1x8,2x4,8x4,1x19"
LONG_SHAPES = "1x1@5000,8x1@5000,1x1@16384,1x1@32767,4x1@32767"
"""Of models whose contexts are as long."""
LONG_REPEATS = 30

DEPTHS = {
    1: ((9, 10, 2), (7, 7, 2), (8, 11, 2)),
    8: ((9, 10, 2), (8, 8, 2), (7, 11, 1)),
    32: ((4, 8, 2), (4, 7, 1), (4, 9, 2)),
}
"""By batch, stages of `layer_in`, of `layer_out` and of `attend` to try."""


def timed(device: CudaDevice, work: Callable[[], object], repeats: int = 200) -> float:
    """Return median milliseconds of a replay of `work`, back to back."""

    def once() -> None:
        work()

    replay = device.capture(once)
    stream = device.compute.stream
    marks = [timing_event() for _ in range(repeats + 1)]
    with torch.cuda.stream(stream):
        for _ in range(5):
            replay()
        for mark in marks:
            mark.record(stream)
            replay()
    torch.cuda.synchronize()
    return statistics.median(itertools.starmap(elapsed_ms, itertools.pairwise(marks)))


def steps(
    bench: Bench, device: CudaDevice, shape: tuple[int, int], repeats: int = 200
) -> dict[str, float]:
    """Return milliseconds of the step and its parts, and the bytes a second of attention."""
    inputs = bench.inputs(*shape)
    batch = len(inputs.row_B)
    hidden_BD, logits_BV = (tensor.zero_() for tensor in bench.empty(batch))
    kernels = bench.kernels
    coord_B = torch.full((batch,), bench.config.tokens.coord, device=DEVICE)
    works: dict[str, Callable[[], object]] = {
        "step": lambda: kernels.forward(inputs, hidden_BD, logits_BV),
        "head": lambda: kernels.head(hidden_BD, logits_BV),
        "coord_bins": lambda: kernels.bins(coord_B, hidden_BD),
    }
    for part in kernels.parts:
        works[part.name.lower()] = functools.partial(kernels.layers, inputs, hidden_BD, (part,))
    kernels.forward(inputs, hidden_BD, logits_BV)
    expert_LBK = kernels.expert_LBK
    touched = experts_touched(bench.config, None if expert_LBK is None else expert_LBK[:, :batch])
    figures = {name: timed(device, work, repeats) for name, work in works.items()}
    if any(touched):
        figures["experts_touched"] = sum(touched) / sum(map(bool, touched))
    kv_bytes = bench.kv.k_LNHSE.element_size()
    cached = context_bytes(bench.config, shape[0], bench.position, kv_bytes)
    figures["attend_bytes_per_s"] = cached / figures["attend"] * 1e3
    floor = floor_ms(bench.config, cached, touched, bench.network.text.kinds)
    return {"floor": floor, **figures}


def tune(bench: Bench, device: CudaDevice) -> None:
    """Print step times under other depths of the rings."""
    for batch, depths in DEPTHS.items():
        tiles = tiles_for(batch)
        for first, last, attend in depths:
            stages = dataclasses.replace(
                DEFAULT_STAGES,
                layer_in={**DEFAULT_STAGES.layer_in, tiles: first},
                layer_out={**DEFAULT_STAGES.layer_out, tiles: last},
                attend=attend,
                attend_split=attend,
            )
            times = steps(bench.with_stages(stages), device, (batch, 1), repeats=60)
            print("tune", batch, (first, last, attend), _rounded(times))


def measure(
    name: str, arguments: argparse.Namespace, device: CudaDevice
) -> dict[str, dict[str, float]]:
    """Return one model's checks and times, by name."""
    bench = Bench.make(name)
    checks = _numbers(arguments.checks)
    exact = None
    if checks:
        exact = MoondreamModel(bench.config, copy.deepcopy(bench.network).float())
    figures: dict[str, dict[str, float]] = {}
    for batch in checks:
        assert exact is not None
        figures[f"{name} check {batch}"] = errors = check(bench, exact, batch)
        print(name, batch, {key: f"{value:.2e}" for key, value in errors.items()})
        if bad(errors):
            print("CHECK FAILED")
    exact = None  # its memory is needed
    if arguments.tune:
        tune(bench, device)
    for shape in _shapes(bench.config, arguments):
        step, _, position = shape.partition("@")
        rows, tokens = map(int, step.split("x"))
        if position:
            times = steps(bench.at(int(position), rows + 1), device, (rows, tokens), LONG_REPEATS)
        else:
            times = steps(bench, device, (rows, tokens))
        figures[f"{name} {shape}"] = times
        print(name, shape, _rounded(times))
    return figures


def _shapes(config: MoondreamConfig, arguments: argparse.Namespace) -> list[str]:
    """Return the requested shapes, the long ones up to the model's context."""
    further = [
        shape
        for shape in arguments.long_shapes.split(",")
        if shape and int(shape.partition("@")[2]) < config.text.max_context
    ]
    return [*arguments.shapes.split(","), *further]


def _rounded(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(time, 4) for name, time in times.items()}


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _table(figures: Mapping[str, Mapping[str, float]]) -> str:
    rows = []
    for key, times in figures.items():
        if "step" not in times:
            continue
        model, shape = key.split()
        at = "".join(shape.partition("@")[1:])
        one = figures.get(f"{model} 1x1{at}", times)["step"]
        rows.append(
            (
                key,
                f"{times['floor']:.3f}",
                f"{times['step']:.3f}",
                f"{times['floor'] / times['step']:.0%}",
                f"{times['step'] / one:.2f}",
                f"{times['attend']:.3f}",
                f"{times['attend_bytes_per_s'] / 1e12:.2f}",
            )
        )
    heads = ("model, rows x tokens", "floor ms", "step ms", "of the floor")
    more = ("to one token's", "attention ms", "its TB/s")
    return record.table((*heads, *more), rows)


def main(argv: Sequence[str]) -> int:
    """Check, time, record; 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernels", description=__doc__)
    parser.add_argument("--name", default="kernels", help="of the record")
    parser.add_argument("--models", default="moondream2,legato-tiny")
    parser.add_argument("--shapes", default=SHAPES, help="rows x tokens of each")
    parser.add_argument("--long-shapes", default=LONG_SHAPES, help="those at other positions")
    parser.add_argument("--checks", default="1,5,8,13,32")
    parser.add_argument("--tune", action="store_true", help="try other depths of the rings")
    arguments = parser.parse_args(argv)
    device = CudaDevice(0)
    figures: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for name in arguments.models.split(","):
            figures |= measure(name, arguments, device)
    record.write(arguments.name, "Kernels of the decode step", figures, [_table(figures)])
    failed = any(bad(errors) for key, errors in figures.items() if "check" in key)
    print(json.dumps({"failed": failed}))
    return int(failed)
