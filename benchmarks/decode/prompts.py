"""How long a question of many tokens waits for its first token, and its host.

    python -m benchmarks prompts --device cuda --model moondream2 --random-weights

One question at a time without an image, nothing of it cached; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import msgspec
from legato_engine.bench.command import model_config
from legato_engine.bench.options import add_model_arguments
from legato_engine.bench.workload import Workload
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.scheduler.output import SilentSink

from benchmarks import record, shared_options

HEADS = ("prompt tokens", "first token ms", "host CPU ms")


def first_token(assembly: Assembly, context: int) -> tuple[float, float]:
    """Milliseconds to the first token of one question, and of CPU of the process."""
    (sequence,) = Workload(assembly, kind="query", count=1, length=2, context=context).sequences()
    scheduler = assembly.scheduler(SilentSink(), pipeline_depth=2)
    begin, cpu = time.perf_counter(), time.process_time()
    scheduler.submit(sequence)
    while sequence.num_committed == 0:
        scheduler.step()
    taken = time.perf_counter() - begin, time.process_time() - cpu
    scheduler.drain()
    return taken[0] * 1e3, taken[1] * 1e3


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks prompts", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--name", default="prompts", help="of the record")
    parser.add_argument(
        "--lengths",
        default=[100, 320, 400, 700, 1000, 1300, 2000],
        type=shared_options.numbers,
        help="positions",
    )
    parser.add_argument(
        "--repeats", default=9, type=shared_options.positive, help="questions of each length"
    )
    arguments = parser.parse_args(argv)
    config = msgspec.structs.replace(model_config(arguments), max_running=8)
    assembly = assemble(config)
    rows = []
    for length in arguments.lengths:
        taken = [first_token(assembly, length) for _ in range(arguments.repeats + 2)][2:]
        wall, host = (statistics.median(each) for each in zip(*taken, strict=True))
        rows.append({"length": length, "first_token_ms": wall, "host_ms": host, "all": taken})
    assembly.device.close()
    cells = [
        (row["length"], f"{row['first_token_ms']:.2f}", f"{row['host_ms']:.2f}") for row in rows
    ]
    figures = {"model": msgspec.to_builtins(assembly.info), "rows": rows}
    record.write(arguments.name, "Long prompts", figures, [record.table(HEADS, cells)])
    return 0
