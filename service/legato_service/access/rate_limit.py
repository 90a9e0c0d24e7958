"""A limit of a rate."""

from __future__ import annotations

import time
from collections.abc import Callable

from legato_engine.errors import QuotaExceeded

WINDOW = 1.0  # seconds' worth of the rate that may come at once


_ROUNDING = 1e-6  # seconds


class RateLimit:
    """At most `rate` units a second, those of `WINDOW` seconds at once.

    More units than that are taken at once after a pause, and paid for by a longer one: a large
    image passes under a small rate. It is the virtual scheduling form of a token bucket, which
    keeps one number: the time at which everything that was taken is paid for.
    """

    def __init__(
        self, quota: str, rate: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.quota = quota
        self.rate = rate
        self._clock = clock
        self._paid_at = 0.0

    def take(self, amount: float, credential: str) -> None:
        """Take units.

        Raises:
            QuotaExceeded: the rate is exceeded; it says after how long this would be possible.
        """
        now = self._clock()
        cost = amount / self.rate
        wait = self._paid_at - now - max(0.0, WINDOW - cost)
        if wait > _ROUNDING:
            raise QuotaExceeded(
                f"a credential may take {self.rate:g} {self.quota.replace('_', ' ')}",
                quota=self.quota,
                credential=credential,
                limit=f"{self.rate:g}",
                actual=f"{amount:g}",
                retry_after_ms=max(1, round(wait * 1000)),
            )
        self._paid_at = max(self._paid_at, now) + cost
