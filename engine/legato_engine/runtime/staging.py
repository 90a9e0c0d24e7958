"""Named host fields that reach the device in one copy."""

from __future__ import annotations

import math

import numpy as np
import torch

from legato_engine.device.base import Device, Stream

_ALIGNMENT = 16

Fields = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and types by name."""


class StagingRoom:
    """Memory of host and device for buffers beside each other."""

    def __init__(self, device: Device, size: int) -> None:
        self.host = device.pinned((size,), torch.uint8)
        self.device = torch.zeros(size, dtype=torch.uint8, device=device.torch_device)
        self.used = 0


class StagingBuffer:
    """Fields packed into one pinned buffer and one device buffer.

    `hosts` are `copies` host sides, to fill one while another uploads; `host` is the first.
    `device_bytes` has all fields. In a `room` it comes after the buffers that are there.
    """

    def __init__(
        self,
        device: Device,
        fields: Fields,
        *,
        copies: int = 1,
        room: StagingRoom | None = None,
    ) -> None:
        self._fields = fields
        size = size_of(fields)
        self._room = room or StagingRoom(device, size)
        self._start, self._stop = self._room.used, self._room.used + size
        assert self._stop <= len(self._room.host), "more than the room"
        self._room.used = self._stop
        self._from: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.device_bytes, host_bytes = self._both_from(self._start)
        more = [device.pinned((size,), torch.uint8) for _ in range(copies - 1)]
        self._hosts = [host_bytes, *more]
        self.device = self._split(self.device_bytes)
        self.hosts = [self.views(host) for host in self._hosts]
        self.host = self.hosts[0]

    def views(self, host_bytes: torch.Tensor) -> dict[str, np.ndarray]:
        """The fields of a copy of `device_bytes`."""
        return {name: field.numpy() for name, field in self._split(host_bytes).items()}

    def _split(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        parts, start = {}, 0
        for name, (shape, dtype) in self._fields.items():
            stop = start + math.prod(shape) * dtype.itemsize
            parts[name] = whole[start:stop].view(dtype).view(shape)
            start += _padded(shape, dtype)
        return parts

    def upload(self, stream: Stream, copy: int = 0) -> None:
        """The host side must not change until the copy is done."""
        stream.copy(self.device_bytes, self._hosts[copy])

    def upload_from(self, first: StagingBuffer, stream: Stream) -> None:
        """As one copy, what is in the room from `first` up to this buffer's first host side."""
        assert first._room is self._room, "a buffer of another room"
        stream.copy(*self._both_from(first._start))

    def download(self, stream: Stream) -> None:
        stream.copy(self._hosts[0], self.device_bytes)

    def _both_from(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        if start not in self._from:
            part = slice(start, self._stop)
            self._from[start] = self._room.device[part], self._room.host[part]
        return self._from[start]


def size_of(fields: Fields) -> int:
    """Bytes of a buffer of these fields."""
    return sum(_padded(*each) for each in fields.values())


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
