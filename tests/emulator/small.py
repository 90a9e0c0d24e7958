"""A model that is small enough to be emulated, and the machine that does."""

from __future__ import annotations

import functools

import torch
from legato_engine.device.cpu import CpuDevice
from legato_engine.resident.sizes import ModelSizes

from tests.emulator.module import EmulatedModule, Patch, Schedule
from tests.resident.machine import Machine

CPU = torch.device("cpu")
SMALL = ModelSizes(dim=128, ff_ratio=2, num_layers=2, vocab_size=256)
"""8 workers, of two heads."""


def emulated(schedule: Schedule | None = None, *patches: Patch) -> Machine:
    """A CPU that plays a GPU; `patches` change the kernel's source."""
    schedule = schedule or Schedule()
    compile_source = functools.partial(EmulatedModule, schedule=schedule, patches=patches)
    return Machine(CPU, compile_source, _device())


@functools.cache
def _device() -> CpuDevice:
    return CpuDevice(1)
