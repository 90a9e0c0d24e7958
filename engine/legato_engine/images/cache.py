"""Cache of prepared images, with leases."""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from legato_engine.errors import ImageNotFound
from legato_engine.images.memory import ByteQuota

_PART = 512  # bytes
_MAX = 16_384  # fingerprints kept, about 100 bytes each


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


class SeenImages:
    """Fingerprints of each tenant's latest images, by size and sampled bytes; thread-safe."""

    def __init__(self) -> None:
        self._seen = ImageCache[int, bool](_MAX)

    def add(self, tenant: str, data: memoryview) -> None:
        self._seen.put(_fingerprint(tenant, data), True, 1)

    def has(self, tenant: str, data: memoryview) -> bool:
        return self._seen.get(_fingerprint(tenant, data)) is not None


def _fingerprint(tenant: str, data: memoryview) -> int:
    middle = len(data) // 2
    parts = (data[:_PART], data[middle : middle + _PART], data[-_PART:])
    return hash((tenant, len(data), *map(bytes, parts)))


# ---------------------------------------------------------------- leases

# Several callers may lease one image. It is removed with its last lease, so the expiry sent to a
# caller is exact.


@dataclasses.dataclass(slots=True, eq=False)
class _LeasedImage:
    """A leased image; `expiries` are by owner, in monotonic seconds."""

    num_bytes: int
    expiries: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class ImageLeases(Generic[T]):
    """Leases that pin images in `cache`; belongs to one thread."""

    cache: ImageCache[ImageKey, T]
    quota: ByteQuota
    clock: Callable[[], float] = time.monotonic
    next_expiry: float = math.inf
    """A monotonic time before which no lease expires."""

    _leased: dict[ImageKey, _LeasedImage] = dataclasses.field(default_factory=dict, init=False)

    @property
    def num_bytes(self) -> int:
        """Reserved by all owners; an image counts for each."""
        return self.quota.num_bytes

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
            self.quota.reserve(owner, num_reserved, quota_bytes)
        if leased is None:
            leased = self._leased[key] = _LeasedImage(num_bytes)
            self.cache.pin(key, value)
        expiry = self.clock() + ttl
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
        elif leased is not None or not self.cache.remove(key):
            raise ImageNotFound("this image is not held", resource=key.image_id)

    def expire(self) -> None:
        now = self.clock()
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
        self.quota.release(owner, leased.num_bytes)
        if not leased.expiries:
            del self._leased[key]
            self.cache.remove(key)
