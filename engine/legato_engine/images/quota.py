"""Byte quotas per caller and in total."""

from __future__ import annotations

import collections

from legato_engine.config import EngineConfig
from legato_engine.errors import BytesExceeded


def image_quota(config: EngineConfig) -> ByteQuota:
    return ByteQuota("images", per_caller=config.image_quota_bytes, total=config.image_hold_bytes)


class ByteQuota:
    """At most `per_caller` bytes for each caller, and `total` for all."""

    def __init__(self, name: str, *, per_caller: int, total: int) -> None:
        self._name = name
        self._per_caller = per_caller
        self._total = total
        self._reserved: collections.Counter[str] = collections.Counter()
        self.num_bytes = 0

    def reserved_by(self, caller: str) -> int:
        return self._reserved[caller]

    def reserve(self, caller: str, num_bytes: int, per_caller: int = 0) -> None:
        """Reserve all of `num_bytes` or nothing; `per_caller` replaces the limit of each caller.

        Raises:
            BytesExceeded: a limit would be exceeded.
        """
        limit = per_caller or self._per_caller
        self._check(caller, "per_caller", self._reserved[caller] + num_bytes, limit)
        self._check(caller, "total", self.num_bytes + num_bytes, self._total)
        self._reserved[caller] += num_bytes
        self.num_bytes += num_bytes

    def release(self, caller: str, num_bytes: int) -> None:
        assert num_bytes <= self._reserved[caller], f"{num_bytes} bytes were never reserved"
        self._reserved[caller] -= num_bytes
        self.num_bytes -= num_bytes
        if not self._reserved[caller]:
            del self._reserved[caller]

    def _check(self, caller: str, limit_name: str, actual: int, limit: int) -> None:
        if actual > limit:
            subject = "a caller" if limit_name == "per_caller" else "all callers together"
            raise BytesExceeded(
                f"{subject} may take {limit} bytes of {self._name}, this would make it {actual}",
                quota=f"{self._name}_bytes_{limit_name}",
                caller=caller,
                limit=limit,
                actual=actual,
            )
