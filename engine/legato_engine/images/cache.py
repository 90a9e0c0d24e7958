"""A cache of prepared images."""

from __future__ import annotations

import collections
import threading
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class ImageKey(NamedTuple):
    """The key of an image: an id says nothing outside of its tenant."""

    tenant: str
    image_id: str


class ImageCache(Generic[K, T]):
    """An LRU cache of at most `capacity` bytes, with pinned values in addition; thread-safe.

    The caller bounds what it pins.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[K, tuple[T, int]] = collections.OrderedDict()
        self._pinned: dict[K, T] = {}
        self.num_bytes = 0
        """Bytes that are not pinned."""

    def __len__(self) -> int:
        return len(self._entries) + len(self._pinned)

    def get(self, key: K) -> T | None:
        with self._lock:
            if key in self._pinned:
                return self._pinned[key]
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: K, value: T, num_bytes: int) -> None:
        with self._lock:
            self._remove(key)
            if num_bytes > self._capacity or key in self._pinned:
                return
            self._entries[key] = (value, num_bytes)
            self.num_bytes += num_bytes
            while self.num_bytes > self._capacity:
                self._remove(next(iter(self._entries)))

    def pin(self, key: K, value: T) -> None:
        with self._lock:
            self._remove(key)
            self._pinned[key] = value

    def remove(self, key: K) -> bool:
        """Remove a value, pinned or not; return whether there was one."""
        with self._lock:
            found = key in self._pinned or key in self._entries
            self._pinned.pop(key, None)
            self._remove(key)
            return found

    def _remove(self, key: K) -> None:
        _, num_bytes = self._entries.pop(key, (None, 0))
        self.num_bytes -= num_bytes
