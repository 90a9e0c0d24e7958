"""Milliseconds of a step of the resident kernel, and where they go."""

from __future__ import annotations

import statistics

import torch
from legato_engine.device.cuda import CudaDevice, elapsed_ms, timing_event
from legato_engine.kernels.megakernel.kernel import RING_STAGES
from legato_engine.kernels.megakernel.program import Op
from legato_engine.kernels.megakernel.sizes import MOONDREAM2, PAGE, ring_problem

from benchmarks.megakernel.kernel import ResidentKernel
from benchmarks.megakernel.model import DEVICE, Cache, Model
from benchmarks.megakernel.values import PAIR, SCALAR, RandomValues

CONTEXT, IMAGE = 850, 730
POSITIONS = 1024
WORD = 100
"""A token without values."""


def time_steps(tiles: list[int]) -> None:
    """Milliseconds of a step, and where one goes."""
    sizes = MOONDREAM2
    model = Model.random(sizes, POSITIONS)
    weights = None
    steps = 32
    for each in tiles:
        kernel = ResidentKernel(model, each, weights=weights)
        weights = kernel.weights
        for rows in (1, 8 * each):
            tokens = torch.randint(sizes.vocab_size, (rows,), device=DEVICE, dtype=torch.int32)
            positions = torch.full((rows,), CONTEXT - steps // 2, device=DEVICE, dtype=torch.int32)
            cache = Cache.random(sizes, rows, POSITIONS // 16)
            took = _time(kernel, cache, tokens, positions, steps)
            single = _time(kernel, cache, tokens, positions, 1)
            kv = 2 * rows * CONTEXT * sizes.dim * 2 * sizes.num_layers
            read = weights.stream.numel() * 2 + kv
            print(
                f"tiles {each}, {rows} rows, {CONTEXT} positions: {took:.4f} ms a step of {steps},",
                f"{read / took / 1e9:.2f} TB/s; floor at 4.68 {read / 4.68e9:.3f} ms;",
                f"a launch of one step {single:.4f} ms",
                flush=True,
            )
            _profile(kernel, cache, tokens, positions)


def time_values(tiles: list[int]) -> None:
    """Milliseconds of a step whose tokens are all words, scalars or pairs."""
    sizes = MOONDREAM2
    model = Model.random(sizes, POSITIONS)
    read = RandomValues.random(sizes).two_layers()
    weights = None
    steps = 32
    for each in tiles:
        kernel = ResidentKernel(model, each, weights=weights, values=read)
        weights = kernel.weights
        for rows in (1, 8 * each):
            positions = torch.full((rows,), CONTEXT - steps // 2, device=DEVICE, dtype=torch.int32)
            cache = Cache.random(sizes, rows, POSITIONS // 16)
            took = {}
            for name, token in (("words", WORD), ("scalars", SCALAR), ("pairs", PAIR)):
                kernel.allow_only(token)
                tokens = torch.full((rows,), token, device=DEVICE, dtype=torch.int32)
                took[name] = _time(kernel, cache, tokens, positions, steps)
            said = ", ".join(f"{name} {ms:.4f}" for name, ms in took.items())
            print(f"values: tiles {each}, {rows} rows, ms a step: {said}", flush=True)
            _profile(kernel, cache, tokens, positions)


def time_draws(tiles: list[int]) -> None:
    """Milliseconds of a step whose rows are all drawn, by their rules."""
    model, steps, weights = Model.random(MOONDREAM2, POSITIONS), 32, None
    rules = {"greedy": (0.0, 1.0, 0), "0.7": (0.7, 1.0, 0), "0.7 top_p 0.9": (0.7, 0.9, 0)}
    rules["1.0 top_k 40"] = 1.0, 1.0, 40
    for each in tiles:
        kernel = ResidentKernel(model, each, weights=weights)
        weights = kernel.weights
        for rows in (1, 8 * each):
            tokens = torch.randint(model.sizes.vocab_size, (rows,), device=DEVICE)
            positions = torch.full((rows,), CONTEXT - steps // 2, device=DEVICE)
            cache = Cache.random(MOONDREAM2, rows, POSITIONS // 16)
            took = []
            for name, (temperature, top_p, top_k) in rules.items():
                kernel.rules.temperature_R.fill_(temperature)
                kernel.rules.top_p_R.fill_(top_p)
                kernel.rules.top_k_R.fill_(top_k)
                took.append(f"{name} {_time(kernel, cache, tokens, positions, steps):.4f}")
            print(f"draws: tiles {each}, {rows} rows, ms a step:", ", ".join(took), flush=True)


def time_common(tiles: list[int]) -> None:
    """Milliseconds of a step whose rows have an image in common, and of rows that do not."""
    model, steps, weights = Model.random(MOONDREAM2, POSITIONS), 32, None
    for each in tiles:
        kernel = ResidentKernel(model, each, weights=weights)
        weights = kernel.weights
        for rows in (2, 4, 8 * each):
            tokens = torch.randint(model.sizes.vocab_size, (rows,), device=DEVICE)
            positions = torch.full((rows,), CONTEXT - steps // 2, device=DEVICE)
            took = []
            for common in (0, IMAGE // PAGE):
                cache = Cache.random(MOONDREAM2, rows, POSITIONS // PAGE)
                cache.pages[:, :common] = cache.pages[0, :common].clone()
                took.append(f"{common} pages {_time(kernel, cache, tokens, positions, steps):.4f}")
                del cache
            print(f"common: tiles {each}, {rows} rows, ms a step:", ", ".join(took), flush=True)


def time_under_way(tiles: list[int]) -> None:
    """Milliseconds of a step by how many stages are being copied at once."""
    sizes = MOONDREAM2
    model = Model.random(sizes, POSITIONS)
    weights = None
    steps = 32
    print(f"a copy moves {copy_rate():.2f} TB/s", flush=True)
    for each in tiles:
        for under_way in (3, 4, 5, 6):
            if ring_problem(RING_STAGES[each], under_way):
                continue
            kernel = ResidentKernel(model, each, weights=weights, under_way=under_way)
            weights = kernel.weights
            said = []
            for rows in (1, 4 * each, 8 * each):
                place = CONTEXT - steps // 2
                positions = torch.full((rows,), place, device=DEVICE, dtype=torch.int32)
                tokens = torch.randint(sizes.vocab_size, (rows,), device=DEVICE, dtype=torch.int32)
                cache = Cache.random(sizes, rows, POSITIONS // 16)
                said.append(f"{_time(kernel, cache, tokens, positions, steps):.4f}")
                del cache
            print(f"tiles {each}, {under_way} under way: {' / '.join(said)}", flush=True)


def copy_rate() -> float:
    """TB/s read and written by a copy of a gigabyte."""
    x = torch.randn(1 << 28, device=DEVICE)
    y = torch.empty_like(x)
    times = []
    for _ in range(8):
        begin, end = (timing_event() for _ in range(2))
        begin.record()
        y.copy_(x)
        end.record()
        end.synchronize()
        times.append(elapsed_ms(begin, end))
    return float(2 * x.nbytes / statistics.median(times) / 1e9)


def time_graph(tiles: list[int]) -> None:
    """Milliseconds of a step of today's graph path, without sampling."""
    del tiles
    from benchmarks.decode.kernels import steps
    from benchmarks.decode.step_bench import Bench

    with torch.inference_mode():
        bench, device = Bench.make("moondream2"), CudaDevice(0)
        for rows in (1, 8, 32):
            figures = steps(bench, device, (rows, 1))
            print(f"graph path, {rows} rows: {figures['step']:.4f} ms", flush=True)


def _time(
    kernel: ResidentKernel, cache: Cache, tokens: torch.Tensor, positions: torch.Tensor, steps: int
) -> float:
    times = []
    for _ in range(12):
        begin, end = (timing_event() for _ in range(2))
        begin.record()
        kernel.run(cache, tokens, positions, steps)
        end.record()
        end.synchronize()
        times.append(elapsed_ms(begin, end) / steps)
    if not kernel.ended("timing"):
        return float("nan")
    return statistics.median(times[2:])


def _profile(
    kernel: ResidentKernel, cache: Cache, tokens: torch.Tensor, positions: torch.Tensor
) -> None:
    """Clocks of waiting and running, by instruction: the workers' least, median and most."""
    steps, workers = 6, kernel.sizes.num_workers
    profile = torch.zeros(workers, steps, kernel.build.count, 3, dtype=torch.int64, device=DEVICE)
    kernel.run(cache, tokens, positions, steps, profile=profile)
    if not kernel.ended("profile"):
        return
    clocks = profile[:, 2:].cpu().double()
    total = (clocks[0, 1:, 0, 0] - clocks[0, :-1, 0, 0]).mean()
    gaps = (clocks[:, :, 1:, 0] - clocks[:, :, :-1, 2]).mean()
    seen: dict[tuple[int, int], list[int]] = {}
    for index, it in enumerate(kernel.program.workers[0]):
        seen.setdefault((it.op, it.chunk), []).append(index)
    said = []
    for (op, chunk), indices in seen.items():
        times = clocks[:, :, indices]
        for name, first, last in ((" waits", 0, 1), ("", 1, 2)):
            each = (times[..., last] - times[..., first]).mean((1, 2))
            low, middle, high = each.min(), each.median(), each.max()
            if high > 200:
                said.append(f"{Op(op).name}{chunk or ''}{name} {low:.0f}/{middle:.0f}/{high:.0f}")
    print(f"  {total:.0f} clocks a step, {gaps:.0f} between two instructions;", ", ".join(said))
    runs = clocks[:, :, seen[Op.HEAD, 0][0]]
    order = (runs[..., 2] - runs[..., 1]).mean(1).argsort().tolist()
    print(f"  fastest heads {order[:8]}, slowest {order[-8:]}")
    _arrivals(kernel, clocks)


def _arrivals(kernel: ResidentKernel, clocks: torch.Tensor) -> None:
    """How late the last worker signals, and how long after it the others know: clocks.

    The workers' clocks are brought together by when each passes the wait for the residual stream.
    """
    program = kernel.program.workers[0]
    firsts = [i for i, it in enumerate(program) if it.op == Op.FC1 and it.layer > 0]
    passes = clocks[:, :, firsts, 1].flatten(1)
    offsets = (passes - passes.median(0).values).median(1).values
    clocks = clocks - offsets[:, None, None, None]
    for waiting, it in enumerate(program):
        if it.wait < 0 or it.layer not in (7, 8):
            continue
        matching = [i for i, each in enumerate(program) if each.signal == it.wait]
        if not matching or it.op in (Op.ATTEND, Op.MERGE):  # only a head's workers signal
            continue
        ends = clocks[:, :, matching[0], 2]
        last, worker = ends.max(0)
        late = last - ends.median(0).values
        hop = clocks[:, :, waiting, 1].min(0).values - last
        begun = clocks[:, :, matching[0], 0].gather(0, worker[None])[0]
        took, usual = last - begun, (ends - clocks[:, :, matching[0], 0]).median(0).values
        said = [
            f"{name} {[round(x) for x in values.tolist()]}"
            for name, values in (
                ("last worker", worker),
                ("late by", late),
                ("took", took),
                ("usual", usual),
                ("then", hop),
            )
        ]
        print(f"  {Op(it.op).name} of layer {it.layer}:", ", ".join(said))
