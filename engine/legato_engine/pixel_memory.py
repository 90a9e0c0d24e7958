"""Memory for pixels that is used again.

The first touch of memory costs the kernel a fault and a cleared page: for a picture of half a
million pixels between a third and the whole of what decoding it costs. So blocks that pictures have
left are kept, and behind a picture that found none, one of its size is made ready.

Shape legend: H and W pixels, C channels.
"""

from __future__ import annotations

import collections
import math
import mmap
import threading
import weakref

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

SMALLEST = 64 * 1024
"""Bytes of the smallest block."""

SPARE_BYTES = 64 * 1024 * 1024
"""Bytes of blocks that are kept without a picture in them."""


class PixelMemory:
    """Arrays over blocks that come back by themselves. Safe for several threads."""

    def __init__(self, spare_bytes: int = SPARE_BYTES) -> None:
        self._spare_bytes = spare_bytes
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []  # the longest unused first
        # Finalizers run wherever the last view goes, in the middle of anything: they take no lock.
        self._returned: collections.deque[mmap.mmap] = collections.deque()

    def take(self, shape: tuple[int, int, int]) -> Pixels:
        """[H, W, C] of unknown content; its block is free again when no view of it is left."""
        num_bytes = math.prod(shape)
        size = block_size(num_bytes)
        block = self._find(size) or mmap.mmap(-1, size)
        bytes_N = np.frombuffer(block, np.uint8)  # the base of every view
        weakref.finalize(bytes_N, self._returned.append, block).atexit = False
        return bytes_N[:num_bytes].reshape(shape)

    def make_ready(self, shape: tuple[int, int, int]) -> None:
        """Touch a new block for the next picture of this shape, unless one is free."""
        size = block_size(math.prod(shape))
        block = self._find(size)
        if block is None:
            block = mmap.mmap(-1, size)
            np.frombuffer(block, np.uint8).fill(0)
        self._returned.append(block)

    def _find(self, size: int) -> mmap.mmap | None:
        """The free block of this size that was used last."""
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            excess = sum(map(len, self._free)) - self._spare_bytes
            while excess > 0:
                excess -= len(self._free.pop(0))
            for index in reversed(range(len(self._free))):
                if len(self._free[index]) == size:
                    return self._free.pop(index)
            return None


def block_size(num_bytes: int) -> int:
    """Bytes of the block for so many: at most a quarter more, so that close sizes share blocks."""
    step = 1 << max(0, (num_bytes - 1).bit_length() - 3)
    return max(SMALLEST, -(-num_bytes // step) * step)
