"""Image bytes that may have been seen before, by fingerprint."""

from __future__ import annotations

import collections
import threading

_PART = 512  # bytes at the start, after the middle and at the end
_MAX = 16_384  # fingerprints kept, about 100 bytes each


class SeenImages:
    """Remembers the latest images by size and some of their bytes; thread-safe.

    An image in here may be another one with the same fingerprint; one that is not is new, or old.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: collections.OrderedDict[int, None] = collections.OrderedDict()

    def add(self, data: memoryview) -> None:
        """Add an image as the latest one."""
        fingerprint = _fingerprint(data)
        with self._lock:
            self._seen[fingerprint] = None
            self._seen.move_to_end(fingerprint)
            if len(self._seen) > _MAX:
                self._seen.popitem(last=False)

    def __contains__(self, data: memoryview) -> bool:
        return _fingerprint(data) in self._seen


def _fingerprint(data: memoryview) -> int:
    middle = len(data) // 2
    parts = (data[:_PART], data[middle : middle + _PART], data[-_PART:])
    return hash((len(data), *map(bytes, parts)))
