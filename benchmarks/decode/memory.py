"""Device memory of a runner: what a second launch in flight costs, captured graphs included.

Runners of few slots and of many are compared, because memory is taken in blocks of megabytes. Loops
take two slots at least.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from unittest import mock

import msgspec
import torch
from legato_engine.bench.command import model_config
from legato_engine.bench.options import add_model_arguments
from legato_engine.config import DECODE_PATHS
from legato_engine.core.assembly import Assembly, assemble
from legato_engine.runtime import model_runner

from benchmarks import record, shared_options
from benchmarks.speculation.run import with_settings

_MIB = 2**20
_SLOTS = (2, 6)
_KV_FRACTION = 0.1  # the rest is for the runners


def main(argv: Sequence[str]) -> int:
    """Measure runners of few and of many slots, and record the difference."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--name", default="memory", help="of the record")
    parser.add_argument(
        "--streams", default=[8, 32], type=shared_options.numbers, help="largest batches"
    )
    parser.add_argument(
        "--settings",
        default=("graph", "loop", "seed"),
        type=shared_options.names,
        help="speculation or decode path",
    )
    arguments = parser.parse_args(argv)
    rows = []
    alive: list[Assembly] = []  # the driver keeps memory of graphs that are destroyed
    for streams in arguments.streams:
        config = msgspec.structs.replace(
            model_config(arguments), max_running=streams, kv_memory_fraction=_KV_FRACTION
        )
        assembly = assemble(config)
        for setting in arguments.settings:
            _used(assembly, setting, _SLOTS[0], alive)  # what the process takes once
            few, many = (_used(assembly, setting, slots, alive) for slots in _SLOTS)
            rows.append(
                {
                    "streams": streams,
                    "setting": setting,
                    "runner_mib": few / _MIB,
                    "slot_mib": (many - few) / (_SLOTS[1] - _SLOTS[0]) / _MIB,
                }
            )
        assembly.device.close()
    heads = ("largest batch", "setting", f"runner of {_SLOTS[0]} slots, MiB", "each slot, MiB")
    cells = [
        [row["streams"], row["setting"], f"{row['runner_mib']:.0f}", f"{row['slot_mib']:.1f}"]
        for row in rows
    ]
    title = "Device memory of a runner: packed weights, scratch memory, slots and graphs"
    record.write(arguments.name, title, {"rows": rows}, [record.table(heads, cells)])
    return 0


def _used(assembly: Assembly, setting: str, slots: int, alive: list[Assembly]) -> int:
    """Bytes that a warm runner of so many slots takes: buffers, scratch memory and graphs."""
    before = _free()
    kind = "decode_path" if setting in DECODE_PATHS else "speculation"
    with mock.patch.object(model_runner, "NUM_SLOTS", slots):
        alive.append(with_settings(assembly, None, **{kind: setting}))
    return before - _free()


def _free() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free: int = torch.cuda.mem_get_info()[0]
    return free
