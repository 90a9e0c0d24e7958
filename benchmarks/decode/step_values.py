"""One tree's decode step with values, timed when told: a child of `confidence`.

    python benchmarks/decode/step_values.py [MODEL DEVICE]

Reads lines of a number of rows and one of `TOKENS`, and writes the median microseconds of such a
step: forward, sampling, values, and the copy to the host.
"""

from __future__ import annotations

import contextlib
import statistics
import sys

from legato_engine.config import EngineConfig
from legato_engine.core.assembly import assemble
from legato_engine.runtime.model_runner import ModelRunner

STEPS, WARM = 100, 20
POSITION = 800  # an image and a short answer, where the model has so many
TOKENS = ("x", "y", "size")
"""Of an object; the first one may be the end."""
MEMORY = 0.3  # of the free memory: two trees share a GPU


def main(model: str = "moondream2", device: str = "cuda") -> None:
    config = EngineConfig(
        model=model,
        random_weights=True,
        device=device,
        max_running=32,
        kv_memory_fraction=MEMORY,
    )
    with contextlib.redirect_stdout(sys.stderr):  # it logs
        assembly = assemble(config)
    print("ready", flush=True)
    for line in sys.stdin:
        rows, token = line.split()
        print(median(assembly.runner, int(rows), token), flush=True)
    assembly.device.close()


def constraint(runner: ModelRunner, token: str) -> int:
    """Its index, which differs between trees; coordinates stand before sizes in all of them."""
    table = [each.allowed or () for each in runner._resources.model.constraints]
    if token == "x":
        return next(index for index, allowed in enumerate(table) if len(allowed) == 2)
    singles = list(dict.fromkeys(allowed for allowed in table if len(allowed) == 1))
    return table.index(singles[TOKENS.index(token) - 1])


def median(runner: ModelRunner, rows: int, token: str) -> float:
    """Of steps one behind the other, each measured on the device."""
    slot, backend = runner._slots[0], runner._backend
    compute = runner._device.compute
    bucket = runner._staging.bucket(rows)
    staged, scratch = slot.staged.host, runner._resources.state.scratch_row
    runner._staging.padding(slot)
    for name in ("row", "source", "sample_row"):
        staged[name][:bucket] = scratch
        staged[name][:rows] = range(rows)
    for name in ("position", "fresh", "sample_position"):
        staged[name][:rows] = min(POSITION, runner._resources.model.max_context - 1)
    slot.constraint.host["constraint"][:] = constraint(runner, token)
    slot.staged.upload(compute)
    slot.constraint.upload(compute)
    taken = []
    for step in range(WARM + STEPS):
        start = compute.record()
        backend.decode(0, bucket, 0, rows)
        backend.sample(0, bucket, sampled=False, payload=True)
        slot.outputs.download(compute)
        if step >= WARM:
            taken.append((start, compute.record()))
    compute.record().wait()
    return statistics.median(end.time_ns() - start.time_ns() for start, end in taken) / 1e3


if __name__ == "__main__":
    main(*sys.argv[1:])
