"""Opening a device by name."""

from __future__ import annotations

import os

import torch

from legato_engine.device.base import Device
from legato_engine.device.cpu import CpuDevice
from legato_engine.errors import InvalidField


def open_device(name: str = "auto", threads: int = 0) -> Device:
    """Open a device: `auto` is the first CUDA GPU if there is one, else the CPU.

    `threads` is the CPU's cores, 0 for all.

    Raises:
        InvalidField: the name is not auto, cpu, cuda or cuda:N, or the GPU is absent.
    """
    if name == "auto":
        name = "cuda" if _num_gpus() else "cpu"
    if name == "cpu":
        return CpuDevice(threads or len(os.sched_getaffinity(0)))
    kind, _, index = name.partition(":")
    if kind != "cuda" or (index and not index.isdigit()):
        raise InvalidField(
            f"unknown device {name!r}; use auto, cpu, cuda or cuda:N", field="device"
        )
    if int(index or 0) >= _num_gpus():
        raise InvalidField(f"device {name!r}: {_num_gpus()} CUDA GPUs found", field="device")
    from legato_engine.device.cuda import CudaDevice

    return CudaDevice(int(index or 0))


def _num_gpus() -> int:
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0
