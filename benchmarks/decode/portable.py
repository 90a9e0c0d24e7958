"""Decode steps by architecture and weight format: milliseconds of a captured step, and memory.

With `--image` also those of an image's embeddings.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
from legato_engine.kernels.cuda import capability
from legato_engine.models.base import StepInputs

from benchmarks import record
from benchmarks.decode.step_bench import Bench

FORMATS = ("bf16", "packed", "fp8", "int8", "int4")
ROWS = (1, 8, 32)
CROPS, TILING = 9, (2, 4)  # of 850 x 600 pixels
_REPLAYS, _ROUNDS = 20, 7


def main(argv: Sequence[str]) -> int:
    """Measure steps of Moondream 2's shape; LEGATO_KERNEL_PTX=compute_80 measures portable ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks portable", description=__doc__)
    parser.add_argument("--weights", nargs="+", choices=FORMATS, default=FORMATS[:1])
    parser.add_argument("--kv8", action="store_true", help="keys and values in e4m3")
    parser.add_argument("--image", action="store_true", help="and an image's way through the tower")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--name", default="portable", help="of the record")
    arguments = parser.parse_args(argv)
    gpu = capability.current_gpu()
    rows = [
        _measured(weights, count, kv8=arguments.kv8)
        for weights in arguments.weights
        for count in arguments.rows
    ]
    figures = {
        "gpu": torch.cuda.get_device_name(),
        "kernels": gpu.arch(),
        "image_ms": image_ms(next(iter(_benches.values()))) if arguments.image else None,
        "command": ["python", "-m", "benchmarks", "portable", *argv],
        "rows": rows,
    }
    title = f"Captured steps of Moondream 2's shape, 850 positions: {gpu.arch()}"
    columns = ("weights", "kv", "rows", "ms", "GiB")
    table = [[str(row[column]) for column in columns] for row in rows]
    tables = [record.table(columns, table)]
    if arguments.image:
        image = [[str(CROPS), str(figures["image_ms"])]]
        tables.append(record.table(("crops of an image", "tower and projection, ms"), image))
    record.write(arguments.name, title, figures, tables)
    return 0


_benches: dict[str, Bench] = {}


def _measured(weights: str, rows: int, *, kv8: bool) -> dict[str, object]:
    name = "moondream2" + ("" if weights == "bf16" else f"-{weights}") + ("-kv8" if kv8 else "")
    if name not in _benches:
        _benches.clear()
        torch.cuda.empty_cache()
        _benches[name] = Bench.make(name)
    bench = _benches[name]
    inputs = bench.inputs(rows)
    milliseconds = step_ms(bench, inputs)
    memory = torch.cuda.memory_allocated() - bench.kv.k_LNHSE.nbytes - bench.kv.v_LNHSE.nbytes
    gib = round(memory / 2**30, 2)
    found = {"weights": weights, "kv": "e4m3" if kv8 else "bf16", "rows": rows}
    print({**found, "ms": milliseconds, "GiB": gib}, flush=True)
    return {**found, "ms": milliseconds, "GiB": gib}


def step_ms(bench: Bench, inputs: StepInputs) -> float:
    """Return the median of a captured step's replays."""
    hidden_BD, logits_BV = bench.empty(len(inputs.row_B))
    found = _replay_ms(lambda: bench.kernels.forward(inputs, hidden_BD, logits_BV))
    assert logits_BV.isfinite().all(), "a step is broken"
    return found


def image_ms(bench: Bench) -> float:
    """Return the median of a captured image's replays: the tower and the projection."""
    side = bench.config.vision.crop_size
    pixels = torch.randint(0, 256, (CROPS, side, side, 3), dtype=torch.uint8, device="cuda")
    with torch.inference_mode():
        return _replay_ms(lambda: bench.network.vision(pixels, TILING))


def _replay_ms(work: Callable[[], object]) -> float:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch gives it no types
    with torch.cuda.stream(stream):
        work()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        times = []
        for _ in range(_ROUNDS):
            begin, end = _event(), _event()
            begin.record()
            for _ in range(_REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / _REPLAYS)
    return float(round(statistics.median(times), 4))


def _event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch gives it no types
    return event
