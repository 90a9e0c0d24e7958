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
    """

    def __init__(
        self,
        device: Device,
        fields: Fields,
        *,
        copies: int = 1,
    ) -> None:
        spans: dict[str, tuple[int, int]] = {}
        size = 0
        for name, (shape, dtype) in fields.items():
            length = math.prod(shape) * dtype.itemsize
            spans[name] = (size, size + length)
            size += -(-length // _ALIGNMENT) * _ALIGNMENT
        self._hosts = [device.pinned((size,), torch.uint8) for _ in range(copies)]
        self._device = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
        self.device: dict[str, torch.Tensor] = {}
        self.hosts: list[dict[str, np.ndarray]] = [{} for _ in range(copies)]
        for name, (shape, dtype) in fields.items():
            start, stop = spans[name]
            self.device[name] = self._device[start:stop].view(dtype).view(shape)
            for host, views in zip(self._hosts, self.hosts, strict=True):
                views[name] = host[start:stop].view(dtype).view(shape).numpy()
        self.host = self.hosts[0]

    def upload(self, stream: Stream, copy: int = 0) -> None:
        """The host side must not change until the copy is done."""
        stream.copy(self._device, self._hosts[copy])

    def download(self, stream: Stream) -> None:
        stream.copy(self._hosts[0], self._device)
