"""Pinned host buffers and the ring of loop tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from legato_engine.device.base import Device, Stream
from legato_engine.kernels.decode_loop import DONE, STOP

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
        """Return the fields of a copy of `device_bytes`."""
        return {name: field.numpy() for name, field in self._split(host_bytes).items()}

    def _split(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        parts, start = {}, 0
        for name, (shape, dtype) in self._fields.items():
            stop = start + math.prod(shape) * dtype.itemsize
            parts[name] = whole[start:stop].view(dtype).view(shape)
            start += _padded(shape, dtype)
        return parts

    def upload(self, stream: Stream, copy: int = 0) -> None:
        """Enqueue the copy to the device; the host side must not change until it is done."""
        stream.copy(self.device_bytes, self._hosts[copy])

    def upload_from(self, first: StagingBuffer, stream: Stream) -> None:
        """Upload everything from `first` up to this buffer in one copy."""
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
    return sum(_padded(*each) for each in fields.values())


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


# ---------------------------------------------------------------- token ring

# Shape legend: S steps, N bytes of a step's outputs, B tokens.


class TokenRing:
    """Page-locked memory that the device writes while the host reads it; one loop at a time."""

    def __init__(self, device: Device, outputs: StagingBuffer, *, max_steps: int) -> None:
        """Each step has copies of all fields of `outputs`."""
        self.ring_SN = device.pinned((max_steps, len(outputs.device_bytes)), torch.uint8)
        self.words = device.pinned((2,), torch.int64)
        self.fields = {name: self._field(outputs, name) for name in outputs.device}
        """Of all steps, by name; a step's are one after the other."""
        self._steps = [outputs.views(step_N) for step_N in self.ring_SN]
        self._words = self.words.numpy()
        self._num_read = 0

    def _field(self, outputs: StagingBuffer, name: str) -> torch.Tensor:
        field = outputs.device[name]
        first = field.data_ptr() - outputs.device_bytes.data_ptr()
        whole = self.ring_SN[:, first : first + field.nbytes].view(field.dtype)
        return whole.view(len(whole), *field.shape)

    def reset(self) -> None:
        """No loop may be in flight."""
        self._words[:] = 0
        self._num_read = 0

    def stop(self) -> None:
        self._words[STOP] = 1

    def read(self) -> Mapping[str, np.ndarray] | None:
        """Return the next step's outputs, valid until the next loop; None if not there yet."""
        if int(self._words[DONE]) == self._num_read:
            return None
        self._num_read += 1
        return self._steps[self._num_read - 1]
