"""A model that is small enough to be emulated, and the machine that does."""

from __future__ import annotations

import functools
from typing import cast

import torch
from legato_engine.device.cpu import CpuDevice
from legato_engine.kernels.cuda.module import Compile
from legato_engine.kernels.megakernel.sizes import ModelSizes

from tests.emulator.module import EmulatedModule, Patch, Schedule
from tests.megakernel.words import Machine

CPU = torch.device("cpu")
SMALL = ModelSizes(dim=128, ff_ratio=2, num_layers=2, vocab_size=256)
"""8 workers, of two heads."""
NARROW = ModelSizes(dim=64, ff_ratio=3, num_layers=2, vocab_size=128)
"""4 workers, of which each samples and settles several rows."""
EVEN = ModelSizes(dim=192, ff_ratio=2, num_layers=2, vocab_size=384)
"""12 workers. Captured steps cut a layer's inputs into chunks as wide as the kernel's, as they do
with real models and unlike with the smaller ones: so sums run in the same order.
"""
WIDE = ModelSizes(dim=1024, ff_ratio=3, num_layers=1, vocab_size=1024)
"""64 workers; a layer's outputs are sums of parts."""


def emulated(schedule: Schedule | None = None, *patches: Patch) -> Machine:
    """A CPU that plays a GPU; `patches` change the kernel's source."""
    schedule = schedule or Schedule()
    compile_source = functools.partial(EmulatedModule, schedule=schedule, patches=patches)
    return Machine(CPU, cast(Compile, compile_source), _device())


@functools.cache
def _device() -> CpuDevice:
    return CpuDevice(1)
