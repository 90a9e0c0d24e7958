"""Which pictures callers hold, and until when.

Callers who hold the same picture share it, and each has a time and a quota of its own. A picture
that nobody holds any more is gone at once, so that what a caller is told of its end is true.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from legato_engine.errors import ImageNotFound
from legato_engine.images.cache import ImageCache
from legato_engine.images.quota import ByteQuota

T = TypeVar("T")


@dataclasses.dataclass(slots=True, eq=False)
class _Held:
    """A pinned picture's bytes, and until when each caller holds it (monotonic seconds)."""

    num_bytes: int
    until: dict[str, float] = dataclasses.field(default_factory=dict)


class ImageLeases(Generic[T]):
    """Pins pictures in `cache` for as long as callers hold them. Belongs to one thread."""

    def __init__(
        self, cache: ImageCache[T], quota: ByteQuota, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache = cache
        self._quota = quota
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self.next_expiry = math.inf
        """When `expire` is due, monotonic seconds; it may turn out that nothing ends then."""

    def hold(self, image_id: str, value: T, num_bytes: int, owner: str, ttl: float) -> float:
        """Until when `owner` holds the picture now: never shorter than it did already.

        Raises `BytesExceeded`.
        """
        held = self._held.get(image_id)
        if held is None or owner not in held.until:
            self._quota.take(owner, num_bytes if held is None else held.num_bytes)
        if held is None:
            held = self._held[image_id] = _Held(num_bytes)
            self._cache.pin(image_id, value)
        until = self._clock() + ttl
        held.until[owner] = until = max(until, held.until.get(owner, until))
        self.next_expiry = min(self.next_expiry, until)
        return until

    def drop(self, image_id: str, owner: str) -> None:
        """End `owner`'s hold, or forget a picture that nobody holds. Raises `ImageNotFound`."""
        held = self._held.get(image_id)
        if held is not None and owner in held.until:
            self._release(image_id, owner)
        elif held is not None or not self._cache.remove(image_id):
            raise ImageNotFound("this image is not held", resource=image_id)

    def expire(self) -> None:
        """Let go what is over."""
        now = self._clock()
        if now < self.next_expiry:
            return
        over = [
            (image_id, owner)
            for image_id, held in self._held.items()
            for owner, until in held.until.items()
            if until <= now
        ]
        for image_id, owner in over:
            self._release(image_id, owner)
        ends = (until for held in self._held.values() for until in held.until.values())
        self.next_expiry = min(ends, default=math.inf)

    def _release(self, image_id: str, owner: str) -> None:
        held = self._held[image_id]
        del held.until[owner]
        self._quota.give_back(owner, held.num_bytes)
        if not held.until:
            del self._held[image_id]
            self._cache.remove(image_id)
