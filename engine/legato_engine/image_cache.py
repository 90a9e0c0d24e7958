"""Prepared pictures by image id, least recently used first out."""

from __future__ import annotations

import collections
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class ImageCache(Generic[T]):
    """Holds at most `capacity` bytes of values; safe to use from several threads.

    A value larger than the whole capacity is not kept.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._entries: collections.OrderedDict[str, tuple[T, int]] = collections.OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, image_id: str) -> T | None:
        """The value, now the most recently used, or None."""
        with self._lock:
            entry = self._entries.get(image_id)
            if entry is None:
                return None
            self._entries.move_to_end(image_id)
            return entry[0]

    def put(self, image_id: str, value: T, num_bytes: int) -> None:
        """Keep `value`, which takes `num_bytes`; evicts until everything fits."""
        with self._lock:
            self._remove(image_id)
            if num_bytes > self._capacity:
                return
            self._entries[image_id] = (value, num_bytes)
            self.num_bytes += num_bytes
            while self.num_bytes > self._capacity:
                self._remove(next(iter(self._entries)))

    def _remove(self, image_id: str) -> None:
        _, num_bytes = self._entries.pop(image_id, (None, 0))
        self.num_bytes -= num_bytes
