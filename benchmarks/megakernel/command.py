"""The megakernel against plain torch, and its time: `python -m benchmarks megakernel`.

Needs one H100 or H200 and the repository's files. The weights are random, of Moondream 2's sizes. A
wait that lasts too long is reported and ends the launch.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence

import torch
from legato_engine.kernels.megakernel.kernel import RING_STAGES, rows_of
from legato_engine.kernels.megakernel.program import Op, Program
from legato_engine.kernels.megakernel.sizes import MOONDREAM2, ModelSizes

from benchmarks.megakernel.drafts import time_drafts
from benchmarks.megakernel.kernel import (
    ResidentKernel,
    time_common,
    time_draws,
    time_graph,
    time_steps,
    time_under_way,
    time_values,
)
from benchmarks.megakernel.model import DEVICE, Cache, Model, forward

POSITIONS = 1024
REPEATS = 400
UNEVEN = (850, 17, 1, 0, 300, 849, 63, 64)


def main(options: Sequence[str]) -> int:
    """Check, then time."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks megakernel", description=__doc__)
    parser.add_argument("--seconds", type=float, default=85, help="stop before the next part")
    parser.add_argument("--tiles", type=int, nargs="*", default=[1])
    parser.add_argument("--parts", nargs="*", help="functions of this file; without: all")
    arguments = parser.parse_args(options)
    started = time.monotonic()
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    parts = (
        *(check_layer, check_model, check_watchdog, check_repeats),
        *(
            time_steps,
            time_values,
            time_draws,
            time_common,
            time_drafts,
            time_under_way,
            time_graph,
        ),
    )
    chosen = arguments.parts or [part.__name__ for part in parts]
    for part in (part for part in parts if part.__name__ in chosen):
        left = arguments.seconds - (time.monotonic() - started)
        if left < 5:
            print(f"{part.__name__}: no time left")
            continue
        begin = time.monotonic()
        part(arguments.tiles)
        torch.cuda.empty_cache()
        print(f"-- {part.__name__}: {time.monotonic() - begin:.1f} s", flush=True)
    return 0


def check_layer(tiles: list[int]) -> None:
    """One layer: every buffer that the kernel leaves."""
    del tiles
    sizes = dataclasses.replace(MOONDREAM2, num_layers=1)
    model = Model.random(sizes, POSITIONS)
    kernel = ResidentKernel(model, 1)
    for rows in (1, 3):
        tokens, positions = _rows(sizes, rows)
        cache = Cache.random(sizes, rows, POSITIONS // 16)
        expected_cache = cache.clone()
        logits = _logits(sizes, 1, 1)
        kernel.run(cache, tokens, positions, 1, logits=logits)
        if not kernel.ended(f"one layer, {rows} rows"):
            return
        out, build = kernel.tokens(1, rows), kernel.build
        expected, taps = forward(model, expected_cache, tokens, positions)
        pairs = {
            "act": (rows_of(build.act)[:rows], taps.act),
            "q": (build.q[:rows], taps.q.flatten(1)),
            "keys": (cache.keys, expected_cache.keys),
            "values": (cache.values, expected_cache.values),
            "heads": (rows_of(build.heads)[:rows], taps.heads),
            "x": (rows_of(build.x[1])[:rows], taps.x[0]),
            "logits": (logits[0, :rows], expected),
        }
        said = ", ".join(f"{name} {_error(*pair):.1e}" for name, pair in pairs.items())
        chosen, best = out[0].long(), expected.argmax(-1)
        print(f"one layer, {rows} rows: {said}; tokens {chosen.tolist()} of {best.tolist()}")


def check_model(tiles: list[int]) -> None:
    """All layers, several steps: each step's residual streams and logits, for its own tokens."""
    sizes = MOONDREAM2
    model = Model.random(sizes, POSITIONS)
    for each in tiles:
        kernel = ResidentKernel(model, each)
        for rows in (1, 8 * each):
            torch.manual_seed(rows)
            steps = 4
            tokens, positions = _rows(sizes, rows)
            cache = Cache.random(sizes, rows, POSITIONS // 16)
            expected_cache = cache.clone()
            logits = _logits(sizes, steps, each)
            shape = (steps, sizes.num_layers, 8 * each, sizes.dim)
            trace = torch.full(shape, float("nan"), device=DEVICE, dtype=torch.bfloat16)
            kernel.run(cache, tokens, positions, steps, logits=logits, trace=trace)
            if not kernel.ended(f"{sizes.num_layers} layers, {rows} rows"):
                return
            out = kernel.tokens(steps, rows)
            errors, gaps, fed = [], [], tokens
            for step in range(steps):
                expected, taps = forward(model, expected_cache, fed, positions + step)
                errors.append(_error(logits[step, :rows], expected))
                by_layer = [_error(trace[step, i, :rows], x) for i, x in enumerate(taps.x)]
                fed = out[step]
                chosen = expected.gather(1, fed.long()[:, None])[:, 0]
                gaps.append((expected.amax(1) - chosen).max().item())
            print(
                f"{sizes.num_layers} layers, tiles {each}, {rows} rows: logits of 4 steps",
                " ".join(f"{e:.1e}" for e in errors),
                f"x of layers 0, 11, 23 in the last {by_layer[0]:.1e} {by_layer[11]:.1e}",
                f"{by_layer[-1]:.1e}; chosen token below the best by at most {max(gaps):.3f}",
                f"(deviation {expected.std().item():.2f})",
            )
            _compare_rows(kernel, cache, tokens, positions, rows)


def _compare_rows(
    kernel: ResidentKernel, cache: Cache, tokens: torch.Tensor, positions: torch.Tensor, rows: int
) -> None:
    """Whether a row has the same bits alone."""
    together = _logits(kernel.sizes, 1, kernel.tiles)
    kernel.run(cache, tokens, positions, 1, logits=together)
    same = []
    for row in sorted({0, rows // 2, rows - 1}):
        only = slice(row, row + 1)
        alone = _logits(kernel.sizes, 1, kernel.tiles)
        pages = Cache(cache.keys, cache.values, cache.pages[only].contiguous())
        kernel.run(pages, tokens[only].contiguous(), positions[only].contiguous(), 1, logits=alone)
        same.append(torch.equal(alone[0, 0], together[0, row]))
    if kernel.ended("rows alone"):
        print(f"  rows alone have the bits that they have among {rows}: {same}")


def check_watchdog(tiles: list[int]) -> None:
    """Check that a wait without its signal is reported and that the next launch works."""
    del tiles
    sizes = dataclasses.replace(MOONDREAM2, num_layers=2)
    model = Model.random(sizes, POSITIONS)
    kernel = ResidentKernel(model, 1)
    workers = list(kernel.program.workers)
    broken = list(workers[77])
    index = next(i for i, each in enumerate(broken) if each.op == Op.OUT)
    broken[index] = dataclasses.replace(broken[index], wait_count=sizes.num_workers + 1)
    workers[77] = tuple(broken)
    planted = Program(sizes, RING_STAGES[1], tuple(workers))
    faulty = ResidentKernel(model, 1, planted, kernel.weights)
    tokens, positions = _rows(sizes, 1)
    cache = Cache.random(sizes, 1, POSITIONS // 16)
    begin = time.monotonic()
    faulty.run(cache, tokens, positions, 2, patience_ms=20)
    torch.cuda.synchronize()
    took = (time.monotonic() - begin) * 1e3
    print(f"planted: {faulty.build.fault()} (instruction {index}), {took:.0f} ms")
    kernel.run(cache, tokens, positions, 2)
    print(f"the next launch works: {kernel.ended('after the fault')}")


def check_repeats(tiles: list[int]) -> None:
    """Check that every launch has the same bits; else name the first layer, rows and columns."""
    sizes = MOONDREAM2
    model = Model.random(sizes, POSITIONS)
    weights = None
    for each in tiles:
        kernel = ResidentKernel(model, each, weights=weights)
        weights = kernel.weights
        for rows in (1, 8 * each):
            tokens, positions = _rows(sizes, rows)
            cache = Cache.random(sizes, rows, POSITIONS // 16)
            shape = (2, sizes.num_layers, 8 * each, sizes.dim)
            first, trace = (torch.zeros(shape, device=DEVICE, dtype=torch.bfloat16) for _ in "12")
            kernel.run(cache, tokens, positions, 2, trace=first)
            different = 0
            for launch in range(REPEATS):
                kernel.run(cache, tokens, positions, 2, trace=trace)
                if not torch.equal(first[:, :, :rows], trace[:, :, :rows]):
                    different += 1
                    if different <= 3:
                        print(f"  launch {launch}: {_first_difference(first, trace)}", flush=True)
            if kernel.ended("repeats"):
                print(f"tiles {each}, {rows} rows: {different} of {REPEATS} have other bits")


def _first_difference(first: torch.Tensor, other: torch.Tensor) -> str:
    """Where [steps, layers, rows, columns] differ at first."""
    differs = first != other
    step, layer = differs.any(-1).any(-1).nonzero()[0].tolist()
    at = differs[step, layer]
    rows, columns = at.any(1).nonzero()[:, 0].tolist(), at.any(0).nonzero()[:, 0].tolist()
    gap = (first - other)[step, layer].abs().max().item()
    blocks = sorted({column // 16 for column in columns})
    return (
        f"step {step}, layer {layer}, rows {rows}, {len(columns)} columns of {len(blocks)} blocks "
        f"{blocks[:6]}, by up to {gap:.3g}"
    )


def _rows(sizes: ModelSizes, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(sizes.vocab_size, (rows,), device=DEVICE, dtype=torch.int32)
    positions = [UNEVEN[row % len(UNEVEN)] for row in range(rows)]
    return tokens, torch.tensor(positions, device=DEVICE, dtype=torch.int32)


def _logits(sizes: ModelSizes, steps: int, tiles: int) -> torch.Tensor:
    return torch.full((steps, 8 * tiles, sizes.vocab_size), float("nan"), device=DEVICE)


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (got.double() - expected.double()).norm() / expected.double().norm()
    return float(difference)
