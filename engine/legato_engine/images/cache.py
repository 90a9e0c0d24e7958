"""Prepared pictures by image id: some pinned, of the others the least recently used first out."""

from __future__ import annotations

import collections
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class ImageCache(Generic[T]):
    """Holds what is pinned and at most `capacity` bytes besides; safe for several threads.

    A value larger than the whole capacity is kept only when it is pinned. Who pins bounds how much.
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
        """The value, now the most recently used, or None."""
        with self._lock:
            if image_id in self._pinned:
                return self._pinned[image_id]
            entry = self._entries.get(image_id)
            if entry is None:
                return None
            self._entries.move_to_end(image_id)
            return entry[0]

    def put(self, image_id: str, value: T, num_bytes: int) -> None:
        """Keep `value`, which takes `num_bytes`; evicts until everything fits."""
        with self._lock:
            self._remove(image_id)
            if num_bytes > self._capacity or image_id in self._pinned:
                return
            self._entries[image_id] = (value, num_bytes)
            self.num_bytes += num_bytes
            while self.num_bytes > self._capacity:
                self._remove(next(iter(self._entries)))

    def pin(self, image_id: str, value: T) -> None:
        """Keep `value` until it is removed."""
        with self._lock:
            self._remove(image_id)
            self._pinned[image_id] = value

    def remove(self, image_id: str) -> bool:
        """Forget a value, pinned or not; whether it was there."""
        with self._lock:
            known = image_id in self._pinned or image_id in self._entries
            self._pinned.pop(image_id, None)
            self._remove(image_id)
            return known

    def _remove(self, image_id: str) -> None:
        _, num_bytes = self._entries.pop(image_id, (None, 0))
        self.num_bytes -= num_bytes
