"""Device memory of a runner: what two launches in flight cost, captured graphs included."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence

import msgspec
import torch
from legato_engine.bench.command import add_model_arguments, model_config
from legato_engine.engine.assembly import Assembly, assemble, speculating
from legato_engine.runtime import model_runner

from benchmarks import record

_MIB = 2**20


def main(argv: Sequence[str]) -> int:
    """Measure runners with one slot and with two, and record the difference."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks memory", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--name", default="memory", help="of the record")
    parser.add_argument("--streams", default="1,8,32", help="largest batches")
    parser.add_argument("--settings", default="off,seed", help="of --speculation")
    arguments = parser.parse_args(argv)
    rows = []
    for streams in map(int, arguments.streams.split(",")):
        config = msgspec.structs.replace(model_config(arguments), max_running=streams)
        assembly = assemble(config)
        for setting in arguments.settings.split(","):
            one, two = (_used(assembly, setting, slots) for slots in (1, 2))
            rows.append(
                {
                    "streams": streams,
                    "setting": setting,
                    "one_slot_mib": one / _MIB,
                    "two_slots_mib": two / _MIB,
                }
            )
        assembly.device.close()
        del assembly
        _collect()
    heads = ("largest batch", "speculation", "one slot, MiB", "two slots, MiB", "second slot, MiB")
    cells = [
        [
            row["streams"],
            row["setting"],
            f"{row['one_slot_mib']:.0f}",
            f"{row['two_slots_mib']:.0f}",
            f"{row['two_slots_mib'] - row['one_slot_mib']:.0f}",
        ]
        for row in rows
    ]
    title = "Device memory of a runner, without weights and KV pages"
    record.write(arguments.name, title, {"rows": rows}, [record.table(heads, cells)])
    return 0


def _used(assembly: Assembly, setting: str, slots: int) -> int:
    """Bytes that a warm runner of so many slots takes: buffers, scratch memory and graphs."""
    before, usual = _free(), model_runner.NUM_SLOTS
    model_runner.NUM_SLOTS = slots
    try:
        made = speculating(assembly, setting)
        after = _free()
    finally:
        model_runner.NUM_SLOTS = usual
    del made
    _collect()
    return before - after


def _free() -> int:
    _collect()
    free: int = torch.cuda.mem_get_info()[0]
    return free


def _collect() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
