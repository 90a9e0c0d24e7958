"""Fingerprints of images."""

from __future__ import annotations

import collections
import threading

_PART = 512  # bytes
_MAX = 16_384  # fingerprints kept, about 100 bytes each


class SeenImages:
    """Remembers each tenant's latest images by size and some of their bytes; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: collections.OrderedDict[int, None] = collections.OrderedDict()

    def add(self, tenant: str, data: memoryview) -> None:
        fingerprint = _fingerprint(tenant, data)
        with self._lock:
            self._seen[fingerprint] = None
            self._seen.move_to_end(fingerprint)
            if len(self._seen) > _MAX:
                self._seen.popitem(last=False)

    def has(self, tenant: str, data: memoryview) -> bool:
        return _fingerprint(tenant, data) in self._seen


def _fingerprint(tenant: str, data: memoryview) -> int:
    middle = len(data) // 2
    parts = (data[:_PART], data[middle : middle + _PART], data[-_PART:])
    return hash((tenant, len(data), *map(bytes, parts)))
