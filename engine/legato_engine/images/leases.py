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
from legato_engine.images.cache import ImageCache, ImageKey
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
        self,
        cache: ImageCache[ImageKey, T],
        quota: ByteQuota,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._quota = quota
        self._clock = clock
        self._leased: dict[ImageKey, _LeasedImage] = {}
        self.next_expiry = math.inf
        """A monotonic time before which no lease expires."""

    @property
    def num_bytes(self) -> int:
        """Reserved by all owners; an image counts for each."""
        return self._quota.num_bytes

    def hold(
        self,
        key: ImageKey,
        value: T,
        num_bytes: int,
        owner: str,
        ttl: float,
        quota_bytes: int = 0,
    ) -> float:
        """Lease an image for `ttl` seconds, or extend the owner's lease; return its expiry.

        `quota_bytes` replaces the quota of each owner.

        Raises:
            BytesExceeded: the owner's quota or the total is used up.
        """
        leased = self._leased.get(key)
        if leased is None or owner not in leased.expiries:
            num_reserved = num_bytes if leased is None else leased.num_bytes
            self._quota.reserve(owner, num_reserved, quota_bytes)
        if leased is None:
            leased = self._leased[key] = _LeasedImage(num_bytes)
            self._cache.pin(key, value)
        expiry = self._clock() + ttl
        leased.expiries[owner] = expiry = max(expiry, leased.expiries.get(owner, expiry))
        self.next_expiry = min(self.next_expiry, expiry)
        return expiry

    def drop(self, key: ImageKey, owner: str) -> None:
        """End the owner's lease, or remove a cached image without a lease.

        Raises:
            ImageNotFound: the image is unknown, or leased by others.
        """
        leased = self._leased.get(key)
        if leased is not None and owner in leased.expiries:
            self._release(key, owner)
        elif leased is not None or not self._cache.remove(key):
            raise ImageNotFound("this image is not held", resource=key.image_id)

    def expire(self) -> None:
        now = self._clock()
        if now < self.next_expiry:
            return
        expired = [
            (key, owner)
            for key, leased in self._leased.items()
            for owner, expiry in leased.expiries.items()
            if expiry <= now
        ]
        for key, owner in expired:
            self._release(key, owner)
        left = (expiry for leased in self._leased.values() for expiry in leased.expiries.values())
        self.next_expiry = min(left, default=math.inf)

    def _release(self, key: ImageKey, owner: str) -> None:
        leased = self._leased[key]
        del leased.expiries[owner]
        self._quota.release(owner, leased.num_bytes)
        if not leased.expiries:
            del self._leased[key]
            self._cache.remove(key)
