"""Named host fields that reach the device in one copy."""

from __future__ import annotations

import math

import numpy as np
import torch

from legato_engine.device.base import Device, Stream

_ALIGNMENT = 16

Fields = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and types by name."""


class StagingBuffer:
    """Fields packed into one pinned buffer and one device buffer.

    `hosts` are `copies` host sides, to fill one while another uploads; `host` is the first.
    `device_bytes` has all fields.
    """

    def __init__(
        self,
        device: Device,
        fields: Fields,
        *,
        copies: int = 1,
    ) -> None:
        self._fields = fields
        self._starts: dict[str, int] = {}
        size = 0
        for name, (shape, dtype) in fields.items():
            self._starts[name] = size
            size += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._hosts = [device.pinned((size,), torch.uint8) for _ in range(copies)]
        self.device_bytes = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
        self.device = self._split(self.device_bytes)
        self.hosts = [self.views(host) for host in self._hosts]
        self.host = self.hosts[0]

    def views(self, host_bytes: torch.Tensor) -> dict[str, np.ndarray]:
        """The fields of a copy of `device_bytes`."""
        return {name: field.numpy() for name, field in self._split(host_bytes).items()}

    def _split(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = {}
        for name, (shape, dtype) in self._fields.items():
            start = self._starts[name]
            stop = start + math.prod(shape) * dtype.itemsize
            parts[name] = whole[start:stop].view(dtype).view(shape)
        return parts

    def upload(self, stream: Stream, copy: int = 0) -> None:
        """The host side must not change until the copy is done."""
        stream.copy(self.device_bytes, self._hosts[copy])

    def download(self, stream: Stream) -> None:
        stream.copy(self._hosts[0], self.device_bytes)
