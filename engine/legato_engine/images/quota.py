"""Bytes that callers take of something that all of them share."""

from __future__ import annotations

import collections

from legato_engine.config import EngineConfig
from legato_engine.errors import BytesExceeded


def image_quota(config: EngineConfig) -> ByteQuota:
    """What prepared pictures that are held may take."""
    return ByteQuota("images", per_caller=config.image_quota_bytes, total=config.image_hold_bytes)


class ByteQuota:
    """At most `per_caller` bytes for each caller, and `total` for all of them together."""

    def __init__(self, name: str, *, per_caller: int, total: int) -> None:
        self._name = name
        self._per_caller = per_caller
        self._total = total
        self._used: collections.Counter[str] = collections.Counter()
        self.num_bytes = 0

    def of(self, caller: str) -> int:
        """Bytes that the caller has taken."""
        return self._used[caller]

    def take(self, caller: str, num_bytes: int) -> None:
        """Raises `BytesExceeded`, and then nothing is taken."""
        self._check(caller, "per_caller", self._used[caller] + num_bytes, self._per_caller)
        self._check(caller, "total", self.num_bytes + num_bytes, self._total)
        self._used[caller] += num_bytes
        self.num_bytes += num_bytes

    def give_back(self, caller: str, num_bytes: int) -> None:
        """The caller needs no more than it has taken."""
        assert num_bytes <= self._used[caller], "gives back what it never took"
        self._used[caller] -= num_bytes
        self.num_bytes -= num_bytes
        if not self._used[caller]:
            del self._used[caller]

    def _check(self, caller: str, whose: str, actual: int, limit: int) -> None:
        if actual > limit:
            what = "a caller" if whose == "per_caller" else "all callers together"
            raise BytesExceeded(
                f"{what} may take {limit} bytes of {self._name}, this would make it {actual}",
                quota=f"{self._name}_bytes_{whose}",
                caller=caller,
                limit=limit,
                actual=actual,
            )
