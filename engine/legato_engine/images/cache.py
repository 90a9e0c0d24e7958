"""A cache of prepared images by id."""

from __future__ import annotations

import collections
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class ImageCache(Generic[T]):
    """An LRU cache of at most `capacity` bytes, with pinned values in addition; thread-safe.

    The caller bounds the size of what it pins. A value larger than `capacity` is kept only pinned.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[str, tuple[T, int]] = collections.OrderedDict()
        self._pinned: dict[str, T] = {}
        self.num_bytes = 0
        """Bytes that are not pinned."""

    def __len__(self) -> int:
        return len(self._entries) + len(self._pinned)

    def get(self, image_id: str) -> T | None:
        """Return the value and mark it as most recently used, or return None."""
        with self._lock:
            if image_id in self._pinned:
                return self._pinned[image_id]
            entry = self._entries.get(image_id)
            if entry is None:
                return None
            self._entries.move_to_end(image_id)
            return entry[0]

    def put(self, image_id: str, value: T, num_bytes: int) -> None:
        """Add a value of `num_bytes`, and evict others until all fit."""
        with self._lock:
            self._remove(image_id)
            if num_bytes > self._capacity or image_id in self._pinned:
                return
            self._entries[image_id] = (value, num_bytes)
            self.num_bytes += num_bytes
            while self.num_bytes > self._capacity:
                self._remove(next(iter(self._entries)))

    def pin(self, image_id: str, value: T) -> None:
        """Keep a value until it is removed."""
        with self._lock:
            self._remove(image_id)
            self._pinned[image_id] = value

    def remove(self, image_id: str) -> bool:
        """Remove a value, pinned or not; return whether there was one."""
        with self._lock:
            found = image_id in self._pinned or image_id in self._entries
            self._pinned.pop(image_id, None)
            self._remove(image_id)
            return found

    def _remove(self, image_id: str) -> None:
        _, num_bytes = self._entries.pop(image_id, (None, 0))
        self.num_bytes -= num_bytes
