"""Named host fields that reach the device in one copy."""

from __future__ import annotations

import math

import numpy as np
import torch

from legato_engine.device.base import Device

_ALIGNMENT = 16


class StagingBuffer:
    """Fields packed into one pinned buffer and its twin on the device.

    `host[name]` is a numpy view to fill, `device[name]` a tensor view to read in kernels; `upload`
    moves everything with a single copy.
    """

    def __init__(
        self, device: Device, fields: dict[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        spans: dict[str, tuple[int, int]] = {}
        size = 0
        for name, (shape, dtype) in fields.items():
            length = math.prod(shape) * dtype.itemsize
            spans[name] = (size, size + length)
            size += -(-length // _ALIGNMENT) * _ALIGNMENT
        self._host = device.pinned((size,), torch.uint8)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in fields.items():
            start, stop = spans[name]
            self.host[name] = self._host[start:stop].view(dtype).view(shape).numpy()
            self.device[name] = self._device[start:stop].view(dtype).view(shape)

    def upload(self) -> None:
        """Enqueue the copy on the current stream; the host side must stay as it is until done."""
        self._device.copy_(self._host, non_blocking=True)
