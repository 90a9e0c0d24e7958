"""Memory for pixels that is used again.

The first touch of memory costs the kernel a fault and a cleared page: for a picture of half a
million pixels between a third and the whole of what decoding it costs. So pictures lie in a slab
that the process keeps. Where it is page-locked the device reads them there, without a copy.

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

Take = Callable[[tuple[int, int, int]], Pixels]
"""Gives [H, W, C] of unknown content."""

PAGE = 4096
"""Pictures begin at multiples of so many bytes."""


class _Extent(NamedTuple):
    start: int
    stop: int


class PixelMemory:
    """Arrays in a slab, whose parts come back by themselves. Safe for several threads.

    What was used last is not preferred, but what lies lowest: a slab whose pages come with their
    first touch takes no more of them than there were pictures at a time.
    """

    def __init__(self, slab_N: Pixels) -> None:
        self._slab = slab_N.data
        self._lock = threading.Lock()
        self._free = [_Extent(0, len(self._slab))]  # rising, none touches the next
        # Finalizers run wherever the last view goes, in the middle of anything: they take no lock.
        self._returned: collections.deque[_Extent] = collections.deque()

    def take(self, shape: tuple[int, int, int]) -> Pixels:
        """[H, W, C] of unknown content, free again when no view of it is left.

        Beside the slab when nothing in it is large enough.
        """
        num_bytes = math.prod(shape)
        extent = self._find(-(-num_bytes // PAGE) * PAGE)
        if extent is None:
            return new_pixels(shape)
        part = self._slab[extent.start : extent.start + num_bytes]
        bytes_N = np.frombuffer(part, np.uint8)  # the base of every view
        weakref.finalize(bytes_N, self._returned.append, extent).atexit = False
        return bytes_N.reshape(shape)

    @property
    def free_bytes(self) -> int:
        """Bytes of the slab without a picture."""
        with self._lock:
            self._gather()
            return sum(extent.stop - extent.start for extent in self._free)

    def _find(self, size: int) -> _Extent | None:
        """Take the lowest free part that is large enough."""
        with self._lock:
            self._gather()
            for index, (start, stop) in enumerate(self._free):
                if stop - start >= size:
                    rest = [_Extent(start + size, stop)] if stop - start > size else []
                    self._free[index : index + 1] = rest
                    return _Extent(start, start + size)
            return None

    def _gather(self) -> None:
        """Join what came back with what is free beside it."""
        while self._returned:
            extent = self._returned.popleft()
            at = bisect.bisect(self._free, extent)
            first, last = at, at
            if at > 0 and self._free[at - 1].stop == extent.start:
                first, extent = at - 1, _Extent(self._free[at - 1].start, extent.stop)
            if at < len(self._free) and self._free[at].start == extent.stop:
                last, extent = at + 1, _Extent(extent.start, self._free[at].stop)
            self._free[first:last] = [extent]


def new_pixels(shape: tuple[int, int, int]) -> Pixels:
    """A `Take` of memory of its own."""
    return np.empty(shape, np.uint8)


def host_slab(num_bytes: int) -> Pixels:
    """Ordinary memory for a `PixelMemory`; a page is the process's once it is touched."""
    return np.frombuffer(mmap.mmap(-1, max(PAGE, num_bytes)), np.uint8)
