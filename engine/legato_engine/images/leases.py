"""Leases of images, which pin them in the cache.

Several callers may lease one image. It is removed with its last lease, so that the expiry sent to a
caller is exact.
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
class _LeasedImage:
    """`expiries` are by owner, in monotonic seconds."""

    num_bytes: int
    expiries: dict[str, float] = dataclasses.field(default_factory=dict)


class ImageLeases(Generic[T]):
    """Pins images in `cache` while they are leased. Belongs to one thread."""

    def __init__(
        self, cache: ImageCache[T], quota: ByteQuota, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache = cache
        self._quota = quota
        self._clock = clock
        self._leased: dict[str, _LeasedImage] = {}
        self.next_expiry = math.inf
        """A monotonic time before which no lease expires."""

    @property
    def num_bytes(self) -> int:
        """Reserved by all owners; an image counts for each."""
        return self._quota.num_bytes

    def hold(self, image_id: str, value: T, num_bytes: int, owner: str, ttl: float) -> float:
        """Lease an image for `ttl` seconds, or extend the owner's lease; return its expiry.

        Raises:
            BytesExceeded: the owner's quota or the total is used up.
        """
        leased = self._leased.get(image_id)
        if leased is None or owner not in leased.expiries:
            self._quota.reserve(owner, num_bytes if leased is None else leased.num_bytes)
        if leased is None:
            leased = self._leased[image_id] = _LeasedImage(num_bytes)
            self._cache.pin(image_id, value)
        expiry = self._clock() + ttl
        leased.expiries[owner] = expiry = max(expiry, leased.expiries.get(owner, expiry))
        self.next_expiry = min(self.next_expiry, expiry)
        return expiry

    def drop(self, image_id: str, owner: str) -> None:
        """End the owner's lease, or remove a cached image without a lease.

        Raises:
            ImageNotFound: the image is unknown, or leased by others.
        """
        leased = self._leased.get(image_id)
        if leased is not None and owner in leased.expiries:
            self._release(image_id, owner)
        elif leased is not None or not self._cache.remove(image_id):
            raise ImageNotFound("this image is not held", resource=image_id)

    def expire(self) -> None:
        now = self._clock()
        if now < self.next_expiry:
            return
        expired = [
            (image_id, owner)
            for image_id, leased in self._leased.items()
            for owner, expiry in leased.expiries.items()
            if expiry <= now
        ]
        for image_id, owner in expired:
            self._release(image_id, owner)
        left = (expiry for leased in self._leased.values() for expiry in leased.expiries.values())
        self.next_expiry = min(left, default=math.inf)

    def _release(self, image_id: str, owner: str) -> None:
        leased = self._leased[image_id]
        del leased.expiries[owner]
        self._quota.release(owner, leased.num_bytes)
        if not leased.expiries:
            del self._leased[image_id]
            self._cache.remove(image_id)
