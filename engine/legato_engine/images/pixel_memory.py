"""Reused memory for decoded pixels.

The first access to new memory costs a third to the whole of the decoding time (page faults; half a
million pixels), so the process keeps a slab. From a page-locked slab, the device reads images
without a copy.

Shape legend: H and W pixels, C channels, N bytes.
"""

from __future__ import annotations

import bisect
import collections
import math
import mmap
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

Allocate = Callable[[tuple[int, int, int]], Pixels]
"""Returns an uninitialised array [H, W, C]."""

PAGE = 4096
"""Alignment of arrays in a slab, bytes."""


class _Extent(NamedTuple):
    start: int
    stop: int


class PixelMemory:
    """Allocates arrays in a slab and frees them with their last view; thread-safe.

    Takes the lowest free extent, so that the slab touches no more pages than were in use at once.
    """

    def __init__(self, slab_N: Pixels) -> None:
        self._slab = slab_N.data
        self._lock = threading.Lock()
        self._free = [_Extent(0, len(self._slab))]  # ascending, never adjacent
        # Finalizers may run inside any code that drops the last view, so they must take no lock.
        self._freed: collections.deque[_Extent] = collections.deque()

    def allocate(self, shape: tuple[int, int, int]) -> Pixels:
        """Return an uninitialised array [H, W, C], freed with its last view.

        Falls back to memory outside of the slab if no free extent is large enough.
        """
        num_bytes = math.prod(shape)
        extent = self._take(-(-num_bytes // PAGE) * PAGE)
        if extent is None:
            return new_pixels(shape)
        part = self._slab[extent.start : extent.start + num_bytes]
        bytes_N = np.frombuffer(part, np.uint8)  # base of all views
        weakref.finalize(bytes_N, self._freed.append, extent).atexit = False
        return bytes_N.reshape(shape)

    @property
    def free_bytes(self) -> int:
        """Free bytes of the slab."""
        with self._lock:
            self._merge_freed()
            return sum(extent.stop - extent.start for extent in self._free)

    def _take(self, size: int) -> _Extent | None:
        with self._lock:
            self._merge_freed()
            for index, (start, stop) in enumerate(self._free):
                if stop - start >= size:
                    rest = [_Extent(start + size, stop)] if stop - start > size else []
                    self._free[index : index + 1] = rest
                    return _Extent(start, start + size)
            return None

    def _merge_freed(self) -> None:
        while self._freed:
            extent = self._freed.popleft()
            at = bisect.bisect(self._free, extent)
            first, last = at, at
            if at > 0 and self._free[at - 1].stop == extent.start:
                first, extent = at - 1, _Extent(self._free[at - 1].start, extent.stop)
            if at < len(self._free) and self._free[at].start == extent.stop:
                last, extent = at + 1, _Extent(extent.start, self._free[at].stop)
            self._free[first:last] = [extent]


def new_pixels(shape: tuple[int, int, int]) -> Pixels:
    """Allocate memory outside of any slab."""
    return np.empty(shape, np.uint8)


def host_slab(num_bytes: int) -> Pixels:
    """Return pageable memory for a `PixelMemory`; the kernel commits its pages at first access."""
    return np.frombuffer(mmap.mmap(-1, max(PAGE, num_bytes)), np.uint8)
