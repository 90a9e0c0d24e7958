"""Machines of the megakernel's tests: a GPU, or a CPU that emulates one."""

from __future__ import annotations

import dataclasses

import torch
from legato_engine.device.base import Device
from legato_engine.kernels.cuda.module import Compile, Module

from benchmarks.megakernel.model import DEVICE


@dataclasses.dataclass(frozen=True)
class Machine:
    """The tensors' device and the kernel's compiler; by default those of the current GPU."""

    device: torch.device = DEVICE
    compile_source: Compile = Module
    drafting_device: Device | None = None


GPU = Machine()
