"""Which pictures may have been seen before, told from a few of their bytes."""

from __future__ import annotations

import collections
import threading

_PART = 512  # bytes, at the beginning, behind the middle and at the end
_MAX = 16_384  # remembered; some 100 bytes each


class SeenImages:
    """Remembers the last pictures by their size and some of their bytes; safe for several threads.

    One that is not remembered is new, unless it was long ago. One that is may be another that
    looks like it, which only a hash of all its bytes tells.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: collections.OrderedDict[int, None] = collections.OrderedDict()

    def add(self, data: memoryview) -> None:
        """This picture has been seen, and is now the last one."""
        glimpse = _glimpse(data)
        with self._lock:
            self._seen[glimpse] = None
            self._seen.move_to_end(glimpse)
            if len(self._seen) > _MAX:
                self._seen.popitem(last=False)

    def __contains__(self, data: memoryview) -> bool:
        """Whether one like it was seen."""
        return _glimpse(data) in self._seen


def _glimpse(data: memoryview) -> int:
    middle = len(data) // 2
    parts = (data[:_PART], data[middle : middle + _PART], data[-_PART:])
    return hash((len(data), *map(bytes, parts)))
