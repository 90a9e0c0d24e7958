"""Memory for decoded pixels, and byte quotas."""

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

from legato_engine.config import EngineConfig
from legato_engine.errors import BytesExceeded


def image_quota(config: EngineConfig) -> ByteQuota:
    return ByteQuota("images", per_caller=config.image_quota_bytes, total=config.image_hold_bytes)


class ByteQuota:
    """Byte quota: `per_caller` bytes for each caller, `total` for all."""

    def __init__(self, name: str, *, per_caller: int, total: int) -> None:
        self._name = name
        self._per_caller = per_caller
        self._total = total
        self.reserved: collections.Counter[str] = collections.Counter()
        self.num_bytes = 0

    def reserve(self, caller: str, num_bytes: int, per_caller: int = 0) -> None:
        """Reserve all of `num_bytes` or nothing; `per_caller` replaces the limit of each caller.

        Raises:
            BytesExceeded: a limit would be exceeded.
        """
        limit = per_caller or self._per_caller
        self._check(caller, "per_caller", self.reserved[caller] + num_bytes, limit)
        self._check(caller, "total", self.num_bytes + num_bytes, self._total)
        self.reserved[caller] += num_bytes
        self.num_bytes += num_bytes

    def release(self, caller: str, num_bytes: int) -> None:
        assert num_bytes <= self.reserved[caller], f"{num_bytes} bytes were never reserved"
        self.reserved[caller] -= num_bytes
        self.num_bytes -= num_bytes
        if not self.reserved[caller]:
            del self.reserved[caller]

    def _check(self, caller: str, limit_name: str, actual: int, limit: int) -> None:
        if actual > limit:
            subject = "a caller" if limit_name == "per_caller" else "all callers together"
            raise BytesExceeded(
                f"{subject} may take {limit} bytes of {self._name}, this would make it {actual}",
                quota=f"{self._name}_bytes_{limit_name}",
                caller=caller,
                limit=limit,
                actual=actual,
            )


# ---------------------------------------------------------------- pixel memory

# Page faults of new memory cost a third to the whole of the decoding time (half a million pixels),
# so the process reuses a slab. The device reads from a page-locked slab without a copy.
#
# Shape legend: H and W pixels, C channels, N bytes.

Pixels = npt.NDArray[np.uint8]

Allocate = Callable[[tuple[int, int, int]], Pixels]
"""Returns an uninitialised array [H, W, C]."""

PAGE = 4096
"""Alignment of arrays in a slab, bytes."""


class _Extent(NamedTuple):
    start: int
    stop: int


class PixelMemory:
    """Allocator of arrays in a slab, freed with their last view; thread-safe.

    Takes the lowest free extent, so that the slab touches few pages.
    """

    def __init__(self, slab_N: Pixels) -> None:
        self._slab = slab_N.data
        self._lock = threading.Lock()
        self._free = [_Extent(0, len(self._slab))]  # ascending, never adjacent
        # Finalizers may run inside any code that drops the last view, so they must take no lock.
        self._freed: collections.deque[_Extent] = collections.deque()

    def allocate(self, shape: tuple[int, int, int]) -> Pixels:
        """Return an uninitialised array [H, W, C], outside of the slab if that is full."""
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
    return np.empty(shape, np.uint8)


def host_slab(num_bytes: int) -> Pixels:
    """Return pageable memory; the kernel commits its pages at first access."""
    return np.frombuffer(mmap.mmap(-1, max(PAGE, num_bytes)), np.uint8)
