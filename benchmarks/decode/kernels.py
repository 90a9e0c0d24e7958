"""The decode step's kernels: checked against torch in float32, and timed as graphs by part.

A shape of a step is written as rows x tokens: `32x1` is one token of each of 32 rows, `1x8` the
verification of eight tokens of one row, `1x19` a prompt; `4x1@16384` is at another position than
the other shapes. Names of models that end in kv8 have keys and values in e4m3.

Shape legend: B tokens, D text width, V vocabulary, N bins; L layers, K experts that a token chose,
X experts, T tokens of a layer's choice.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from legato_engine.device.cuda import CudaDevice, elapsed_ms, timing_event
from legato_engine.kernels import ops, pages
from legato_engine.kernels.cuda.decoder import DEFAULT_STAGES
from legato_engine.kernels.cuda.skinny_gemm import tiles_for
from legato_engine.kernels.parameters import Routes
from legato_engine.models.base import StepInputs
from legato_engine.models.moondream.config import MoondreamConfig
from legato_engine.models.moondream.model import MoondreamModel
from legato_engine.models.paged_attention import DecodeBatch, KVCache

from benchmarks import record
from benchmarks.decode.step_bench import (
    DEVICE,
    KV_SCALE,
    PAGE,
    Bench,
    context_bytes,
    experts_touched,
    floor_ms,
)

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


# ---------------------------------------------------------------- checks
# Kernels against torch in float32, a row alone against a batch.


def check(bench: Bench, exact: MoondreamModel, batch: int) -> dict[str, float]:
    """Return relative errors of the kernels and of torch in bf16, against `exact` in float32."""
    inputs = bench.inputs(batch).part(slice(0, batch))
    hidden_BD, logits_BV = bench.empty(batch)
    bench.kernels.forward(inputs, hidden_BD, logits_BV)
    ours = _written(bench.kv, inputs)
    table_RM = inputs.page_table_RM[:, : bench.position // PAGE + 1]
    where = DecodeBatch(inputs.position_B, table_RM[inputs.row_B])
    x_BD = bench.model.embed(inputs.token_R[inputs.source_B], inputs.payload_R2[inputs.source_B])
    wide = KVCache(*(_numbers_of(bench.kv, cache) for cache in _caches(bench.kv)))
    with _same_experts(bench):
        exact_BD = exact.decode(x_BD.float(), where, wide)
        plain_BD = bench.model.decode(x_BD, where, bench.kv)
    theirs = _written(bench.kv, inputs)
    exact_BV = exact.logits(exact_BD)
    return {
        "hidden": _error(hidden_BD, exact_BD),
        "hidden_torch": _error(plain_BD, exact_BD),
        "logits": _error(logits_BV, exact_BV),
        "logits_torch": _error(bench.model.logits(plain_BD), exact_BV),
        "keys": _error(ours[0], theirs[0]),
        "values": _error(ours[1], theirs[1]),
        "rows_that_differ_alone": _differing(bench, inputs, logits_BV),
        **_check_bins(bench, plain_BD),
    }


@contextlib.contextmanager
def _same_experts(bench: Bench) -> Iterator[None]:
    """Have torch use the experts of the kernels' last step, because near ties fall either way."""
    route, experts_LBK = ops.route, bench.kernels.expert_LBK
    if experts_LBK is None or bench.config.text.moe is None:
        yield
        return
    layers = itertools.cycle(experts_LBK[bench.config.text.moe.first_layer :].long())

    def same(logits_TX: torch.Tensor, num_active: int) -> Routes:
        expert_TK = next(layers)[: len(logits_TX)]
        best_TK = logits_TX.gather(1, expert_TK).float()
        return Routes(expert_TK, best_TK.softmax(-1).to(logits_TX.dtype))

    ops.route = same
    try:
        yield
    finally:
        ops.route = route


def _differing(bench: Bench, inputs: StepInputs, logits_BV: torch.Tensor) -> float:
    """Count the rows whose bits differ between alone and in the batch."""
    hidden_BD, again_BV = bench.empty(len(logits_BV))
    for at in range(len(logits_BV)):
        one = slice(at, at + 1)
        bench.kernels.forward(inputs.part(one), hidden_BD[one], again_BV[one])
    return float((again_BV != logits_BV).any(-1).sum())


def _check_bins(bench: Bench, hidden_BD: torch.Tensor) -> dict[str, float]:
    """Return relative errors of the bins; a batch of one has the coordinate's only."""
    tokens, exact = bench.config.tokens, copy.deepcopy(bench.network.region).float()
    errors = {}
    normed_BD = hidden_BD.float() if exact.ln is None else exact.ln(hidden_BD.float())
    for name, token, decoder in (
        ("coord_bins", tokens.coord, exact.coord_decoder),
        ("size_bins", tokens.size, exact.size_decoder),
    ):
        token_B = torch.full((len(hidden_BD),), token, device=DEVICE)
        bins_BN = bench.kernels.bins(token_B, hidden_BD)[token == tokens.size]
        errors[name] = _error(bins_BN, decoder(normed_BD))
    return errors


def bad(errors: Mapping[str, float]) -> bool:
    """Say whether a check failed."""
    worse = not errors["hidden"] <= 1.5 * errors["hidden_torch"] + 1e-3
    bins = not max(errors["coord_bins"], errors["size_bins"]) < 0.02
    return worse or bins or errors["rows_that_differ_alone"] > 0


def _written(kv: KVCache, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values at the tokens' own positions, all layers."""
    page_B = inputs.page_table_RM[inputs.row_B, inputs.position_B // PAGE]
    at = (slice(None), page_B, slice(None), inputs.position_B % PAGE)
    keys, values = (
        _numbers_of(kv, pages.indexable(cache)[at].view(cache.dtype)) for cache in _caches(kv)
    )
    return keys, values


def _caches(kv: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    return kv.k_LNHSE, kv.v_LNHSE


def _numbers_of(kv: KVCache, cache: torch.Tensor) -> torch.Tensor:
    """Return stored values as float32 in one unit."""
    return cache.float() if kv.scale_L2 is None else cache.float() * KV_SCALE


def _error(ours: torch.Tensor, truth: torch.Tensor) -> float:
    error: float = ((ours.double() - truth.double()).norm() / truth.double().norm()).item()
    return error
